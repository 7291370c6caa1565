"""The parts of the native watch by themselves: regions, what the kernel passes on, and what autograd holds."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pooch.executor.memory import released
from pooch.machine import Value
from pooch.torchtools import watch
from pooch.torchtools.tensors import storage_of

pytestmark = pytest.mark.cpu

ADD, EXP = torch.ops.aten.add.Tensor, torch.ops.aten.exp.default
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


@pytest.fixture(autouse=True)
def module() -> Any:
    found = watch.LIBRARY.get()
    if found is None:
        pytest.skip(f"no native watch: {watch.LIBRARY.why_not}")
    return found


class Noting:
    """What the kernel calls in Python: notes it all, and asks to see nothing of what ops give."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.alone: list[bool] = []
        self.ended_calls = 0

    def before(self, func: Any, args: Any, kwargs: Any, is_alone: bool) -> None:
        self.calls.append((func, args, kwargs))
        self.alone.append(is_alone)

    def ended(self) -> None:
        self.ended_calls += 1

    def can_run_again(self, func: Any, error: BaseException) -> bool:
        return False


class NotingMode(TorchDispatchMode):
    """The same under a dispatch mode."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func._schema.name != "aten::detach":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def region(**options: Any) -> Any:
    return watch.region(path(**options), watch.storage_map())


def path(writes: Any = (), moved: Any = (), anchored: Any = ()) -> Any:
    nothing = [False] * len(writes)
    return watch.path(writes, [None] * len(writes), nothing, nothing, nothing, moved, moved, (), anchored)


# What is watched ------------------------------------------------------------------------------------------------------


def every_argument() -> None:
    """Ops with arguments of every kind."""
    rows, images, generator = torch.ones(4, 6), torch.ones(1, 2, 4, 4), torch.Generator()
    rows.to(torch.float64)
    rows.to(torch.float16, memory_format=torch.contiguous_format)
    images.clone(memory_format=torch.channels_last)
    torch.zeros(2, 3, dtype=torch.int16, layout=torch.strided)
    torch.zeros_like(rows, layout=torch.strided, memory_format=torch.preserve_format)
    torch.empty((2, 2), layout=torch.sparse_coo, dtype=torch.float32)
    torch.add(rows, rows, alpha=2)
    torch.add(rows, rows, alpha=1)
    torch.add(rows, 2.5)
    torch.mul(rows, True)
    torch.mul(rows, 2 - 1j)
    rows.sum((0, 1), keepdim=True)
    rows.sum(0, dtype=torch.float64)
    rows[:, torch.tensor([0, 2])]
    torch.cat([rows, rows], 1)
    torch.cat([rows, rows])
    torch._foreach_add([rows, images], 1.5)
    torch.randint(0, 5, (3,), generator=generator)
    torch.rand(3, generator=None)
    torch.div(rows, 3, rounding_mode="floor")
    torch.nn.functional.conv2d(images, torch.ones(2, 2, 3, 3), None, 1, "same")
    torch.nn.functional.layer_norm(rows, (6,))
    torch.nn.functional.interpolate(images, scale_factor=2.0, mode="bilinear")
    torch.quantize_per_tensor(rows, 0.1, 3, torch.quint8)
    torch.bucketize(rows, torch.tensor([0.5, 1.5]), right=True)
    torch.exp(rows, out=torch.empty(4, 6))
    torch.clamp(rows, min=None, max=0.5)
    torch.linalg.vector_norm(rows, float("inf"))
    torch.empty_strided((2, 3), (1, 2), device="cpu")
    rows.clone().add_(1).fill_(float("nan"))
    rows.clone().index_put_((torch.tensor([1]),), torch.zeros(()))
    rows[:, torch.tensor([1])] = torch.zeros(())


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, (tuple, list)):
        return type(one) is type(other) and len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and (one.shape, one.dtype, one.layout) == (
            other.shape,
            other.dtype,
            other.layout,
        )
    if isinstance(one, torch.Generator):
        return isinstance(other, torch.Generator)
    return type(one) is type(other) and repr(one) == repr(other)  # a nan is not equal to itself


def test_the_kernel_passes_arguments_as_a_dispatch_mode_gets_them() -> None:
    """Replays call with them, and the step looks at some."""
    found, mode, watched = Noting(), NotingMode(), region()
    with mode:
        every_argument()
    watched.on_path = False
    watched.enter(found, False, "")
    every_argument()
    watched.leave()
    assert [call[0] for call in found.calls] == [call[0] for call in mode.calls]
    assert len(found.calls) > 40
    different = [
        (one, other)
        for one, other in zip(found.calls, mode.calls, strict=True)
        if not is_same(one[1], other[1]) or not is_same(sorted(one[2].items()), sorted(other[2].items()))
    ]
    assert different == []
    assert found.ended_calls == len(found.calls)


def test_a_region_within_another_one_leaves_it_in_place(module: Any) -> None:
    outer, inner, found, other = region(), region(), Noting(), Noting()
    outer.enter(found, False, "")
    inner.enter(other, False, "")
    torch.ones(2)
    inner.leave()
    assert module.is_watching()
    torch.ones(2).exp()
    outer.leave()
    outer.leave()
    assert not module.is_watching()
    torch.ones(2)
    assert [call[0].name() for call in other.calls] == ["aten::ones"]
    assert [call[0].name() for call in found.calls] == ["aten::ones", "aten::exp"]


def test_a_region_that_has_ended_holds_nothing() -> None:
    watched, found = region(), Noting()
    watched.enter(found, False, "")
    gone = weakref.ref(found)
    del found
    torch.ones(2)
    assert gone() is not None
    watched.leave()
    assert gone() is None


def test_an_op_that_comes_while_another_one_runs_is_told_apart() -> None:
    """Autograd's threads are in the region of the one that has called it."""
    watched, found, rows = region(), Noting(), torch.ones(4)
    begun, over = threading.Event(), threading.Event()

    def waiting(each: Tensor) -> Tensor:
        begun.set()
        assert over.wait(30)
        return each

    def beside() -> None:
        watched.enter(found, False, "")
        torch.tanh(rows)
        watched.leave()

    thread = threading.Thread(target=beside)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("tanh", waiting, "CPU", allow_override=True)
        watched.enter(found, False, "")
        try:
            torch.exp(rows)
            thread.start()
            assert begun.wait(30)
            torch.exp(rows)
        finally:
            over.set()
            thread.join(30)
            watched.leave()
    assert [call[0].name() for call in found.calls] == ["aten::exp", "aten::tanh", "aten::exp"]
    assert found.alone == [True, True, False]
    assert found.ended_calls == 3


