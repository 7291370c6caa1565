"""Refusing plans whose replays would not give the bits that the ops gave, as PyTorch is set now."""

from __future__ import annotations

import torch

from pooch.errors import PlanMismatch
from pooch.ir import Plan
from pooch.torchtools import accelerators, cuda_only
from pooch.torchtools.determinism import varies_now


def refuse_unrepeatable(plan: Plan, device: torch.device) -> None:
    """Refuse a plan that replays what an accelerator may compute another way the second time.

    What depends on an op's arguments besides is looked at when the op runs.

    Raises:
        PlanMismatch: so it does.
    """
    if not accelerators.has_streams(device):
        return
    replayed = {action.target - plan.first_slot for action in plan.schedule.actions if action.kind == "replay"}
    for fingerprint in {plan.expected[op].fingerprint for op in replayed}:
        _refuse_chosen_algorithms(fingerprint, device)
        _refuse_any_order(fingerprint)


def _refuse_chosen_algorithms(fingerprint: str, device: torch.device) -> None:
    """CuDNN's benchmark mode chooses algorithms for each thread anew, and autograd's threads are not the program's."""
    if cuda_only.chooses_algorithms_by_timing(device) and fingerprint.startswith("aten.convolution"):
        raise PlanMismatch(
            "the plan replays convolutions, and torch.backends.cudnn.benchmark may give a replay another algorithm: "
            "switch it off, or profile and plan with it on (convolutions are then not replayed)"
        )


def _refuse_any_order(fingerprint: str) -> None:
    name, _, results = fingerprint.partition("(")
    dtype = getattr(torch, results.partition("[")[0], torch.float32)
    reason = varies_now("::".join(name.split(".")[:2]), dtype)
    if reason is not None:
        raise PlanMismatch(f"the plan replays an op that it must not: {reason}; call that, or profile and plan again")
