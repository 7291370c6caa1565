"""How a model is divided among ranks, and what a collective among them costs."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.modelled_ranks import ShardingKind


@dataclass(frozen=True, slots=True)
class PeerLink:
    """The link between the devices of ranks.

    Attributes:
        name: for the reader.
        bytes_per_ms: that a device sends, and receives at the same time.
        latency_ms: fixed cost of one collective.
    """

    name: str
    bytes_per_ms: float
    latency_ms: float

    def gather_ms(self, size_bytes: int, ranks: int) -> float:
        """Duration of an all-gather to this many bytes on each rank, or of a reduce-scatter from them."""
        return self.latency_ms + size_bytes * (ranks - 1) / ranks / self.bytes_per_ms

    def all_reduce_ms(self, size_bytes: int, ranks: int) -> float:
        """Duration of an all-reduce: a reduce-scatter and an all-gather in one."""
        return self.latency_ms + 2 * size_bytes * (ranks - 1) / ranks / self.bytes_per_ms


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are gathered together, as those of one `fully_shard`.

    Attributes:
        name: path of its module; "" for the root, which has all parameters that are in no other unit.
        parameter_bytes: its parameters, whole.
        trained_bytes: those of them that are trained.
        gathered_bytes: its parameters as they are gathered: padded, so that all ranks have equal pieces.
        reduced_bytes: its gradients as they are reduced, padded.
    """

    name: str
    parameter_bytes: int
    trained_bytes: int
    gathered_bytes: int
    reduced_bytes: int


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a model is divided among ranks.

    Attributes:
        kind: "fsdp" or "ddp".
        ranks: number of ranks, at least 2.
        units: the root first, then the others.
        state_bytes: optimizer state of the whole model.
        link: between the devices.
        copy_bytes_per_ms: rate at which a device copies within its memory, as into and out of the buffers of
            collectives.
    """

    kind: ShardingKind
    ranks: int
    units: tuple[Unit, ...]
    state_bytes: int
    link: PeerLink
    copy_bytes_per_ms: float

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters, whole."""
        return sum(unit.parameter_bytes for unit in self.units)

    @property
    def trained_bytes(self) -> int:
        """Bytes of the trained parameters, whole."""
        return sum(unit.trained_bytes for unit in self.units)

    def held_bytes(self) -> int:
        """Parameters and optimizer state that a rank holds all the time."""
        if self.kind == "ddp":
            return self.parameter_bytes + self.state_bytes
        pieces = sum(unit.gathered_bytes for unit in self.units) // self.ranks
        reduced = sum(unit.reduced_bytes for unit in self.units) // self.ranks
        share = reduced / self.trained_bytes if self.trained_bytes else 1 / self.ranks
        return pieces + round(self.state_bytes * share)

    def copy_ms(self, size_bytes: int) -> float:
        """Duration of a copy within a device's memory: each byte is read and written."""
        return 2 * size_bytes / self.copy_bytes_per_ms
