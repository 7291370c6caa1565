"""Masks and constants on their way to the file: fewer bytes, times that plans know, the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import pooch
from pooch.executor import apply_plan
from pooch.executor.engines import make_engine
from pooch.executor.engines.cpu import CpuArena
from pooch.executor.engines.measurement import measure_link
from pooch.ir import Link
from pooch.machine.values import Ticket
from pooch.profiler import ProfileOptions, profile_step
from pooch.torchtools import copier
from tests.executor.support import all_of, tight_plan

pytestmark = pytest.mark.cpu
CPU = torch.device("cpu")
LINK = Link("a slow tier", 0.01, 0.01, 1e4, 1e4, packed_out_bytes_per_ms=1e5, packed_in_bytes_per_ms=2e5)


class Attention(nn.Module):
    """A causal mask, dropout, and a constant that autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, inputs: Tensor) -> Tensor:
        scores = self.query(inputs) @ inputs.transpose(1, 2)
        future = torch.ones(scores.shape, dtype=torch.bool, device=inputs.device).triu(1)
        shares = torch.dropout(scores.masked_fill(future, float("-inf")).softmax(-1), 0.2, True)
        return (shares @ self.value(inputs)) * torch.full((8, 128, 32), 0.5, device=inputs.device) * inputs.exp()


def job() -> tuple[nn.Module, Callable[[], Tensor]]:
    torch.manual_seed(0)
    model, inputs = Attention(), torch.randn(8, 128, 32)
    return model, lambda: model(inputs).square().mean()


def trained(model: nn.Module, forward: Callable[[], Tensor], steps: int = 3) -> list[bytes]:
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    torch.manual_seed(1)
    for _ in range(steps):
        loss = forward()
        loss.backward()
        seen += [each.cpu().numpy().tobytes() for each in (loss.detach(), *(each.grad for each in model.parameters()))]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def test_a_profile_knows_masks_and_constants_and_a_plan_their_times() -> None:
    if copier.LIBRARY.get() is None:
        pytest.skip(f"no native thread that copies: {copier.LIBRARY.why_not}")
    model, forward = job()
    profile = profile_step(forward, model, None, LINK, ProfileOptions(warmup=0, repeats=1)).profile
    packs = {value.id: value for value in profile.activations if value.packs}
    assert {value.dtype for value in packs.values()} == {"bool", "float32"}
    assert len(packs) == 3  # the causal mask, what dropout multiplies with, the constant
    mask = next(value for value in packs.values() if value.dtype == "bool")
    assert LINK.out_ms(mask.size_bytes, packs=True) == 0.01 + mask.size_bytes / 1e5
    assert LINK.in_ms(mask.size_bytes, packs=True) == 0.01 + mask.size_bytes / 2e5
    costs = pooch.activation_costs(profile)
    assert costs.loc[mask.id, "copy_out_ms"] == LINK.out_ms(mask.size_bytes, packs=True)
    plain = replace(profile, values=tuple(replace(value, packs=False) for value in profile.values))
    times = [tight_plan(each, all_of(each, "swap", "model"), "model").predicted_step_ms for each in (profile, plain)]
    spared_ms = sum(value.size_bytes for value in packs.values()) * (2 / 1e4 - 1 / 1e5 - 1 / 2e5)
    assert times[1] - times[0] > 0.5 * spared_ms


def test_a_plan_moves_fewer_bytes_and_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, forward = job()
    expected = trained(*job())
    profile = profile_step(forward, model, None, LINK, ProfileOptions(warmup=0, repeats=1)).profile
    plan = tight_plan(profile, all_of(profile, "swap", "model"), "model")
    swapped = [value for value in profile.activations if not value.saved_outside_model]
    spared = {}
    for packing in ("1", "0"):
        monkeypatch.setenv(copier.PACKING, packing)
        model, forward = job()
        with apply_plan(plan, model) as run:
            assert trained(model, forward) == expected
        spared[packing] = run.stats.spared_bytes
        assert run.stats.swapped_out_bytes > 2**20
    assert spared["0"] == 0
    if copier.LIBRARY.get() is not None:
        masks = sum(value.size_bytes for value in swapped if value.packs)
        assert spared["1"] > 1.6 * masks  # out and back


def test_steps_without_a_plan_move_fewer_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(*job())
    tickets = []
    copy_out = CpuArena.copy_out

    def noted(arena: CpuArena, storage: torch.UntypedStorage, offset_bytes: int) -> Ticket:
        tickets.append((storage.nbytes(), copy_out(arena, storage, offset_bytes)))
        return tickets[-1][1]

    monkeypatch.setattr(CpuArena, "copy_out", noted)
    model, forward = job()
    with pooch.auto(model, "1MiB", quiet=True):
        assert trained(model, forward, steps=1) == expected[: len(expected) // 3]
    assert tickets
    spared_bytes = sum(size_bytes - ticket.moved_bytes for size_bytes, ticket in tickets)
    assert (spared_bytes > 0) == (copier.LIBRARY.get() is not None)


@pytest.mark.parametrize("packing", ["1", "0"])
def test_a_link_tells_what_copies_of_masks_take(monkeypatch: pytest.MonkeyPatch, packing: str) -> None:
    monkeypatch.setenv(copier.PACKING, packing)
    engine = make_engine(CPU)
    link = measure_link(engine, CPU, room_bytes=16 * 2**20)
    engine.close()
    packs = packing == "1" and copier.LIBRARY.get() is not None
    assert (link.packed_out_bytes_per_ms > 0, link.packed_in_bytes_per_ms > 0) == (packs, packs)
