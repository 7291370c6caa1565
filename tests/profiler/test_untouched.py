"""Profiling changes nothing: random states, attributes of modules, buffers, flags and hooks are as they were."""

from __future__ import annotations

import gc
import random
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy
import pytest
import torch
from torch import Tensor, nn

import pooch
from pooch.errors import ProfileError, UsageError
from pooch.profiler.session import FIRST_DIFFERS
from pooch.torchtools.kept_contents import KeptContents
from pooch.torchtools.memory_trace import live_bytes
from pooch.torchtools.module_attributes import attributes_kept
from pooch.torchtools.training_state import training_state_kept, untrained_parameters_kept
from tests.moved_along import MovedAlong

MODES = ["run", "offload", "fake"]
MIB = 2**20


@pytest.fixture(autouse=True)
def _known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs of transfers and hooks are not what these tests are about, and take most of a profile's time."""
    from pooch.api import profiling
    from pooch.executor.engines import measurement
    from tests.executor.support import LINK

    monkeypatch.setattr(measurement, "measure_link", lambda engine, device, **options: LINK)
    monkeypatch.setattr(profiling, "with_hook_costs", lambda profile, progress: profile)


def profiled(forward: Callable[[], Tensor], model: nn.Module, mode: str, **options: Any) -> pooch.Profile:
    chosen: Any = mode
    return pooch.profile(forward, model, mode=chosen, warmup=0, repeats=1, **options)


