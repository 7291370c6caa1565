"""What the program holds, such as its data, leaves where a step would pass the budget though all else has left."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import pooch
import pooch.autopilot.program_data as autopilot_data
from pooch.autopilot.program_data import ProgramData
from pooch.autopilot.requests import PlanRequests
from pooch.executor.program_data import data_that_can_leave
from pooch.torchtools.tensors import storage_key
from pooch.torchtools.watch import LIBRARY
from tests.hostile.governors import DEAR, online_only
from tests.live_before import live_before
from tests.other_threads import another_thread

pytestmark = pytest.mark.skipif(LIBRARY.get() is None, reason="nothing leaves without what watches natively")
ROWS, WIDTH, LAYERS = 128, 64, 12
STEPS = 4
CPU = torch.device("cpu")
BUDGET_BYTES = 2**30
SAMPLES = 8192  # 2 MiB of them
PLAIN_BYTES = LAYERS * ROWS * WIDTH * 4  # of activations, about


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


class Training:
    """Trains on samples that the program holds all the time.

    Args:
        between: Called after each step with the samples.
    """

    def __init__(self, between: Callable[[Tensor], object] = lambda _: None) -> None:
        torch.manual_seed(0)
        self.model, self.samples = Net(), torch.rand(SAMPLES, WIDTH)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.seen: list[object] = []
        self._between = between

    def step(self, number: int) -> None:
        rows = torch.arange(ROWS) * 7 + number
        loss = self.model(self.samples.index_select(0, rows)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.seen.append(loss.item())

    def train(self) -> list[object]:
        for number in range(STEPS):
            self.step(number)
            self.seen.append(self._between(self.samples))
        return [*self.seen, *(each.detach().clone().tolist() for each in self.model.parameters())]


class Keeps(torch.autograd.Function):
    """Keeps a result on its context, which autograd knows nothing of."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        outputs = inputs.tanh()
        ctx.kept = outputs * outputs
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * (1 - ctx.kept)


class Kept(nn.Module):
    def forward(self, inputs: Tensor) -> Any:
        return Keeps.apply(inputs)


