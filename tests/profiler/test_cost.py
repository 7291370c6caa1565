"""What profiling takes of the user's time and memory: few passes, none of them plain where a plain step may not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pooch
from pooch.errors import ProfileError
from pooch.profiler import ProfileOptions, profile_step
from pooch.profiler.times import are_worth_a_run, outliers
from tests.executor.nets import KINDS, make_job
from tests.executor.support import LINK, quick_profile

MIB = 2**20


class Counting(nn.Module):
    """Counts its calls outside of the module, as a trainer's metrics do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))


def job() -> tuple[nn.Module, Callable[[], Tensor], list[int]]:
    torch.manual_seed(0)
    model, rows, calls = Counting(), torch.randn(512, 64), []

    def forward() -> Tensor:
        calls.append(1)
        return model.layers(rows).square().mean()  # type: ignore[no-any-return]

    return model, forward, calls


def undisturbed(found: object, times_ms: object) -> bool:
    return False


def test_a_step_that_fits_is_run_five_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pooch.profiler.profiler.are_worth_a_run", undisturbed)
    model, forward, calls = job()
    assert pooch.profile(forward, model).mode == "run"
    assert len(calls) == 5  # recorded to see whether it fits, warm-up, recorded, timed, timed with copies beside it


def test_a_step_that_may_not_fit_is_run_twice_and_never_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pooch.profiler.profiler.are_worth_a_run", undisturbed)
    model, forward, calls = job()
    profile = pooch.profile(forward, model, memory_limit="100KiB")
    assert profile.mode == "offload"
    assert len(calls) == 2
    assert any("may not fit in-core" in note and "modelled" in note for note in profile.notes)
    plan = pooch.plan(profile, "100%", region="step")
    assert any("modelled" in note for note in plan.notes)


def test_what_is_measured_off_the_device_agrees_with_the_plain_step() -> None:
    model, forward, _ = job()
    plain, away = (pooch.profile(forward, model, mode=mode) for mode in ("run", "offload"))  # type: ignore[arg-type]
    assert away.peak_bytes == plain.peak_bytes
    assert [v.id for v in away.activations] == [v.id for v in plain.activations]


@pytest.mark.parametrize("kind", KINDS)
def test_plain_steps_are_run_where_they_fit_and_nowhere_else(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room to spare or none: the first recorded step knows, though under its budget not all of it stayed."""
    monkeypatch.setattr("pooch.profiler.profiler.are_worth_a_run", undisturbed)
    work = make_job(kind)
    profile = quick_profile(work.forward, work.model)
    for room, mode in ((1.2, "run"), (1.0, "offload")):
        above_bytes = int(room * (profile.peak_bytes - profile.persistent_bytes))
        limit_bytes = profile.persistent_bytes + above_bytes
        options = ProfileOptions(mode="auto", warmup=0, memory_limit_bytes=limit_bytes)
        limited = profile_step(work.forward, work.model, None, LINK, options).profile
        assert limited.mode == mode
        assert limited.peak_bytes - limited.persistent_bytes == profile.peak_bytes - profile.persistent_bytes


def test_running_out_in_the_plain_step_leads_to_one_that_keeps_nothing_on_the_device() -> None:
    model, forward, calls = job()

    def fails_when_plain() -> Tensor:
        loss = forward()
        if len(calls) > 1 and torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
            raise RuntimeError("std::bad_alloc")
        return loss

    profile = profile_step(fails_when_plain, model, None, LINK, ProfileOptions(mode="auto")).profile
    assert profile.mode == "offload"


def test_an_explicit_mode_that_runs_out_says_which_one_to_take() -> None:
    model = nn.Linear(4, 4)

    def too_large() -> Tensor:
        raise RuntimeError("could not create a primitive")

    with pytest.raises(ProfileError, match="mode offload, or fake"):
        pooch.profile(too_large, model, mode="run")
    with pytest.raises(ProfileError, match="use mode fake"):
        pooch.profile(too_large, model, mode="offload")


def test_where_nothing_fits_the_step_is_traced_without_memory() -> None:
    model, forward, _ = job()

    def real_steps_run_out() -> Tensor:
        if not isinstance(model.layers[0][0].weight, torch._subclasses.FakeTensor) and "Fake" not in str(
            type(model.layers[0][0].weight.data)
        ):
            raise MemoryError
        return forward()

    assert pooch.profile(real_steps_run_out, model).mode == "fake"


def test_an_op_far_slower_than_its_siblings_is_recognised() -> None:
    kinds = ["gelu"] * 4 + ["linear"] * 3 + ["alone"]
    times_ms = [0.4, 28.0, 0.4, 0.5, 3.0, 3.1, 2.9, 50.0]
    assert outliers(kinds, times_ms) == {1: pytest.approx(0.45)}
    assert are_worth_a_run(outliers(kinds, times_ms), times_ms)
    small = [0.4, 2.8, 0.4, 0.5, 300.0, 310.0, 290.0, 50.0]
    assert outliers(kinds, small).keys() == {1}
    assert not are_worth_a_run(outliers(kinds, small), small)


def test_a_disturbed_op_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from pooch.profiler import profiler

    real: Any = profiler.slot_times_ms
    seen: list[list[float]] = []

    def disturbed_once(assembly: Any) -> list[float]:
        times_ms = [1.0 for _ in real(assembly)]  # so that nothing but the disturbance stands out
        gelus = [i for i, op in enumerate(assembly.recorder.ops) if "gelu" in op.name]
        if not seen:
            times_ms[gelus[1]] = 1e4
        seen.append(times_ms)
        return times_ms

    monkeypatch.setattr(profiler, "slot_times_ms", disturbed_once)
    model, forward, _ = job()
    profile = profile_step(forward, model, None, LINK, ProfileOptions(mode="run")).profile
    assert len(seen) == 2
    assert max(op.time_ms for op in profile.ops) < 0.9 * profile.step_ms


@pytest.mark.parametrize("limit", ["60%", "0", "much"])
def test_a_memory_limit_that_cannot_be_understood_is_told(limit: str) -> None:
    model, forward, _ = job()
    with pytest.raises(pooch.errors.UsageError, match="memory limit"):
        pooch.profile(forward, model, memory_limit=limit)
