"""Cross entropy in slices: the same bits, and the logits are written over only where nobody else reads them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from pooch.torchtools.split import LossCall, SplitCalls, difference_from_plain, splittable, watching_losses
from pooch.torchtools.split import loss as split_loss

ROWS, CLASSES, WIDTH = 24, 400, 8


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each backward pass in slices, whether it wrote the gradient over the logits."""
    found: list[bool] = []
    asked = split_loss.may_be_written_over

    def told(logits: Tensor) -> bool:
        found.append(asked(logits))
        return found[-1]

    monkeypatch.setattr(split_loss, "may_be_written_over", told)
    return found


@pytest.fixture
def head() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(CLASSES, WIDTH, requires_grad=True)


def _hidden() -> Tensor:
    return torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)


def _target() -> Tensor:
    return torch.arange(ROWS) * 7 % CLASSES


def _in_slices(forward: Callable[[], Any], hooks: Any = None) -> tuple[Any, SplitCalls]:
    """Run a forward pass with every loss that can be sliced in slices."""
    seen: set[str] = set()

    def note(plain: Callable[..., Tensor], arguments: tuple[Any, ...], named: Any) -> Tensor:
        call = splittable(arguments, named)
        if isinstance(call, LossCall):
            seen.add(call.fingerprint)
        return plain(*arguments, **named)

    with watching_losses(note), torch.no_grad():
        forward()
    calls = SplitCalls(frozenset(seen))
    with watching_losses(calls), hooks or nullcontext():
        return forward(), calls


def _gradient(loss: Tensor, head: Tensor, **options: Any) -> Tensor:
    (found,) = torch.autograd.grad(loss, head, **options)
    return found


def _same(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first, second)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(2, 70),
    classes=st.integers(1, 700),
    size=st.integers(1, 80),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    reduction=st.integers(0, 2),
    ignored=st.sampled_from([-100, 0, 3]),
    weighted=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_all_bits_are_those_of_the_plain_operators(
    rows: int, classes: int, size: int, dtype: torch.dtype, reduction: int, ignored: int, weighted: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, classes, generator=generator) * 4).to(dtype)
    target = torch.randint(0, classes, (rows,), generator=generator)
    if ignored < classes:
        target[::5] = ignored
    weight = torch.rand(classes, generator=generator).to(dtype) if weighted else None
    assert difference_from_plain(logits, target, weight, reduction, ignored, size) is None


@pytest.mark.parametrize("threads", [1, 2])
def test_a_vocabulary_has_the_same_bits_with_any_number_of_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        logits, target = torch.randn(130, 20011), torch.randint(0, 20011, (130,))
        assert difference_from_plain(logits, target, None, 1, -100, 17) is None
    finally:
        torch.set_num_threads(before)


def test_rows_without_a_class_give_the_same_bits_even_if_no_row_has_one() -> None:
    logits, target = torch.randn(10, 30), torch.full((10,), -100)
    assert difference_from_plain(logits, target, None, 1, -100, 3) is None  # nan in both


def test_other_bits_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.ops.aten.cross_entropy_loss
    monkeypatch.setattr(torch.ops.aten, "cross_entropy_loss", lambda *arguments: plain(*arguments) + 1e-3)
    assert difference_from_plain(torch.randn(10, 30), torch.zeros(10).long(), None, 1, -100, 3) == "the loss"


@pytest.mark.parametrize("target", [-1, CLASSES])
def test_a_class_that_does_not_exist_raises_what_plain_training_raises(head: Tensor, target: int) -> None:
    wrong = torch.full((ROWS,), target)

    def forward() -> Tensor:
        return functional.cross_entropy(_hidden() @ head.t(), wrong)

    with pytest.raises(IndexError) as expected:
        forward()
    with pytest.raises(IndexError) as found:
        torch.ops.pooch_split.cross_entropy(_hidden() @ head.t(), wrong, None, 1, -100, 4)
    assert str(found.value) == str(expected.value)


