"""cuDNN's recurrent dropout begins in the middle of a step, in some steps and not in others; here on a fake of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pooch.profiler.recorder import ForwardRecorder
from pooch.torchtools import accelerators
from tests.executor.nets import Job
from tests.executor.support import Choice, all_of, assert_same, mixed, profile_job, tight_plan, train

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class FakeGenerator:
    """What counts of CUDA's: its numbers come from a state that it points at, and setting it makes recurrent layers
    begin anew.
    """

    def __init__(self, device: object = None, state: list[int] | None = None) -> None:
        self.state = state if state is not None else [0]
        self.begins_anew = False

    def draw(self) -> int:
        self.state[0] += 1
        return self.state[0]

    def get_state(self) -> Tensor:
        return torch.tensor(self.state, dtype=torch.int64).view(torch.uint8)

    def set_state(self, state: Tensor) -> None:
        self.state[0] = int(state.view(torch.int64))
        self.begins_anew = True

    def clone_state(self) -> FakeGenerator:
        return FakeGenerator(state=list(self.state))

    def graphsafe_get_state(self) -> FakeGenerator:
        return FakeGenerator(state=self.state)

    def graphsafe_set_state(self, other: FakeGenerator) -> None:
        self.state = other.state


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> FakeGenerator:
    fake = FakeGenerator()
    monkeypatch.setattr(torch.cuda, "default_generators", (fake,))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: fake.get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: fake.set_state(state))
    return fake


def test_drawing_again_does_not_set_the_generator(generator: FakeGenerator) -> None:
    snapshot = accelerators.random_snapshot(GPU)
    drawn = [generator.draw() for _ in range(3)]
    for _ in range(2):  # a replay may come twice
        again = accelerators.called_drawing_from(GPU, snapshot, lambda: [generator.draw() for _ in range(3)])
        assert again == drawn
    assert not generator.begins_anew
    assert generator.draw() == 4


def test_a_generator_that_cannot_point_elsewhere_is_set_and_set_back(
    generator: FakeGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError("graphsafe_get_state is not supported in this Generator")

    class Plain(FakeGenerator):
        graphsafe_get_state = refuse  # type: ignore[assignment]

    generator.__class__ = Plain
    snapshot = accelerators.random_snapshot(GPU)
    drawn = [generator.draw() for _ in range(3)]
    again = accelerators.called_drawing_from(GPU, snapshot, lambda: [generator.draw() for _ in range(3)])
    assert again == drawn
    assert generator.begins_anew
    assert generator.draw() == 4


def test_the_generator_of_the_cpu_draws_again_what_it_drew() -> None:
    torch.manual_seed(3)
    snapshot = accelerators.random_snapshot(CPU)
    first, after = torch.rand(4), torch.get_rng_state()
    assert torch.equal(accelerators.called_drawing_from(CPU, snapshot, lambda: torch.rand(4)), first)
    assert torch.equal(torch.get_rng_state(), after)


# The ops of such a beginning ------------------------------------------------------------------------------------------


@pytest.fixture
def initialiser() -> Iterator[None]:
    """The operator that only cuDNN has."""
    library = torch.library.Library("aten", "IMPL")
    library.impl(
        "_cudnn_init_dropout_state",
        lambda dropout, train, seed, **_: torch.full((64,), seed % 251, dtype=torch.uint8),
        "CPU",
    )
    yield
    library._destroy()


class Recurrent(nn.Module):
    """Calls as cuDNN's layers do: dropout begins anew where `begins` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.begins = True
        self.kept: list[Tensor] = []

    def forward(self, rows: Tensor) -> Tensor:
        hidden = nn.functional.dropout(torch.tanh(self.first(rows)).exp(), 0.2)
        if self.begins:
            seed = torch.empty((), dtype=torch.int64).random_(generator=torch.default_generator).item()
            self.kept = [torch._cudnn_init_dropout_state(0.2, True, seed, dtype=torch.uint8)]
        return torch.tanh(self.second(hidden)).exp().sum()


def make(begins: list[bool]) -> Job:
    torch.manual_seed(0)
    model = Recurrent()

    def loss(_: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        model.begins = begins.pop(0) if begins else False
        return model(batch[0])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Job(model, optimizer, lambda generator: (torch.rand(32, 16, generator=generator),), loss, CPU)


@pytest.mark.usefixtures("initialiser")
@pytest.mark.parametrize("while_profiling", [True, False])
@pytest.mark.parametrize("choice", ["swap", "recompute", "mixed"])
def test_steps_that_begin_a_dropout_and_steps_that_do_not_have_one_plan(choice: Choice, while_profiling: bool) -> None:
    plain, _ = train(make([True, False, False, True]), None, steps=5)
    job = make([while_profiling] * 20)
    profile = profile_job(job)
    assert not any("random_" in op.name or "cudnn" in op.name for op in profile.ops)
    decisions: Any = mixed(profile) if choice == "mixed" else all_of(profile, choice)
    job = make([True, False, False, True])
    planned, stats = train(job, tight_plan(profile, decisions), steps=5, on_mismatch="error")
    assert stats is not None
    assert stats.mismatches == 0
    assert stats.swapped_in_bytes + stats.recomputed_ops > 0
    assert_same(plain, planned)


def test_a_seed_that_nothing_begins_with_is_an_op_like_any_other() -> None:
    recorder = ForwardRecorder(nn.Linear(2, 2))
    with recorder:
        torch.empty((), dtype=torch.int64).random_().item()
        torch.ones(2).exp()
    assert [op.name.split(".")[1] for op in recorder.ops] == ["empty", "random_", "ones", "exp"]


@pytest.mark.usefixtures("initialiser")
def test_a_beginning_that_does_not_go_on_leaves_the_path() -> None:
    profile = profile_job(make([False] * 20))
    job = make([])
    begin = job.model.first.forward

    def with_a_seed(rows: Tensor) -> Tensor:
        torch.empty((), dtype=torch.int64).random_()
        torch.ones(3)
        return begin(rows)

    job.model.first.forward = with_a_seed  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match=r"got aten\.ones"):
        _, stats = train(job, tight_plan(profile, all_of(profile, "swap")), steps=1)
    assert stats is not None
    assert stats.mismatches == 1