class Counting(nn.Module):
    """Its forward counts, collects and caches in all ways that users do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))
        self.register_buffer("large", torch.zeros(2 * MIB // 4 + 3))
        self.steps, self.name = 0, "new"
        self.losses: list[float] = []
        self.recent: deque[int] = deque(maxlen=3)
        self.by_kind: Counter[str] = Counter()
        self.nested = {"inner": {"tokens": 0}}
        self.total = torch.zeros(3)
        self.hidden: Tensor | None = None

    def forward(self, rows: Tensor) -> Tensor:
        self.steps, self.name = self.steps + 1, "used"
        self.losses.append(1.0)
        self.recent.append(1)
        self.by_kind["step"] += 1
        self.nested["inner"]["tokens"] += rows.shape[0]
        self.made_now = rows.shape
        self.layer.extra = 1  # type: ignore[assignment]
        if self.steps == 1:
            self.layer.register_forward_hook(lambda *given: None)
        self.layer.eval()
        self.seen += 1  # type: ignore[operator]
        self.large[-1] += 1  # type: ignore[index, operator]
        self.total += 1
        self.hidden = self.layer(rows)
        return self.hidden.sin().sum()  # type: ignore[union-attr]


def drawn_by_all() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))  # noqa: NPY002


def plain_state(model: nn.Module) -> dict[str, Any]:
    kept = ("steps", "name", "losses", "recent", "by_kind", "nested", "hidden", "training")
    found: dict[str, Any] = {name: repr(getattr(model, name)) for name in kept}
    found["attributes"] = [list(module.__dict__) for module in model.modules()]
    found["modes"] = [module.training for module in model.modules()]
    found["hooks"] = [list(module._forward_hooks) for module in model.modules()]
    found["tensors"] = [t.tolist() for t in (model.seen, model.total, model.large[-2:])]  # type: ignore[union-attr, operator, index]
    return found


@pytest.mark.parametrize("mode", MODES)
def test_what_forward_counts_collects_and_caches_is_put_back(mode: str) -> None:
    model, rows = Counting(), torch.ones(4, 8)
    model.layer.bias.requires_grad_(False)
    before, objects = plain_state(model), dict(model.__dict__)
    buffers = dict(model.named_buffers())
    profiled(lambda: model(rows), model, mode)
    assert plain_state(model) == before
    assert all(model.__dict__[name] is each for name, each in objects.items())
    assert all(model.get_buffer(name) is each for name, each in buffers.items())
    assert not model.layer.bias.requires_grad


class Masking(nn.Module):
    """Makes a mask in its first forward pass, which later ones read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.mask: Tensor | None = None

    def forward(self, rows: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(len(rows), 64).tril()
        return (self.layer(rows) * self.mask).sin().sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", MODES)
def test_what_the_first_forward_pass_alone_makes_belongs_to_no_step(mode: str) -> None:
    rows, model = torch.ones(1024, 64), Masking()
    profile = profiled(lambda: model(rows), model, mode)
    assert model.mask is None
    model(rows)
    expected = profiled(lambda: model(rows), model, mode)
    assert [op.name for op in profile.ops] == [op.name for op in expected.ops]
    assert profile.persistent_bytes == expected.persistent_bytes  # the mask is there throughout the step
    assert FIRST_DIFFERS in profile.notes
    assert FIRST_DIFFERS not in expected.notes


@pytest.mark.parametrize("mode", MODES)
def test_random_states_of_python_numpy_and_torch_stay(mode: str) -> None:
    model, rows = nn.Linear(8, 8), torch.ones(4, 8)
    drawn: list[tuple[float, ...]] = []

    def forward() -> Tensor:
        drawn.append((random.random(), float(numpy.random.rand())))  # noqa: NPY002
        return nn.functional.dropout(model(rows)).sum()

    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(7)  # type: ignore[operator]
    expected = drawn_by_all()
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(7)  # type: ignore[operator]
    profiled(forward, model, mode)
    assert drawn_by_all() == expected
    assert len(drawn) > 1
    assert set(drawn) == {expected[:2]}  # and each pass saw the same numbers


@pytest.mark.parametrize(("mode", "most"), [("run", 0 + 2 * 1 + 3), ("offload", 3), ("fake", 2)])
def test_the_profile_says_how_often_forward_was_called_and_keeps_to_what_is_documented(mode: str, most: int) -> None:
    model, rows, calls = nn.Linear(8, 8), torch.ones(4, 8), []

    def forward() -> Tensor:
        calls.append(1)
        return model(rows).sum()  # type: ignore[no-any-return]

    profile = profiled(forward, model, mode)
    assert f"the forward pass ran {len(calls)} times to profile the step" in profile.notes
    assert len(calls) <= most


@pytest.mark.parametrize("mode", MODES)
def test_lazy_modules_are_refused_until_they_have_shapes(mode: str) -> None:
    model, rows = nn.Sequential(nn.LazyLinear(8), nn.ReLU()), torch.ones(4, 8)
    with pytest.raises(UsageError, match="lazy parameters, which have no shapes yet: call it once before profiling"):
        profiled(lambda: model(rows).sum(), model, mode)
    model(rows)
    assert profiled(lambda: model(rows).sum(), model, mode).forward_ops > 0
    assert model[0].in_features == 8


@pytest.mark.parametrize("where", ["forward", "hook"])
def test_a_step_that_changes_parameters_is_refused_after_the_first_time(where: str) -> None:
    model, rows = nn.Linear(8, 8), torch.ones(4, 8)
    steps: list[int] = []

    @torch.no_grad()
    def change(parameter: Tensor) -> None:
        steps.append(1)
        parameter.clamp_(-0.01, 0.01)

    def forward() -> Tensor:
        if where == "forward":
            change(model.weight)
        return model(rows).sum()  # type: ignore[no-any-return]

    if where == "hook":
        model.weight.register_post_accumulate_grad_hook(change)
    with pytest.raises(ProfileError, match="the step itself changes parameter weight, and has just done so once"):
        profiled(forward, model, "run")
    assert len(steps) == 1


@pytest.mark.parametrize("width", [8, 600], ids=["small", "in a file"])
@pytest.mark.parametrize("how", ["in place", "other data"])
@pytest.mark.parametrize("mode", MODES)
def test_a_teacher_that_the_forward_pass_moves_along_is_where_it_was(mode: str, how: str, width: int) -> None:
    model, rows = MovedAlong(width, how), torch.ones(4, width)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    profile = profiled(lambda: model(rows), model, mode)
    assert profile.forward_ops > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_data_that_was_replaced_is_not_kept_alive() -> None:
    model = MovedAlong(600, "other data")
    gc.collect()
    before = live_bytes(torch.device("cpu"))
    with untrained_parameters_kept(model), training_state_kept(model, torch.device("cpu")):
        model.move()
        assert live_bytes(torch.device("cpu")) == before


def test_large_parameters_that_are_not_trained_and_get_other_data_are_told() -> None:
    """They are not copied, as those of a model under LoRA are the whole of it."""
    model, rows = MovedAlong(8, "other data"), torch.ones(4, 8)
    model.student.weight.requires_grad_(False)
    with pytest.raises(ProfileError, match=r"the step itself changes parameter teacher\.weight"):
        profiled(lambda: model(rows), model, "run")


def test_attributes_with_methods_of_their_own_are_left_alone() -> None:
    class Named(tuple[int, ...]):
        def __len__(self) -> int:
            raise NotImplementedError

    class Counted(dict[str, int]):
        def keys(self) -> NoReturn:  # type: ignore[override]
            raise NotImplementedError

    model = nn.Linear(8, 8)
    model.named, model.counted = Named((1, 2)), Counted(a=1)  # type: ignore[assignment]
    assert profiled(lambda: model(torch.ones(4, 8)).sum(), model, "run").forward_ops > 0


class Filtered(nn.Module):
    """64 MiB of buffers that its forward changes, and small ones."""

    def __init__(self, fill: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(MIB))
        for number in range(4):
            self.register_buffer(f"table{number}", torch.full((4 * MIB,), fill))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, rows: Tensor) -> Tensor:
        self.count += 1  # type: ignore[operator]
        self.table0[5] += 1  # type: ignore[index, operator]
        return (rows * self.weight).sin().sum()


