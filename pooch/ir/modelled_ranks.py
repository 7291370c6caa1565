"""What a profile of one rank of several says about them, if all of them are modelled. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ShardingKind = Literal["fsdp", "ddp"]

# What the signature of the model begins with: no model has such a signature, so that no plan for it is ever applied.
_MARK = "one of "


@dataclass(frozen=True, slots=True)
class ModelledRanks:
    """Several processes with a device each, of which a profile shows one. None of them was run.

    Attributes:
        kind: "fsdp": parameters, gradients and optimizer state are divided among the ranks, as by FSDP2; "ddp": each
            rank has all of them.
        ranks: number of processes.
        units: number of units whose parameters are gathered together, the root included; 0 for "ddp".
        state_bytes: parameters and optimizer state that the rank holds.
        gradient_bytes: gradients that it holds at the end of the step.
        buffer_bytes: most bytes at once of gathered parameters and of the buffers of collectives.
        peak_buffer_bytes: of these, those at the in-core peak.
        collective_ms: sum of the times of all collectives.
        waiting_ms: time of the step in which the device waits for collectives; part of the times of its ops.
        link: between the devices.
    """

    kind: ShardingKind
    ranks: int
    units: int
    state_bytes: int
    gradient_bytes: int
    buffer_bytes: int
    peak_buffer_bytes: int
    collective_ms: float
    waiting_ms: float
    link: str

    def signature(self, model_signature: str) -> str:
        """The signature of a rank's model, which is that of no model that exists."""
        return f"{_MARK}{self.ranks} modelled ranks, {self.kind}: {model_signature}"


def is_of_modelled_ranks(model_signature: str) -> bool:
    """Whether a profile or plan with this signature is that of a modelled rank, and cannot be applied."""
    return model_signature.startswith(_MARK)