class Told:
    """Trains under a budget, and keeps what is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.summary: Any = None

    def train(self, training: Training, budget_bytes: int) -> list[object]:
        with pooch.auto(training.model, budget_bytes, training.optimizer, tell=self.lines.append) as auto:
            found = training.train()
            self.summary = auto.summary()
        return found

    @property
    def moved(self) -> dict[str, tuple[int, int]]:
        return {each.name: (each.out_bytes, each.in_bytes) for each in self.summary.persistent}


def test_data_leaves_in_the_first_step_that_would_pass_the_budget() -> None:
    plain, told = Training().train(), Told()
    budget_bytes = live_before() + 2 * 2**20 + PLAIN_BYTES // 2
    training = Training()
    assert told.train(training, budget_bytes) == plain
    assert told.summary.steps_over_budget == 0
    assert told.moved["data of the program"] > (0, 0)
    (line,) = [each for each in told.lines if "tensors that the program holds leave" in each]
    assert "(2.00 MiB)" in line


def test_nothing_is_looked_for_where_the_budget_is_held_without() -> None:
    told = Told()
    training = Training()
    told.train(training, live_before() + 64 * 2**20)
    assert told.moved.get("data of the program", (0, 0)) == (0, 0)
    assert not any("that the program holds" in each for each in told.lines)


READS: dict[str, Callable[[Tensor], object]] = {
    "an op": lambda samples: samples[5].tolist(),
    "a view": lambda samples: samples.view(-1)[1000:1010].tolist(),
    "an array": lambda samples: samples.numpy()[77].tolist(),
    "an array that is written to": lambda samples: samples.numpy().__setitem__(3, 0.25),
    "a number": lambda samples: samples[4000, 3].item(),
    "an op in place": lambda samples: samples[:2].mul_(0.5).tolist(),
    "a pickle": lambda samples: pickle.loads(pickle.dumps(samples))[7].tolist(),
    "a file": lambda samples: (torch.save(samples, file := io.BytesIO()), file.getbuffer().nbytes)[1],
    "a copy": lambda samples: copy.deepcopy(samples)[9].tolist(),
    "an address": lambda samples: samples.data_ptr() and None,
    "its text": str,
    "bytes": lambda samples: [samples.untyped_storage()[each] for each in range(99)],
    "a loader": lambda samples: [each[0][0].tolist() for each in DataLoader(TensorDataset(samples[:64]), 32)],
    "a loader in other processes": lambda samples: [
        each[0][0].tolist() for each in DataLoader(TensorDataset(samples[-64:]), 32, num_workers=2)
    ],
}


@pytest.mark.parametrize("read", READS)
def test_whoever_reads_data_between_steps_finds_it(read: str) -> None:
    plain, told = Training(READS[read]).train(), Told()
    budget_bytes = live_before() + 2 * 2**20 + PLAIN_BYTES // 2
    training = Training(READS[read])
    assert told.train(training, budget_bytes) == plain
    assert told.moved["data of the program"] > (0, 0)


def test_a_view_from_before_finds_it_too() -> None:
    found = []
    for budget_bytes in (None, live_before() + 2 * 2**20 + PLAIN_BYTES // 2):
        training = Training()
        part = training.samples[100:110]
        training._between = lambda _, part=part: part.tolist()
        if budget_bytes is None:
            found.append(training.train())
        else:
            told = Told()
            found.append(told.train(training, budget_bytes))
            assert told.moved["data of the program"] > (0, 0)
    assert found[0] == found[1]


def test_views_of_one_storage_leave_together() -> None:
    samples = torch.rand(64, 1024)
    parts = [samples[:32], samples[32:].view(-1), samples]
    (found,) = data_that_can_leave(parts, CPU, LIBRARY.get())
    assert set(map(id, found)) == set(map(id, parts))


def test_the_base_of_a_view_leaves_with_it() -> None:
    view = torch.rand(256, 256)[:32]
    ((first, second),) = data_that_can_leave([view], CPU, LIBRARY.get())
    assert first is view
    assert second is view._base


class OtherTensor(Tensor):
    """May be asked nothing."""


def test_small_and_other_tensors_stay() -> None:
    """PyTorch reads the state of a generator without an op."""
    state, other = torch.get_rng_state(), torch.rand(256, 256).as_subclass(OtherTensor)
    library = LIBRARY.get()
    assert list(data_that_can_leave([state, other, torch.nn.Parameter(other)], CPU, library)) == []
    torch.set_rng_state(state)


def _saved() -> tuple[Tensor, object]:
    samples, weight = torch.rand(256, 256), torch.rand(256, 256, requires_grad=True)
    return samples, (samples @ weight).sum()


def _sparse() -> tuple[Tensor, object]:
    sparse = torch.rand(256, 256).to_sparse()
    return sparse.values(), sparse


def _held_by(make: Callable[[Tensor], object]) -> tuple[Tensor, object]:
    samples = torch.rand(256, 256)
    return samples, make(samples)


STAYING: dict[str, Callable[[], tuple[Tensor, object]]] = {
    "an array on it": lambda: _held_by(lambda samples: samples.numpy()),
    "an array that alone is left": lambda: (array := torch.rand(256, 256).numpy(), torch.from_numpy(array))[::-1],  # type: ignore[return-value]
    "another library has it": lambda: _held_by(torch.utils.dlpack.to_dlpack),
    "autograd has saved it": _saved,
    "it is trained": lambda: (torch.rand(256, 256, requires_grad=True), None),
    "a sparse tensor has it": _sparse,
    "autograd knows the parameter": lambda: (weight := nn.Parameter(torch.rand(256, 256)), weight.sum()),
    "it is of inference": lambda: (torch.inference_mode()(torch.rand)(256, 256), None),
}


@pytest.mark.parametrize("why", STAYING)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_used_unseen_stays(why: str) -> None:
    tensor, held = STAYING[why]()
    library = LIBRARY.get()
    found = [each for each in data_that_can_leave([tensor], CPU, library) if library.tensors_beside(tensor) == 1]
    assert found == [], held


class Memory:
    """Takes note of what is to leave."""

    def __init__(self) -> None:
        self.library, self.found, self.size_bytes = LIBRARY.get(), list[int](), 1
        self.values: list[Any] = []

    def adopt_data(self, found: Iterable[Sequence[Tensor]], *, is_given: bool = False) -> None:
        self.found, self.are_given = [storage_key(each[0]) for each in found], is_given
        known = {value.key for value in self.values}
        new = [key for key in self.found if key not in known]
        self.values += [SimpleNamespace(kind="data", size_bytes=self.size_bytes, key=key) for key in new]


class Library:
    """As if an op was running that is seen, or none."""

    def __init__(self, is_in_op: bool) -> None:
        self.is_in_op = lambda: is_in_op
        self.is_plain, self.references_to = LIBRARY.get().is_plain, LIBRARY.get().references_to


def program_data(saved: Iterable[Tensor] = ()) -> ProgramData:
    evictor: Any = SimpleNamespace(
        device=CPU, saved_keys=lambda: set(map(storage_key, saved)), budget_bytes=BUDGET_BYTES
    )
    return ProgramData(evictor, lambda _: None)


def test_what_the_step_follows_and_has_saved_stays_in_the_middle_of_it() -> None:
    """It may leave as what autograd has saved. An op that is not seen may be working on anything."""
    followed, saved, free = (torch.rand(256, 256) for _ in range(3))
    memory: Any = Memory()
    data = program_data([saved])
    assert not data.may_look_now(Library(is_in_op=False))
    assert data.may_look_now(library := Library(is_in_op=True))
    assert data.leaves_now(library, {storage_key(followed): 3}, lambda: memory)
    assert storage_key(free) in memory.found
    assert not {storage_key(followed), storage_key(saved)} & set(memory.found)


def test_what_an_earlier_step_has_saved_stays_when_the_next_one_begins() -> None:
    saved, free = (torch.rand(256, 256) for _ in range(2))
    memory, data = Memory(), program_data([saved])
    data.step_begins(memory, True, ())  # type: ignore[arg-type]
    assert storage_key(free) in memory.found
    assert storage_key(saved) not in memory.found


def test_what_a_step_is_given_leaves_too_once_anything_has() -> None:
    memory, data, given = Memory(), program_data(), {"rows": [torch.rand(256, 256)]}
    data.step_begins(memory, False, given)  # type: ignore[arg-type]
    assert memory.found == []
    data.step_begins(memory, True, ())  # type: ignore[arg-type]
    memory.found = []
    data.step_begins(memory, False, given)  # type: ignore[arg-type]
    assert memory.found == [storage_key(given["rows"][0])]
    assert memory.are_given


def test_objects_are_looked_through_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, steps = list[int](), list[int]()
    monkeypatch.setattr(autopilot_data, "live_tensors", lambda *_: looks.append(steps[-1]) or [])
    memory, data = Memory(), program_data()
    for step in range(1, 101):
        steps.append(step)
        data.step_begins(memory, True, ())  # type: ignore[arg-type]
        data.step_begins(memory, False, ())  # type: ignore[arg-type]
    assert looks == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize(
    ("is_held", "size_bytes", "expected"),
    [
        (False, 1, [1, 2, 3, 5, 9, 17, 33, 65]),  # asked twice in each
        (True, 1, list(range(1, 101))),
        (False, BUDGET_BYTES // 10, list(range(1, 101))),
    ],
    ids=["little that does not help", "little that suffices", "much"],
)
def test_what_is_old_is_looked_for_in_each_step_as_long_as_that_helps(
    is_held: bool, size_bytes: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget that single ops exceed is not held by what little each step leaves behind, at two looks in each."""
    looks, made = list[int](), list[Tensor]()

    def found(_: str, generations: Sequence[int | None] = (None,)) -> list[Tensor]:
        if generations != (None,):
            return []
        looks.append(len(made))
        return made[-1:]

    monkeypatch.setattr(autopilot_data, "live_tensors", found)
    memory: Any = Memory()
    memory.size_bytes = size_bytes
    data = program_data()
    for step in range(1, 101):
        made.append(torch.rand(256, 256))
        data.step_begins(memory, not is_held, ())
        if looks[-1:] != [step]:
            data.leaves_now(Library(is_in_op=True), {}, lambda: memory)
    assert sorted(set(looks)) == expected