# What storages hold ---------------------------------------------------------------------------------------------------


def test_what_a_storage_held_is_not_known_after_its_end() -> None:
    values, tensor = watch.storage_map(), torch.rand(4)
    key = storage_of(tensor)._cdata
    values.bind(storage_of(tensor), 3)
    assert values.get(key) == 3
    del tensor
    assert values.get(key) is None


def test_a_map_of_many_storages_that_are_gone_takes_no_memory() -> None:
    values, process = watch.storage_map(), psutil.Process()
    before_bytes = 0
    for number in range(250_000):
        values.bind(storage_of(torch.empty(0)), number)
        if number == 50_000:
            before_bytes = process.memory_info().rss
    assert process.memory_info().rss - before_bytes < 10_000_000


# What autograd holds --------------------------------------------------------------------------------------------------


class Saving:
    """A region whose hooks are called by hand, with a step that notes what comes to Python."""

    def __init__(self, **options: Any) -> None:
        self.values = watch.storage_map()
        self.region = watch.region(path(**options), self.values)
        self.packed: list[Any] = []
        self.unpacked: list[Any] = []
        self.stats = SimpleNamespace(host_step_ms=0.0)
        self.begun = 0
        step = SimpleNamespace(pack=self.pack, unpack=self.unpack, begin_reads=self.begin_reads)
        module: Any = watch.LIBRARY.get()
        self.hooks = module.Hooks(step, step, self.region, self.stats, time.perf_counter(), None)

    def begin_reads(self) -> None:
        self.begun += 1

    def pack(self, tensor: Tensor) -> Any:
        self.packed.append(tensor)
        return tensor

    def unpack(self, packed: Any) -> Tensor:
        self.unpacked.append(packed)
        return torch.zeros(1)

    def value(self, number: int, tensor: Tensor | None = None) -> Tensor:
        tensor = torch.rand(4) if tensor is None else tensor
        self.values.bind(storage_of(tensor), number)
        return tensor