Way = Callable[[Tensor], Tensor]
WAYS: dict[str, Way] = {
    "function": lambda logits: functional.cross_entropy(logits, _target()),
    "module": lambda logits: torch.nn.CrossEntropyLoss(ignore_index=7)(logits, _target()),
    "named": lambda logits: functional.cross_entropy(input=logits, target=_target(), reduction="sum"),
    "view": lambda logits: functional.cross_entropy(logits.view(4, -1, CLASSES).flatten(0, 1), _target()),
    "no reduction": lambda logits: functional.cross_entropy(logits, _target(), reduction="none").square().sum(),
    "scaled": lambda logits: functional.cross_entropy(logits, _target()) / 3,
}


@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_is_written_over_logits_that_nobody_holds(way: str, head: Tensor, written: list[bool]) -> None:
    def forward() -> Tensor:
        return WAYS[way](_hidden() @ head.t())

    plain = forward()
    loss, calls = _in_slices(forward)
    assert len(calls.made) == 1
    assert _same(loss, plain)
    assert _same(_gradient(loss, head), _gradient(plain, head))
    assert written == [True]


def test_weights_of_classes_give_the_same_bits(head: Tensor, written: list[bool]) -> None:
    weight = torch.linspace(0.1, 2, CLASSES)

    def forward() -> Tensor:
        return functional.cross_entropy(_hidden() @ head.t(), _target(), weight)

    plain = forward()
    loss, calls = _in_slices(forward)
    assert len(calls.made) == 1
    assert _same(loss, plain)
    assert _same(_gradient(loss, head), _gradient(plain, head))
    assert written == [True]


def test_label_smoothing_and_probabilities_stay_whole(head: Tensor) -> None:
    shares = torch.full((ROWS, CLASSES), 1 / CLASSES)

    def forward() -> Tensor:
        logits = _hidden() @ head.t()
        smoothed = functional.cross_entropy(logits, _target(), label_smoothing=0.1)
        return smoothed + functional.cross_entropy(logits, shares)

    plain = forward()
    loss, calls = _in_slices(forward)
    assert calls.made == []
    assert _same(_gradient(loss, head), _gradient(plain, head))


def test_losses_over_pictures_stay_whole() -> None:
    scores = torch.randn(2, 5, 4, 4, requires_grad=True)
    _, calls = _in_slices(lambda: functional.cross_entropy(scores, torch.zeros(2, 4, 4).long()))
    assert calls.made == []


HOLDS: dict[str, Callable[[Tensor], Any]] = {
    "logits": lambda logits: logits,
    "view": lambda logits: logits[:2],
    "detached": lambda logits: logits.detach(),
    "storage's other tensor": lambda logits: logits.data,
    "NumPy": lambda logits: logits.detach().numpy(),
}


@pytest.mark.parametrize("held", HOLDS)
def test_logits_that_the_program_holds_are_not_written_over(held: str, head: Tensor, written: list[bool]) -> None:
    def forward() -> tuple[Tensor, Any]:
        logits = _hidden() @ head.t()
        return functional.cross_entropy(logits, _target()), HOLDS[held](logits)

    (loss, kept), calls = _in_slices(forward)
    before = torch.as_tensor(kept).detach().clone()
    plain, _ = forward()
    assert _same(_gradient(loss, head), _gradient(plain, head))
    assert len(calls.made) == 1
    assert written == [False]
    assert torch.equal(torch.as_tensor(kept).detach(), before)


SAVERS: dict[str, Callable[[Tensor], Tensor]] = {
    "before, its result": lambda logits: functional.cross_entropy(torch.tanh(logits), _target()),
    "beside, its argument": lambda logits: 1e-3 * (logits * logits).sum() + functional.cross_entropy(logits, _target()),
    "twice": lambda logits: functional.cross_entropy(logits, _target()) + functional.cross_entropy(logits, _target()),
}


@pytest.mark.parametrize("saver", SAVERS)
def test_logits_that_another_operator_saves_keep_their_contents(saver: str, head: Tensor, written: list[bool]) -> None:
    def forward() -> Tensor:
        return SAVERS[saver](_hidden() @ head.t())

    plain = forward()
    loss, calls = _in_slices(forward)
    assert calls.made
    assert _same(_gradient(loss, head), _gradient(plain, head))
    assert False in written