@pytest.mark.parametrize("is_given", [True, False])
def test_what_each_step_makes_anew_is_no_reason_to_look_through_all_objects(
    is_given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step is given is known, the rest is young. Looks took twenty times as long as a step of a small model."""
    looks, made = list[int](), list[Tensor]()

    def found(_: str, generations: Sequence[int | None] = (None,)) -> list[Tensor]:
        if generations == (None,):
            looks.append(len(made))
        return made[-1:]

    monkeypatch.setattr(autopilot_data, "live_tensors", found)
    memory, data = Memory(), program_data()
    for _ in range(100):
        made.append(torch.rand(256, 256))
        data.step_begins(memory, True, made[-1] if is_given else ())  # type: ignore[arg-type]
    assert len(memory.values) == len(made)
    assert looks[:2] == [1, 2] if is_given else [1]
    assert len(looks) < 10


def test_nobody_looks_while_another_thread_may_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autopilot_data, "live_tensors", lambda *_: pytest.fail("its ops free storages just then"))
    with another_thread(may_train=True):
        program_data().step_begins(Memory(), True, ())  # type: ignore[arg-type]


def test_a_look_that_fails_as_a_step_begins_is_no_failure_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a process is not given more memory, a list of all objects may be too large."""

    def without_memory(*_: object) -> list[Tensor]:
        raise MemoryError

    monkeypatch.setattr(autopilot_data, "live_tensors", without_memory)
    program_data().step_begins(Memory(), True, ())  # type: ignore[arg-type]


@pytest.mark.parametrize("made", [lambda one: one.new(2, 3), lambda one: one.new_tensor([1.0, 2.0]), Tensor.new])
def test_tensors_are_made_like_one_that_may_leave(made: Callable[[Tensor], Tensor]) -> None:
    """PyTorch tells their device by its keys, of which one more marks it."""
    marked, plain = torch.rand(4), torch.rand(4)
    home = LIBRARY.get().Home(marked)
    assert (made(marked).shape, made(marked).device) == (made(plain).shape, CPU)
    del home


class Scale(torch.autograd.Function):
    """Keeps a tensor in its own way, and works on it in Python, where nothing holds it but the program."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, samples: Tensor) -> Tensor:
        ctx.samples = samples
        return rows * 1.5

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        large = ctx.samples.mul(1e-3).sum() + ctx.samples.exp().mean()
        return gradient * 1.5 + large * 1e-3, None


def test_what_the_graph_of_the_step_before_keeps_leaves_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there until the next loss takes its place. Looked for seldom, it would leave most steps too high."""
    monkeypatch.setattr(PlanRequests, "ask", lambda *_: None)  # no plan takes over in mid-training
    monkeypatch.setattr(PlanRequests, "warm_up", lambda *_: None)
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), Kept())])
    inputs = torch.rand(8 * ROWS, WIDTH)

    one_bytes = inputs.nbytes
    peaks: list[float] = []

    def train(auto: Any = None) -> list[float]:
        losses = []
        for _ in range(10):
            loss = model(inputs).square().mean()
            loss.backward()
            losses.append(loss.item())
            model.zero_grad()
            if auto is not None:
                peaks.append(auto.status().peak_mib * 2**20)
        return losses

    expected = train()
    budget_bytes = live_before() + 18 * one_bytes
    with pooch.auto(model, budget_bytes, tell=lambda _: None) as auto:
        assert train(auto) == expected
    higher = [peak - budget_bytes > one_bytes for peak in peaks]
    assert higher == [False, True] + 8 * [False]  # one step misses it, and the next ones know