def test_kept_tensors_are_listed_in_the_order_in_which_they_were_saved() -> None:
    """In this order they leave under pressure."""
    saving = Saving()
    kept = [saving.hooks.pack(saving.value(number)) for number in range(20)]
    saving.hooks.pack(torch.rand(4))  # holds no value of the step
    ended = [0, 3, 4, 17, 19]
    for place in ended:
        kept[place] = None
    listed = saving.region.take_kept(0)
    assert [each.number for each in listed] == [number for number in range(20) if number not in ended]
    assert listed == [each for each in kept if each is not None]
    assert saving.region.take_kept(0) == []
    del kept, listed
    assert saving.region.take_kept(0) == []


def test_kept_tensors_that_are_smaller_than_asked_for_stay_listed_and_so_do_those_that_come() -> None:
    """Python takes what is larger from then on."""
    saving = Saving()
    saving.region.on_path = False
    saving.region.go_unplanned(False, True, 0, 0)
    sizes = [4, 64, 8, 32, 4, 4, 4]
    kept = [saving.hooks.pack(saving.value(number, torch.rand(size))) for number, size in enumerate(sizes)]
    kept[2] = None
    assert [each.number for each in saving.region.take_kept(100)] == [1, 3]
    kept[5] = None
    kept.append(saving.hooks.pack(saving.value(7, torch.rand(24))))
    assert saving.packed == []
    large = torch.rand(25)
    assert saving.hooks.pack(saving.value(8, large)) is large
    assert saving.packed == [large]
    assert saving.region.next_save() == 9, "those that were kept here count too"
    kept.append(saving.hooks.pack(saving.value(9)))
    listed = saving.region.take_kept(0)
    assert [(each.number, each.serial) for each in listed] == [(0, 1), (4, 5), (6, 7), (7, 8), (9, 10)]
    saving.hooks.pack(saving.value(10))
    assert len(saving.packed) == 2, "Python has taken small ones as well"


def test_kept_tensors_that_nobody_holds_are_taken_while_garbage_is_collected() -> None:
    """Up to Python 3.11, garbage is collected as soon as the list that they are given in is made."""
    saving = Saving()
    garbage: list[Any] = [saving.hooks.pack(saving.value(number)) for number in range(20)]
    garbage.append(garbage)
    held: list[Any] = [[] for _ in range(200)]  # Python keeps some lists for the next ones that are made
    thresholds = gc.get_threshold()
    gc.disable()
    del garbage
    gc.set_threshold(1)
    try:
        gc.enable()
        taken = saving.region.take_kept(0)
    finally:
        gc.set_threshold(*thresholds)
    assert len(held) == 200
    assert all(each.tensor.numel() == 4 for each in taken)
    assert saving.region.take_kept(0) == []


def test_a_kept_tensor_that_is_given_up_goes() -> None:
    saving, tensor = Saving(), torch.rand(4)
    gone = weakref.ref(storage_of(tensor))
    kept = saving.hooks.pack(saving.value(0, tensor))
    del tensor
    assert gone() is not None
    kept.tensor = None
    assert gone() is None
    assert kept.tensor is None
    saving.hooks.unpack(kept)
    saving.hooks.unpack(kept)
    assert saving.unpacked == [kept, kept]


@pytest.mark.parametrize(
    ("make", "comes"),
    [
        (lambda: torch.rand(4), False),
        (lambda: torch.nn.Parameter(torch.rand(4)), False),
        (lambda: torch.rand(4).as_subclass(Seeing), True),
        (lambda: torch.quantize_per_tensor(torch.rand(4), 0.1, 0, torch.quint8), True),
        (lambda: torch.eye(4).to_sparse(), True),
        (lambda: torch.empty(4, device="meta"), True),
        (lambda: torch.nested.nested_tensor([torch.rand(2), torch.rand(3)]), True),
        (lambda: torch.rand(4)[:0], False),
    ],
)
def test_what_is_no_ordinary_tensor_is_saved_by_the_step(make: Callable[[], Tensor], comes: bool) -> None:
    saving, tensor = Saving(), make()
    packed = saving.hooks.pack(tensor)
    assert saving.packed == ([tensor] if comes else [])  # by identity, as the lists hold one
    assert (packed is tensor) == comes