@pytest.mark.parametrize("make", [lambda tensor: tensor.t(), lambda tensor: tensor.t()[:, ::2]])
def test_logits_that_are_not_contiguous_keep_their_contents(
    make: Callable[[Tensor], Tensor], head: Tensor, written: list[bool]
) -> None:
    def forward() -> Tensor:
        logits = make(head @ _hidden().t())
        return functional.cross_entropy(logits, _target() % logits.shape[1])

    plain = forward()
    loss, calls = _in_slices(forward)
    assert len(calls.made) == 1
    assert _same(_gradient(loss, head), _gradient(plain, head))
    assert written == [False]


def test_a_second_backward_pass_reads_the_same_logits(head: Tensor, written: list[bool]) -> None:
    loss, _ = _in_slices(lambda: functional.cross_entropy(_hidden() @ head.t(), _target()))
    first = _gradient(loss, head, retain_graph=True)
    assert _same(first, _gradient(loss, head))
    assert written == [False, True]


def test_a_graph_of_the_gradient_is_that_of_the_plain_operators(head: Tensor, written: list[bool]) -> None:
    def forward() -> Tensor:
        return functional.cross_entropy(_hidden() @ head.t(), _target())

    plain, (loss, calls) = forward(), _in_slices(forward)
    assert len(calls.made) == 1
    first, second = (_gradient(each, head, create_graph=True) for each in (plain, loss))
    assert _same(first, second)
    assert _same(_gradient(first.square().sum(), head), _gradient(second.square().sum(), head))
    assert written == []


@pytest.mark.parametrize("hooks", ["kept", "copied"])
def test_saved_tensor_hooks_that_keep_or_copy_give_the_same_bits(hooks: str, head: Tensor, written: list[bool]) -> None:
    def keep(tensor: Tensor) -> Tensor:
        return tensor

    def copy(tensor: Tensor) -> Tensor:
        return tensor.clone()

    way = keep if hooks == "kept" else copy
    loss, _ = _in_slices(
        lambda: functional.cross_entropy(_hidden() @ head.t(), _target()),
        torch.autograd.graph.saved_tensors_hooks(way, way),
    )
    plain = functional.cross_entropy(_hidden() @ head.t(), _target())
    assert _same(_gradient(loss, head), _gradient(plain, head))
    assert written == [True]


@pytest.mark.parametrize("cached", [True, False])
def test_autocasting_computes_the_loss_in_single_precision_all_the_same(
    cached: bool, head: Tensor, written: list[bool]
) -> None:
    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            return functional.cross_entropy(_hidden() @ head.t(), _target())

    plain = forward()
    loss, calls = _in_slices(forward)
    assert len(calls.made) == 1
    assert "float32" in calls.made[0]
    assert _same(loss, plain)
    assert _same(_gradient(loss, head), _gradient(plain, head))
    assert written == [True]


def test_deterministic_algorithms_give_the_same_bits(head: Tensor, written: list[bool]) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        test_a_second_backward_pass_reads_the_same_logits(head, written)
        logits, target = torch.randn(60, 900), torch.randint(0, 900, (60,))
        assert all(difference_from_plain(logits, target, None, each, -100, 7) is None for each in range(3))
    finally:
        torch.use_deterministic_algorithms(False)


def test_no_call_is_touched_that_is_not_named_or_has_no_graph(head: Tensor) -> None:
    calls = SplitCalls(frozenset({"another"}))
    with watching_losses(calls):
        functional.cross_entropy(_hidden() @ head.t(), _target())
    assert calls.made == []
    with torch.no_grad():
        _, calls = _in_slices(lambda: functional.cross_entropy(_hidden() @ head.t(), _target()))
    assert calls.made == []


def test_the_function_is_put_back(head: Tensor) -> None:
    before = torch._C._nn.cross_entropy_loss
    outer = ExitStack()
    outer.enter_context(watching_losses(SplitCalls(frozenset())))
    with watching_losses(SplitCalls(frozenset())):
        pass
    assert torch._C._nn.cross_entropy_loss is not before
    outer.close()
    assert torch._C._nn.cross_entropy_loss is before