@pytest.mark.parametrize("mode", MODES)
def test_persistent_bytes_are_those_of_the_user_alone_with_large_buffers(mode: str) -> None:
    gc.collect()
    others = live_bytes(torch.device("cpu"))
    model, rows = Filtered(), torch.ones(MIB)
    profile = profiled(lambda: model(rows), model, mode)
    mine = sum(t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers(), rows))
    assert profile.persistent_bytes == others + mine
    assert model.table0[5] == 0  # type: ignore[index]


def test_persistent_bytes_of_a_model_that_is_built_fake_are_its_own() -> None:
    from pooch.api.profiling import profile_workload

    def build() -> pooch.Workload:
        model, rows = Filtered(), torch.ones(MIB)
        return pooch.Workload(model, lambda: model(rows))

    profile = profile_workload(build, mode="fake")
    assert profile.persistent_bytes == (MIB + 4 * 4 * MIB + MIB) * 4 + 8


def test_large_contents_take_no_memory_and_leave_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POOCH_SPILL_DIRECTORY", str(tmp_path))
    gc.collect()
    model = Filtered(3.0)
    before = live_bytes(torch.device("cpu"))
    with training_state_kept(model, torch.device("cpu")):
        assert live_bytes(torch.device("cpu")) == before
        assert list(tmp_path.iterdir()) == []  # it has no name
        for buffer in model.buffers():
            buffer.fill_(7)
    assert all((buffer == 3).all() for name, buffer in model.named_buffers() if name != "count")
    assert model.count == 0


def test_contents_of_views_shared_storages_and_sparse_tensors_are_put_back() -> None:
    base = torch.arange(12.0)
    strided, repeated = base[1:9:2], base[9:10].expand(4)
    sparse = torch.eye(3).to_sparse()
    half = torch.ones(5, dtype=torch.bfloat16)
    kept = KeptContents([strided, strided, repeated, sparse, half, torch.empty(0), torch.empty(3, device="meta")])
    strided.zero_()
    base[9], base[0] = -1, -5  # the last is of no tensor that was kept
    sparse.mul_(9)
    half.zero_()
    kept.restore()
    kept.close()
    assert base.tolist() == [-5.0, *map(float, range(1, 12))]
    assert torch.equal(sparse.to_dense(), torch.eye(3))
    assert half.tolist() == [1.0] * 5


def test_contents_that_did_not_change_are_not_written() -> None:
    buffer = torch.ones(MIB)
    kept = KeptContents([buffer])
    version = buffer._version
    buffer.requires_grad_()  # writing to it would raise
    kept.restore()
    kept.close()
    assert buffer._version == version


def test_a_folder_that_cannot_take_buffers_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POOCH_SPILL_DIRECTORY", str(tmp_path / "missing"))
    with pytest.raises(ProfileError, match=r"buffers of 16\.00 MiB cannot be saved: .*is missing: create it"):
        KeptContents(Filtered().buffers())


def test_attributes_are_put_back_when_the_block_raises() -> None:
    model = Counting()
    before = plain_state(model)

    def fails() -> None:
        with attributes_kept(model):
            model(torch.ones(4, 8))
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fails()
    assert model.steps == 0
    assert plain_state(model) | {"tensors": before["tensors"]} == before | {"tensors": before["tensors"]}