class Seeing(Tensor):
    """A subclass that sees functions."""

    def __eq__(self, other: object) -> bool:  # type: ignore[override]
        return self is other

    __hash__ = Tensor.__hash__


def test_what_was_made_in_inference_mode_is_saved_by_the_step() -> None:
    saving = Saving()
    with torch.inference_mode():
        tensor = torch.rand(4)
    assert saving.hooks.pack(tensor) is tensor


def test_what_moves_or_is_off_the_path_is_saved_by_the_step() -> None:
    saving = Saving(moved=[1])
    moving, staying = saving.value(1), saving.value(2)
    assert saving.hooks.pack(moving) is moving
    assert saving.hooks.pack(staying) is not staying
    saving.region.on_path = False
    assert saving.hooks.pack(staying) is staying


def test_the_first_read_of_each_step_comes_to_it() -> None:
    """There the budget begins to look at the backward pass."""
    one, other = Saving(), Saving()
    for saving in (one, other, one):
        saving.begun = 0
        tensor = saving.value(0)
        packed = saving.hooks.pack(tensor)
        for _ in range(2):
            assert torch.equal(saving.hooks.unpack(packed), tensor)
            assert saving.begun == 1
        assert saving.unpacked == []
        assert saving.stats.host_step_ms > 0


def test_a_read_comes_to_the_step_where_something_is_due_or_has_changed() -> None:
    saving = Saving(anchored=[1])
    due, changed, other = (saving.value(number) for number in (1, 2, 3))
    packed = [saving.hooks.pack(tensor) for tensor in (due, changed, other)]
    saving.hooks.unpack(packed[2])
    saving.unpacked.clear()
    changed.add_(1)
    for each in packed:
        saving.hooks.unpack(each)
    assert saving.unpacked == packed[:2]
    saving.region.is_reassigned = True
    saving.hooks.unpack(packed[2])
    assert saving.unpacked == packed


def test_a_kept_tensor_has_no_history_and_the_version_of_what_was_saved() -> None:
    saving, leaf = Saving(), torch.rand(4, requires_grad=True)
    made = saving.value(0, leaf * 2)
    kept = saving.hooks.pack(made)
    assert kept.tensor.grad_fn is None
    assert (kept.number, kept.version, kept.identity) == (0, 0, None)  # the result of the newest node
    made.data_ptr()
    with torch.no_grad():
        made.add_(1)
    assert kept.tensor._version == 1


def test_a_kept_tensor_tells_which_one_was_saved_unless_it_is_an_ops_own_result() -> None:
    saving, leaf = Saving(), torch.rand(4, requires_grad=True)
    made = saving.value(0, leaf * 2)
    assert saving.hooks.pack(made).identity is None
    made.sin()
    assert made.grad_fn is not None
    assert saving.hooks.pack(made).identity == (id(made), made.grad_fn._sequence_nr())
    assert saving.hooks.pack(leaf).identity is None


def test_a_forward_pass_without_a_backward_pass_leaves_nothing_behind() -> None:
    """An op that saves its own result would hold itself."""
    saving, leaf = Saving(), torch.rand(4, requires_grad=True)
    gc.disable()
    try:
        with torch.autograd.graph.saved_tensors_hooks(saving.hooks.pack, saving.hooks.unpack):
            made = leaf.exp().tanh()
        gone = weakref.ref(storage_of(made))
        del made
        assert gone() is None
    finally:
        gc.enable()
    assert saving.packed == []


# What the program has released ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_native", [True, False])
def test_values_that_autograd_or_the_program_has_let_go_of_are_found(
    is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_native:
        monkeypatch.setattr(watch.LIBRARY, "loaded", None)
    held = torch.rand(4)
    by_program, alone, away, ended = (Value(number) for number in range(4))
    by_program.storage, alone.storage, ended.storage = storage_of(held), storage_of(torch.rand(4)), storage_of(held)
    for value in (by_program, alone, away):
        value.handles = 1
    values = {each.number: each for each in (by_program, alone, away, ended)}
    assert released(values) == [1, 2, 3]
    del held
    assert released(values) == [0, 1, 2, 3]
    assert released({}) == []


def test_what_is_no_dictionary_of_values_has_none_to_look_at() -> None:
    module: Any = watch.LIBRARY.get()
    with pytest.raises(TypeError, match="in a dictionary"):
        module.released([])
    with pytest.raises(AttributeError):
        module.released({0: object()})