def test_what_an_op_in_the_backward_pass_is_working_on_stays() -> None:
    """Nothing sees the ops there, nor holds what they work on."""

    class Own(Training):
        def step(self, number: int) -> None:
            rows = self.samples[:ROWS].clone()
            loss = self.model(Scale.apply(rows.requires_grad_(), self.samples)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.seen.append((loss.item(), rows.grad.sum().item()))  # type: ignore[union-attr]

    plain, told = Own().train(), Told()
    budget_bytes = live_before() + 2 * 2**20 + PLAIN_BYTES
    training = Own()
    assert told.train(training, budget_bytes) == plain


class _Masked(nn.Module):
    """Computes on what needs no gradients, holds all of it, and then writes over a buffer that it has read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(nn.Linear(256, 256) for _ in range(6)), nn.BatchNorm1d(256)
        self.register_buffer("mean", torch.ones(256))

    def forward(self, rows: Tensor) -> Tensor:
        masked = functional.dropout(rows.relu(), 0.46)
        held = [masked, rows * masked, masked + self.mean.exp() * 0.1]
        beside = functional.dropout(masked, 0.43)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = functional.gelu(self.layers[0](held[-1])).float()
        held += [self.layers[1](hidden), (hidden * 1.5).mul_(0.5)]
        with torch.no_grad():
            self.mean.lerp_(hidden.mean(0).tanh(), 0.1)
        held.append(self.norm(hidden))
        return (held[3] * held[4]).square().mean() + beside.square().mean()


def test_a_replay_in_the_midst_of_an_op_copies_what_has_left() -> None:
    """Before an op writes over what recipes read, they are given up, and a replay got none of the bytes of a mask."""
    losses = list[list[Tensor]]()
    for share in (None, 54, 56, 58):
        torch.manual_seed(0)
        model = _Masked()
        optimizer = torch.optim.AdamW(model.parameters())
        governed = nullcontext() if share is None else pooch.auto(model, f"{share}%", optimizer, tell=lambda _: None)
        losses.append([])
        with online_only(DEAR), governed:
            for _ in range(4):
                optimizer.zero_grad(set_to_none=False)
                loss = model(torch.randn(512, 256))
                loss.backward()
                optimizer.step()
                losses[-1].append(loss.detach())
    assert all(torch.equal(one, other) for each in losses for one, other in zip(losses[0], each, strict=True))
