"""Hooks and modes that are silent where PyTorch would refuse them, and in place again afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from pooch.torchtools.standing_aside import CompiledCalls, SilentMode, StepHooks

_autograd: Any = torch._C._autograd


class Noted(SilentMode):
    """Notes the ops that it sees while it is not silent."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.is_silent:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """PyTorch's own functions are back, and its stacks are empty."""
    disable, set_frame = _autograd._saved_tensors_hooks_disable, torch._dynamo.eval_frame.set_eval_frame
    yield
    assert _autograd._saved_tensors_hooks_disable is disable
    assert torch._dynamo.eval_frame.set_eval_frame is set_frame
    assert _autograd._top_saved_tensors_default_hooks(True) is None
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
    assert _autograd._saved_tensors_hooks_is_enabled()


def notes() -> tuple[bool, ...]:
    """What PyTorch notes for the whole process about modes that are in place."""
    names = ("torch_dispatch_mode", "non_infra_torch_dispatch_mode", "any_mode_without_ignore_compile_internals")
    return tuple(getattr(torch.utils._python_dispatch, f"_is_in_{name}") for name in names)


class Idle(torch.utils._python_dispatch.TorchDispatchMode):
    """A mode of the program's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_modes_of_threads_that_overlap_leave_no_note_behind() -> None:
    before, entered, left = notes(), threading.Event(), threading.Event()
    first, second = Noted(), Noted()

    def other() -> None:
        with second:
            entered.set()
            left.wait(30)
            torch.ones(2)

    thread = threading.Thread(target=other)
    with first:
        thread.start()
        entered.wait(30)
        torch.ones(2)
    left.set()
    thread.join()
    assert first.seen == second.seen == ["aten.ones.default"]
    assert notes() == before


def test_a_thread_that_ends_within_a_mode_leaves_no_note_behind() -> None:
    before = notes()
    thread = threading.Thread(target=Noted().__enter__)
    thread.start()
    thread.join()
    assert notes() == before


def test_a_mode_is_taken_away_below_those_of_the_program() -> None:
    ours, theirs, before = Noted(), Idle(), notes()
    ours.__enter__()
    with theirs:
        within = notes()
        ours.leave()
        assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == [theirs]
        assert notes() == within != before
        torch.ones(2)
    assert ours.seen == []
    assert notes() == before


def hooks(packed: list[Tensor], told: list[str] | None = None) -> StepHooks:
    """Hooks that note what they pack."""

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    return StepHooks(pack, lambda tensor: tensor, None if told is None else told.append)


def test_a_transform_is_not_hooked_and_what_follows_is() -> None:
    rows, packed, told = torch.rand(4, requires_grad=True), list[Tensor](), list[str]()
    with hooks(packed, told):
        torch.func.grad(torch.func.grad(lambda each: each.sin().exp()))(torch.tensor(1.0))
        inside = torch.func.vjp(torch.sin, rows)[0]
        assert (packed, told) == ([], ["torch.func", "torch.func"])
        inside.exp()
        assert len(packed) == 1


def test_hooks_of_the_program_above_or_below_ours_are_refused_as_ever() -> None:
    def transform() -> None:
        torch.func.grad(torch.sin)(torch.tensor(1.0))

    ours, theirs = hooks([]), torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with ours, theirs, pytest.raises(RuntimeError, match="don't yet support"):
        transform()
    ours = hooks([])
    with theirs, ours, pytest.raises(RuntimeError, match="don't yet support"):
        transform()


def test_hooks_inside_of_a_transform_are_refused_as_ever() -> None:
    def hooked(each: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return each.sin()

    with hooks([]), pytest.raises(RuntimeError, match="don't yet support"):
        torch.func.grad(hooked)(torch.tensor(1.0))


def test_a_function_is_compiled_under_our_modes_as_without_them() -> None:
    counter, packed, told = CompileCounter(), list[Tensor](), list[str]()
    function = torch.compile(lambda each: each.sin().exp(), backend=counter, fullgraph=True)
    rows, mode = torch.rand(4, requires_grad=True), Noted()
    with hooks(packed, told), mode:
        function(rows)
        assert (packed, mode.seen) == ([], [])
        rows.cos()
        assert (len(packed), mode.seen) == (1, ["aten.cos.default"])
    function(rows)
    assert told == ["a compiled function"]
    assert counter.frame_count == 1, "what was compiled under the modes serves without them"


def test_what_a_compiled_function_exempts_is_as_silent_as_the_rest() -> None:
    rows, packed = torch.rand(4, requires_grad=True), list[Tensor]()

    @torch._dynamo.disable
    def aside(each: Tensor) -> Tensor:
        return each.cos()

    function = torch.compile(lambda each: aside(each.sin()).exp(), backend="eager")
    with hooks(packed), Noted() as mode:
        function(rows)
        assert (mode.seen, packed) == ([], [])
        rows.tanh()
    assert mode.seen == ["aten.tanh.default"]
    assert len(packed) == 1


class Counted(CompiledCalls):
    """Counts the calls that begin."""

    def __init__(self) -> None:
        self.begun = 0

    def begins(self, options: Any) -> bool:
        self.begun += 1
        return True


@pytest.mark.parametrize("stance", ["default", "force_eager"])
def test_a_call_begins_before_pytorch_notes_which_keys_are_included(stance: str) -> None:
    """What comes or goes afterwards, such as a mode, would be undone in part at its end."""
    calls, noted = Counted(), list[int]()
    function, note = torch.compile(torch.sin, backend="eager"), torch._C._dispatch_tls_local_include_set

    def noting() -> Any:
        noted.append(calls.begun)
        return note()

    with StepHooks(lambda each: each, lambda each: each, calls=calls), torch.compiler.set_stance(stance):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(torch._C, "_dispatch_tls_local_include_set", noting)
            function(torch.rand(4, requires_grad=True))
        assert noted[:1] == [1]
        if stance == "force_eager":
            assert calls.begun == 1


def test_a_function_that_raises_while_it_compiles_leaves_all_in_place() -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise ValueError("no code for this")

    packed: list[Tensor] = []
    with hooks(packed), Noted() as mode:
        with pytest.raises(Exception, match="no code for this"):
            torch.compile(torch.sin, backend=broken)(torch.rand(4))
        torch.rand(4, requires_grad=True).cos()
    assert len(packed) == 1
    assert "aten.cos.default" in mode.seen


def test_hooks_that_end_while_they_are_lifted_do_not_come_back() -> None:
    packed: list[Tensor] = []
    ours = hooks(packed)
    theirs: list[Tensor] = []

    def ends(graph: Any, inputs: Any) -> Any:
        ours.__exit__(None, None, None)
        return graph.forward

    outer = torch.autograd.graph.saved_tensors_hooks(lambda each: theirs.append(each) or each, lambda each: each)  # type: ignore[func-returns-value]
    with outer, hooks([]):
        ours.__enter__()
        torch.compile(torch.sin, backend=ends)(torch.rand(4))
        torch.rand(4, requires_grad=True).cos()
        assert packed == []
    torch.rand(4, requires_grad=True).cos()


def test_hooks_of_the_program_stay_in_place_in_a_compiled_function() -> None:
    rows, order = torch.rand(4, requires_grad=True), list[str]()

    def theirs(name: str) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(lambda each: order.append(name) or each, lambda each: each)  # type: ignore[func-returns-value]

    function = torch.compile(lambda each: each.sin(), backend="eager")
    with theirs("below"), hooks([]), theirs("above"):
        function(rows)
        assert set(order) == {"above"}, "the innermost hooks are asked"
    with theirs("outer"):
        rows.sin()
    assert order[-1] == "outer"


def test_an_operator_of_higher_order_passes_a_silent_mode() -> None:
    from torch._higher_order_ops.out_dtype import out_dtype

    left, right = torch.ones(2, 2, dtype=torch.int8), torch.ones(2, 2, dtype=torch.int8)
    with Noted() as mode:
        assert torch.equal(out_dtype(torch.ops.aten.mm.default, torch.int32, left, right), torch.full((2, 2), 2))
    assert "out_dtype" in mode.seen
