"""Steps in slices: the same bits as a step as a whole, for every optimizer of PyTorch and whatever is around a step."""

import copy
import functools
import pickle
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
import torch
from torch import nn, optim
from torch.optim import optimizer as of_torch
from torch.utils._python_dispatch import TorchDispatchMode

from pooch.errors import UsageError
from pooch.torchtools.optimizer_slices import Load, OptimizerSlices, diversion, plain_step, small_copies
from pooch.torchtools.optimizer_slices.coupling import _ONE_BY_ONE, is_known
from pooch.torchtools.optimizer_slices.needs import KnownNeeds

SLICE_BYTES = 700


@dataclass
class Watch:
    """What slices have called, and which of their parameters are between `before` and what follows it."""

    optimizer: Any
    slices: list[list[int]] = field(default_factory=list)
    failures: list[list[int]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    inside: list[int] = field(default_factory=list)

    def _numbers(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        numbers = {id(each): n for n, each in enumerate(parameters_of(self.optimizer))}
        return [numbers[id(each)] for each in parameters]

    def before(self, parameters: Sequence[torch.Tensor]) -> None:
        assert not self.inside
        self.inside = self._numbers(parameters)

    def after(self, parameters: Sequence[torch.Tensor]) -> None:
        assert self.inside == self._numbers(parameters)
        self.slices.append(self.inside)
        self.inside = []

    def failed(self, parameters: Sequence[torch.Tensor]) -> None:
        self.failures.append(self._numbers(parameters))
        self.inside = []


def sliced(optimizer: optim.Optimizer, slice_bytes: int = SLICE_BYTES, **further: Any) -> tuple[OptimizerSlices, Watch]:
    watch = Watch(optimizer)
    slices = OptimizerSlices(
        optimizer,
        slice_bytes,
        before=watch.before,
        after=watch.after,
        failed=watch.failed,
        tell=watch.told.append,
        **further,
    )
    slices.attach()
    _MADE.append(slices)
    return slices, watch


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """PyTorch's classes are as before once no optimizer is attached any more."""
    yield
    for slices in _MADE:
        slices.detach()
    _MADE.clear()
    assert not diversion._PLAIN_STEPS
    assert not diversion._HANDLERS
    assert not diversion._USERS


_MADE: list[OptimizerSlices] = []


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def state_of(optimizer: Any) -> list[tuple[int, dict[str, Any]]]:
    numbers = {id(each): n for n, each in enumerate(parameters_of(optimizer))}
    return [(numbers.get(id(key), key), value) for key, value in optimizer.state.items()]


def _dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def assert_same_bits(one: Any, other: Any) -> None:
    assert small_copies.same([p.detach() for p in parameters_of(one)], [p.detach() for p in parameters_of(other)])
    assert small_copies.same(*([_dense(p.grad) for p in parameters_of(each)] for each in (one, other)))
    assert small_copies.same(state_of(one), state_of(other))
    assert small_copies.same(one.state_dict(), other.state_dict())


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 2)).to(
        dtype
    )


def matrices(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 9, bias=False), nn.Linear(9, 5, bias=False), nn.Linear(5, 7, bias=False)]
    return nn.Sequential(*layers, nn.Linear(7, 2, bias=False)).to(dtype)


CASES = [
    (optim.Adadelta, {}),
    (optim.Adadelta, {"foreach": True}),
    (optim.Adafactor, {}),
    (optim.Adafactor, {"foreach": True}),
    (optim.Adagrad, {"weight_decay": 0.1, "lr_decay": 0.1}),
    (optim.Adagrad, {"foreach": True}),
    (optim.Adagrad, {"fused": True}),
    (optim.Adam, {"amsgrad": True}),
    (optim.Adam, {"amsgrad": True, "foreach": True, "weight_decay": 0.1}),
    (optim.Adam, {"fused": True}),
    (optim.Adam, {"lr": torch.tensor(1e-2)}),
    (optim.AdamW, {}),
    (optim.AdamW, {"foreach": True}),
    (optim.AdamW, {"fused": True, "amsgrad": True}),
    (optim.Adamax, {}),
    (optim.Adamax, {"foreach": True, "maximize": True}),
    (optim.ASGD, {"t0": 2, "weight_decay": 0.1}),
    (optim.ASGD, {"t0": 2, "foreach": True}),
    (optim.Muon, {}),
    (optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (optim.NAdam, {"foreach": True}),
    (optim.RAdam, {}),
    (optim.RAdam, {"foreach": True}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (optim.RMSprop, {"momentum": 0.9, "foreach": True}),
    (optim.Rprop, {}),
    (optim.Rprop, {"foreach": True}),
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": True}),
    (optim.SGD, {"momentum": 0.9, "fused": True, "maximize": True}),
]


def case_name(case: tuple[type[optim.Optimizer], dict[str, Any]]) -> str:
    kind, settings = case
    return f"{kind.__name__}-{'-'.join(settings)}"


def made(kind: type[optim.Optimizer], settings: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """A network and its optimizer, which has two groups of different settings."""
    network = (matrices if kind is optim.Muon else model)(dtype)
    own = list(network.parameters())
    settings = {name: copy.deepcopy(value) for name, value in settings.items()}
    rate = torch.tensor(0.03) if isinstance(settings.get("lr"), torch.Tensor) else 0.03
    groups = [{"params": own[:-1]}, {"params": own[-1:], "lr": rate}]
    return network, kind(groups, **settings)


def loss_of(network: nn.Module, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(dtype)
    return network(inputs).square().mean()


def train_plainly(network: nn.Module, optimizer: Any, steps: int = 5) -> None:
    for step in range(steps):
        loss_of(network, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_clipped_accumulated_scheduled(network: nn.Module, optimizer: Any) -> None:
    schedule = optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(5):
        for microbatch in range(2):
            loss_of(network, 10 * step + microbatch).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=False)


def train_with_a_closure(network: nn.Module, optimizer: Any) -> None:
    for step in range(5):
        calls = []

        def closure(step: int = step, calls: list[int] = calls) -> torch.Tensor:
            calls.append(step)
            optimizer.zero_grad()
            loss = loss_of(network, step)
            loss.backward()
            return loss

        assert optimizer.step(closure).requires_grad  # the very loss
        assert calls == [step]


def train_without_gradients_around(network: nn.Module, optimizer: Any) -> None:
    with torch.no_grad():
        train_with_a_closure(network, optimizer)


def train_scaled(network: nn.Module, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step in range(5):
        loss = loss_of(network, step)
        scaler.scale(loss * (torch.inf if step == 2 else 1)).backward()
        if step == 3:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def train_with_changing_gradients(network: nn.Module, optimizer: Any) -> None:
    """Some parameters have no gradient in some steps, groups are added, settings loaded."""
    frozen = list(network.parameters())[1]
    for step in range(5):
        frozen.requires_grad_(step % 2 == 1)
        loss_of(network, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


TRAININGS = [
    train_plainly,
    train_clipped_accumulated_scheduled,
    train_with_a_closure,
    train_without_gradients_around,
    train_scaled,
    train_with_changing_gradients,
]


def raised_by(training: Callable[[Any, Any], None], network: Any, optimizer: Any) -> str:
    try:
        training(network, optimizer)
    except TypeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("training", TRAININGS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_steps_in_slices_have_the_bits_of_whole_ones(case: Any, training: Callable[[Any, Any], None]) -> None:
    plain_network, plain = made(*case)
    network, optimizer = made(*case)
    slices, watch = sliced(optimizer)
    with warnings.catch_warnings(record=True) as of_plain:
        error = raised_by(training, plain_network, plain)
    with warnings.catch_warnings(record=True) as of_slices:
        assert raised_by(training, network, optimizer) == error
    slices.detach()
    assert_same_bits(plain, optimizer)
    assert vars(optimizer).keys() == vars(plain).keys()
    if error:  # PyTorch's own: the fused SGD fails where a parameter is stepped for the first time beside others
        assert "fused" in case[1]
        return
    assert [str(each.message) for each in of_slices] == [str(each.message) for each in of_plain]
    is_partly_new = case[0] is optim.SGD and "foreach" in case[1] and training is train_with_changing_gradients
    assert len(watch.told) == is_partly_new  # one step of the list that has parameters with and without a momentum
    assert watch.failures == []
    assert slices.slices_in_last_step > 1
    assert len(watch.slices) > 5


def test_every_optimizer_of_pytorch_is_tested_or_refused() -> None:
    everything = {each for each in vars(optim).values() if isinstance(each, type) and issubclass(each, optim.Optimizer)}
    assert everything == _ONE_BY_ONE | {optim.Optimizer, optim.LBFGS}
    assert {case[0] for case in CASES} | {optim.SparseAdam} == _ONE_BY_ONE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("case", [(optim.AdamW, {"foreach": True}), (optim.AdamW, {"fused": True})], ids=case_name)
def test_other_dtypes(case: Any, dtype: torch.dtype) -> None:
    (plain_network, plain), (network, optimizer) = made(*case, dtype), made(*case, dtype)
    slices, watch = sliced(optimizer)
    for each, its in ((plain_network, plain), (network, optimizer)):
        for step in range(3):
            loss_of(each, step, dtype).backward()
            its.step()
    slices.detach()
    assert_same_bits(plain, optimizer)
    assert len(watch.slices) > 3


@pytest.mark.parametrize("kind", [optim.SparseAdam, optim.Adagrad, optim.SGD])
def test_sparse_gradients(kind: type[optim.Optimizer]) -> None:
    def train(slicing: bool) -> tuple[Any, Any]:
        torch.manual_seed(0)
        tables = nn.ModuleList(nn.Embedding(20, 3, sparse=True) for _ in range(4))
        optimizer = kind(tables.parameters(), lr=0.1)
        slices, watch = sliced(optimizer) if slicing else (None, None)
        for step in range(4):
            indices = torch.arange(step, 10 + step * 2)
            sum(table(indices % 20).square().sum() for table in tables).backward()
            optimizer.step()
            optimizer.zero_grad()
        if slices is not None:
            slices.detach()
        return optimizer, watch

    (plain, _), (optimizer, watch) = train(False), train(True)
    assert_same_bits(plain, optimizer)
    assert len(watch.slices) > 4


def with_gradients(optimizer: Any) -> Any:
    for each in parameters_of(optimizer):
        each.grad = torch.randn_like(each)
    return optimizer


def optimizer_with_gradients(kind: Any = optim.AdamW, count: int = 5, **settings: Any) -> Any:
    torch.manual_seed(0)
    return with_gradients(kind([nn.Parameter(torch.randn(3 + n, 4)) for n in range(count)], **settings))


def step_both(make: Callable[[], Any], steps: int = 3, slice_bytes: int = 1) -> Watch:
    """Steps an optimizer plainly and another one in slices, and gives what the slices have called."""
    plain, optimizer = make(), make()
    slices, watch = sliced(optimizer, slice_bytes)
    for _ in range(steps):
        plain.step()
        optimizer.step()
        assert_same_bits(plain, optimizer)
    slices.detach()
    return watch


def test_complex_parameters() -> None:
    def make() -> Any:
        optimizer = optimizer_with_gradients(optim.Adam, foreach=True)
        parameters = [nn.Parameter(torch.complex(p.detach(), p.detach())) for p in parameters_of(optimizer)]
        for each in parameters:
            each.grad = each.detach() * 2
        return optim.Adam(parameters, foreach=True)

    assert len(step_both(make).slices) == 15


def test_slices_hold_consecutive_parameters_up_to_their_bytes() -> None:
    optimizer = optimizer_with_gradients(count=8)  # 48 to 160 bytes each, fourfold with gradient and state, and 4
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]})
    for each in parameters_of(optimizer)[-1:]:
        each.grad = torch.ones_like(each)
    slices, watch = sliced(optimizer, 612)
    for _ in range(3):
        optimizer.step()
    slices.detach()
    sizes = [4 * each.nbytes + 4 for each in parameters_of(optimizer)]
    assert sizes[:8] == [196, 260, 324, 388, 452, 516, 580, 644]
    # The first step does not know how large the state is until it has seen one in each group.
    first = [[0], [1, 2], [3], [4], [5], [6], [7], [9]]
    then = [[0, 1], [2], [3], [4], [5], [6], [7], [9]]
    assert watch.slices == [*first, *then, *then]
    assert slices.slices_in_last_step == len(then)


def test_a_slice_may_hold_small_groups() -> None:
    def make() -> Any:
        groups = [
            {"params": [each], "lr": 0.01 * n} for n, each in enumerate(parameters_of(optimizer_with_gradients()))
        ]
        optimizer = optim.SGD(groups)
        for each in parameters_of(optimizer):
            each.grad = torch.ones_like(each)
        return optimizer

    assert step_both(make, slice_bytes=10000).slices[-1] == [0, 1, 2, 3, 4]


class Room:
    """Tells what slices take: a share for each parameter, and whether it moves.

    Args:
        optimizer: The optimizer.
        moving: The numbers of the parameters that move.
        share: Of each parameter.
        small: The numbers of those that take little room where something moves.
    """

    def __init__(self, optimizer: Any, moving: Sequence[int], share: float, small: Sequence[int] = ()) -> None:
        self.numbers = {id(each): n for n, each in enumerate(parameters_of(optimizer))}
        self.moving, self.share, self.small = set(moving), share, set(small)
        self.asked: list[list[list[int]]] = []
        self.nexts: list[list[int]] = []

    def loads_of(self, slices: Sequence[Sequence[torch.Tensor]], needs: Any) -> list[Load]:
        numbers = [[self.numbers[id(each)] for each in parameters] for parameters in slices]
        self.asked.append(numbers)
        assert needs.alone > 0
        return [self._load(each) for each in numbers]

    def _load(self, numbers: Sequence[int]) -> Load:
        is_small = set(numbers) <= self.small
        return Load(bool(self.moving.intersection(numbers)), self.share, 0.01 if is_small else self.share)

    def before_next(self, parameters: Sequence[torch.Tensor]) -> None:
        self.nexts.append([self.numbers[id(each)] for each in parameters])


def in_groups(kind: Any, counts: Sequence[int] = (3, 3, 2)) -> Any:
    stepped = parameters_of(optimizer_with_gradients(count=sum(counts)))
    starts = [sum(counts[:n]) for n in range(len(counts))]
    return kind([{"params": stepped[s : s + c], "lr": 0.01 * s + 0.01} for s, c in zip(starts, counts, strict=True)])


@pytest.mark.parametrize(
    ("moving", "share", "slices"),
    [
        ((), 0.0, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ((), 0.25, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ((4, 5, 6, 7), 0.2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ((1, 3, 4), 0.5, [[0], [1], [2], [3, 4], [5, 6], [7]]),
        ((), 1.5, [[0], [1], [2], [3], [4], [5], [6], [7]]),
        ((), float("inf"), [[0], [1], [2], [3], [4], [5], [6], [7]]),
    ],
)
@pytest.mark.parametrize("groups", [(8,), (3, 3, 2)])
def test_slices_for_which_there_is_room_together_are_one(moving: Any, share: float, slices: Any, groups: Any) -> None:
    plain, optimizer = in_groups(optim.AdamW, groups), in_groups(optim.AdamW, groups)
    room = Room(optimizer, moving, share)
    attached, watch = sliced(optimizer, 1, loads_of=room.loads_of, before_next=room.before_next)
    each = [[n] for n in range(8)]
    for _ in range(3):
        watch.slices.clear()
        room.nexts.clear()
        plain.step()
        optimizer.step()
        assert_same_bits(plain, optimizer)
    attached.detach()
    assert watch.slices == slices
    assert attached.slices_in_last_step == len(slices)
    assert room.nexts == slices[1:]
    assert room.asked == [each, each], "the first step does not know how large states will be"


@pytest.mark.parametrize(
    ("moving", "small", "slices"),
    [
        ((0, 2, 4, 6), (1, 3, 5, 7), [[0, 1, 2, 3, 4, 5], [6, 7]]),
        ((1, 3), (0, 2), [[0, 1, 2, 3], [4, 5, 6], [7]]),
        ((), (1, 3, 5, 7), [[0, 1, 2], [3, 4, 5], [6, 7]]),
    ],
)
def test_what_is_small_is_stepped_with_what_moves_beside_it(moving: Any, small: Any, slices: Any) -> None:
    plain, optimizer = in_groups(optim.AdamW), in_groups(optim.AdamW)
    room = Room(optimizer, moving, 0.3, small)
    attached, watch = sliced(optimizer, 1, loads_of=room.loads_of)
    for _ in range(3):
        watch.slices.clear()
        plain.step()
        optimizer.step()
        assert_same_bits(plain, optimizer)
    attached.detach()
    assert watch.slices == slices


def test_a_step_that_is_one_slice_is_that_of_the_optimizer_itself() -> None:
    stepped: list[Any] = []

    class Seen(Own):
        def step(self, closure: Any = None) -> Any:
            stepped.append(self)
            return super().step(closure)

    optimizer = in_groups(Seen)
    room = Room(optimizer, (), 0.0)
    room.loads_of = lambda slices, needs: [Load(False, 0.0, 0.0)] * len(slices)  # type: ignore[method-assign]
    attached, watch = sliced(optimizer, 1, loads_of=room.loads_of)
    optimizer.step()
    stepped.clear()
    optimizer.step()
    attached.detach()
    assert watch.slices[-1] == list(range(8))
    own = [each for each in stepped if parameters_of(each)[0] is parameters_of(optimizer)[0]]  # others were tried
    assert own == [optimizer]


def test_an_error_before_the_next_slice_is_told_too() -> None:
    optimizer = in_groups(optim.AdamW)
    room = Room(optimizer, (1,), 0.2)

    def raises(parameters: Sequence[torch.Tensor]) -> None:
        raise KeyboardInterrupt

    attached, watch = sliced(optimizer, 1, loads_of=room.loads_of, before_next=raises)
    optimizer.step()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    attached.detach()
    assert watch.failures == [[0]]


def test_what_a_step_takes_is_found_anew_where_a_setting_is_switched_on() -> None:
    optimizer = in_groups(optim.AdamW)
    known = KnownNeeds(plain_step(optimizer))
    first = known.of(optimizer)
    assert first is not None
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    assert known.of(optimizer) is first
    for group in optimizer.param_groups:
        group["foreach"] = True
    second = known.of(optimizer)
    assert second is not None
    assert (first.beside, second.beside > 0) == (0, True)


def test_state_that_comes_later_is_counted() -> None:
    optimizer = optimizer_with_gradients(optim.SGD)  # 48 to 112 bytes each
    slices, watch = sliced(optimizer, 800)
    for _ in range(2):
        optimizer.step()
    assert watch.slices == [[0], [1, 2, 3, 4], [0, 1, 2, 3, 4]]
    optimizer.param_groups[0]["momentum"] = 0.9
    for _ in range(2):
        optimizer.step()
    slices.detach()
    assert watch.slices[3:] == [[0, 1, 2, 3, 4], [0, 1, 2], [3, 4]]


def test_hooks_run_once_with_what_they_would_get() -> None:
    events: list[Any] = []

    def make(slicing: bool) -> Any:
        optimizer = optimizer_with_gradients()
        slices, watch = sliced(optimizer, 1) if slicing else (None, None)

        def look(name: str, its: Any, args: Any, kwargs: Any) -> None:
            assert its is optimizer
            assert args[0] is optimizer
            assert [len(group["params"]) for group in optimizer.param_groups] == [5]
            events.append((name, args[1:], kwargs, parameters_of(its)[0].flatten()[0].item()))

        def replace(its: Any, args: Any, kwargs: Any) -> Any:
            return args, {"closure": lambda: "the loss of another closure"}

        handles = [
            optimizer.register_step_pre_hook(functools.partial(look, "pre")),
            optimizer.register_step_pre_hook(replace),
            optimizer.register_step_post_hook(lambda *a: look("post", a[0], a[1], {k: v() for k, v in a[2].items()})),
            of_torch.register_optimizer_step_pre_hook(functools.partial(look, "global pre")),
            of_torch.register_optimizer_step_post_hook(lambda *a: look("global post", a[0], a[1], {})),
        ]
        events.clear()
        assert optimizer.step() == "the loss of another closure"
        for handle in handles:
            handle.remove()
        if slices is not None:
            slices.detach()
            assert len(watch.slices) == 5
        return optimizer, list(events)

    (plain, expected), (optimizer, seen) = make(False), make(True)
    assert [each[0] for each in seen] == ["global pre", "pre", "post", "global post"]
    assert seen == expected
    assert_same_bits(plain, optimizer)


def test_the_profiler_sees_one_step() -> None:
    optimizer = optimizer_with_gradients()
    slices, _ = sliced(optimizer, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    slices.detach()
    assert [each.name for each in profile.events() if each.name.startswith("Optimizer")] == [
        "Optimizer.step#AdamW.step"
    ]


@pytest.mark.parametrize("scheduled_first", [True, False])
def test_schedulers_wrap_what_they_like_in_any_order(scheduled_first: bool) -> None:
    optimizer = optimizer_with_gradients()
    schedule = optim.lr_scheduler.StepLR(optimizer, 1) if scheduled_first else None
    slices, watch = sliced(optimizer, 1)
    schedule = schedule or optim.lr_scheduler.StepLR(optimizer, 1)
    wrapped = optimizer.step
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        schedule.step()
    assert len(watch.slices) == 5
    slices.detach()
    assert optimizer.step == wrapped
    optimizer.step()
    assert len(watch.slices) == 5
    slices.attach()
    optimizer.step()
    slices.detach()
    assert len(watch.slices) == 10


def test_what_others_have_wrapped_around_a_step_is_called_once() -> None:
    optimizer = optimizer_with_gradients()
    calls = []

    def wrapped(*args: Any, original: Any = optimizer.step) -> Any:  # as accelerate does, with nothing that tells
        calls.append(args)
        return original(*args)

    slices, watch = sliced(optimizer, 1)
    optimizer.step = wrapped
    optimizer.step()
    slices.detach()
    assert calls == [()]
    assert len(watch.slices) == 5
    optimizer.step()
    assert len(watch.slices) == 5


def test_a_wrapper_that_pytorchs_hooks_do_not_see_is_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=True)
    inner = optimizer_with_gradients()
    outer = accelerate.optimizer.AcceleratedOptimizer(inner)
    with pytest.raises(UsageError, match="give the optimizer that it wraps"):
        sliced(outer)
    slices, watch = sliced(inner, 1)
    outer.step()
    slices.detach()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    assert len(watch.slices) == 5


def test_only_the_attached_optimizer_is_diverted_and_copies_are_plain() -> None:
    optimizer = optimizer_with_gradients()
    slices, watch = sliced(optimizer, 1)
    before = dict(vars(optimizer))
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer)), optimizer_with_gradients()]
    for each in copies:
        each.step()
    assert watch.slices == []
    optimizer.step()
    assert len(watch.slices) == 5
    assert vars(optimizer).keys() == before.keys()
    for each in copies[:2]:
        for mine, its in zip(parameters_of(optimizer), parameters_of(each), strict=True):
            its.grad = mine.grad
        assert vars(each).keys() <= before.keys()
    slices.detach()
    assert_same_bits(optimizer, copies[2])


def test_what_is_attached_does_not_keep_the_optimizer() -> None:
    optimizer = optimizer_with_gradients()
    slices, _ = sliced(optimizer)
    with pytest.raises(UsageError, match="already"):
        sliced(optimizer)
    _.optimizer = None
    del optimizer
    assert diversion._HANDLERS == {}
    slices.detach()
    with pytest.raises(UsageError, match="gone"):
        slices.attach()


def test_slices_of_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="slice_bytes"):
        sliced(optimizer_with_gradients(), 0)


@pytest.mark.parametrize("setting", ["differentiable", "capturable"])
def test_settings_that_rule_slices_out(setting: str) -> None:
    optimizer = optimizer_with_gradients(optim.AdamW, **{setting: True})
    parameters_of(optimizer)[1].grad = None
    for each in parameters_of(optimizer):
        each.requires_grad_(False)
    slices, watch = sliced(optimizer, 1)
    if setting == "capturable":
        with pytest.raises(AssertionError, match="capturable"):
            optimizer.step()
    else:
        optimizer.step()
        optimizer.step()
    slices.detach()
    assert watch.told == [f"AdamW steps all its parameters at once: it was made with {setting}=True"]
    assert (watch.failures or watch.slices)[0] == [0, 2, 3, 4]  # what has no gradient is not needed


def shared_gradient() -> Any:
    optimizer = optimizer_with_gradients(optim.SGD, momentum=0.9, nesterov=True, foreach=True)
    parameters = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    parameters[0].grad = parameters[1].grad = torch.ones(4)
    optimizer.add_param_group({"params": parameters})
    return optimizer


def shared_memory() -> Any:
    memory = torch.ones(10)
    parameters = [nn.Parameter(memory[:6]), nn.Parameter(memory[5:])]
    for each in parameters:
        each.grad = torch.ones_like(each)
    return optim.AdamW(parameters, foreach=True)


def twice_the_same() -> Any:
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return optim.AdamW([parameter, parameter], foreach=True)


def sparse_beside_dense() -> Any:
    parameters = [nn.Parameter(torch.linspace(0.1, 3, 8).reshape(4, 2)) for _ in range(3)]
    for each in parameters:
        each.grad = torch.linspace(-1.3, 2, 8).reshape(4, 2)
    parameters[0].grad = parameters[0].grad.to_sparse(1)
    return optim.Adagrad(parameters, foreach=True, lr=0.037)


def first_beside_others() -> Any:
    optimizer = optimizer_with_gradients(optim.SGD, momentum=0.9, foreach=True)
    gradient, parameters_of(optimizer)[1].grad = parameters_of(optimizer)[1].grad, None
    optimizer.step()
    parameters_of(optimizer)[1].grad = gradient
    return optimizer


def two_dtypes() -> Any:
    parameters = [nn.Parameter(torch.ones(4, 3, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)]
    for each in parameters:
        each.grad = torch.full_like(each, 1e-3)
    return optim.Adafactor(parameters)


TOGETHER = [shared_gradient, shared_memory, twice_the_same, sparse_beside_dense, two_dtypes]


@pytest.mark.parametrize("make", TOGETHER)
def test_tensors_that_are_computed_together_are_not_parted(make: Callable[[], Any]) -> None:
    watch = step_both(make)
    assert len(watch.slices) == 3
    assert len(watch.told) == 1


def test_a_first_step_beside_others_is_whole_where_it_decides_for_them() -> None:
    watch = step_both(first_beside_others)
    assert [len(each) for each in watch.slices] == [5] + [1] * 10
    assert "first time" in watch.told[0]


def test_a_gradient_that_comes_to_be_shared_is_noticed() -> None:
    parameters = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    for each in parameters:
        each.grad = torch.ones(4)
    slices, watch = sliced(optim.SGD(parameters, momentum=0.9, nesterov=True, foreach=True), 1)
    for _ in range(3):
        watch.optimizer.step()
    assert watch.told == []
    parameters[1].grad = parameters[0].grad
    watch.optimizer.step()
    slices.detach()
    assert "share memory" in watch.told[0]


def on_the_same_data(first: nn.Parameter, second: nn.Parameter) -> None:
    second.data = first.data


def by_the_other_one(first: nn.Parameter, second: nn.Parameter) -> None:
    second.grad = first.detach()


def tied() -> Any:
    torch.manual_seed(0)
    return with_gradients(optim.Adam([nn.Parameter(torch.ones(4)) for _ in range(3)], foreach=True))


@pytest.mark.parametrize("tie", [on_the_same_data, by_the_other_one])
@pytest.mark.parametrize("steps_before", [0, 3])
def test_parameters_that_are_tied_while_training_are_not_parted(tie: Any, steps_before: int) -> None:
    plain, optimizer = tied(), tied()
    watch = sliced(optimizer, 1)[1]
    for number in range(steps_before + 3):
        for each in (plain, optimizer):
            if number == steps_before:
                tie(*parameters_of(each)[:2])
            each.step()
        assert_same_bits(plain, optimizer)
    assert len(watch.told) == 1


def test_parameters_that_share_a_state_are_not_parted() -> None:
    def make() -> Any:
        optimizer, count = tied(), torch.tensor(0.0)
        for each in parameters_of(optimizer):
            optimizer.state[each] = {
                "step": count,
                "exp_avg": torch.zeros_like(each),
                "exp_avg_sq": torch.zeros_like(each),
            }
        return optimizer

    assert len(step_both(make).told) == 1


# Optimizers that nobody knows.


class Own(optim.Optimizer):
    """A sound optimizer of a program: momentum, trust ratios, each parameter by itself."""

    has_gradients_in_closure = True

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "momentum": 0.9, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.begin()
        loss = None
        if closure is not None:
            with torch.set_grad_enabled(self.has_gradients_in_closure):
                loss = closure()
        self.prepare()
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(number, group, parameter)
        return loss

    def begin(self) -> None:
        pass

    def prepare(self) -> None:
        pass

    def update(self, number: int, group: Any, parameter: Any) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].mul_(group["momentum"]).add_(parameter.grad)
        ratio = parameter.norm() / (state["momentum"].norm() + 1e-6)
        parameter.add_(state["momentum"] * ratio, alpha=-group["lr"])


class ClipsInside(Own):
    largest_norm = 1.0

    def prepare(self) -> None:
        gradients = [each.grad for each in parameters_of(self) if each.grad is not None]
        stepped = [each for each in parameters_of(self) if each.grad is not None]
        nn.utils.clip_grads_with_norm_(stepped, self.largest_norm, nn.utils.get_total_norm(gradients))


class ShrinksWhatIsLarge(Own):
    def prepare(self) -> None:
        gradients = [each.grad for each in parameters_of(self) if each.grad is not None]
        if nn.utils.get_total_norm(gradients) > 1000:  # not so if it is not a number
            for each in gradients:
                each.div_(nn.utils.get_total_norm(gradients))


class SkipsAll(Own):
    def prepare(self) -> None:
        gradients = [each.grad for each in parameters_of(self) if each.grad is not None]
        if not all(each.isfinite().all() for each in gradients):
            for each in gradients:
                each.zero_()


class ShrinksEveryTenthTime(Own):
    def update(self, number: int, group: Any, parameter: Any) -> None:
        super().update(number, group, parameter)
        self.state[parameter]["steps"] = steps = self.state[parameter].get("steps", 0) + 1
        if steps % 10 == 0:
            parameter.div_(nn.utils.get_total_norm(parameters_of(self)))


class StepsTheLastLess(Own):
    """As those do that go by the number of a layer."""

    def prepare(self) -> None:
        for each in parameters_of(self)[4:]:
            each.mul_(0.99)


class Draws(Own):
    def prepare(self) -> None:
        torch.rand(())


class DrawsInPython(Own):
    def prepare(self) -> None:
        random.random()


class DrawsInNumpy(Own):
    def prepare(self) -> None:
        numpy.random.rand()  # noqa: NPY002


class CountsInGroups(Own):
    def prepare(self) -> None:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1


class CountsInItself(Own):
    steps = 0

    def prepare(self) -> None:
        self.steps += 1


class RemembersTheLargest(Own):
    """What it steps by depends on the parameters before."""

    largest = 0.0

    def update(self, number: int, group: Any, parameter: Any) -> None:
        self.largest = max(self.largest, float(parameter.grad.norm()))
        parameter.grad.div_(self.largest + 1e-6)
        super().update(number, group, parameter)


class CountsInAList(Own):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.losses: list[float] = []

    def prepare(self) -> None:
        self.losses.append(1.0)


class CountsInItsState(Own):
    def prepare(self) -> None:
        self.state["everything"] = {"steps": self.state["everything"].get("steps", 0) + 1}


class DecaysWithoutGradient(Own):
    def prepare(self) -> None:
        for each in parameters_of(self):
            each.mul_(0.99)


class KeepsParameters(Own):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.all_of_them = parameters_of(self)

    def prepare(self) -> None:
        for each in self.all_of_them:
            each.mul_(0.99)


class StepsTwice(Own):
    """As sharpness aware optimizers do."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return super().step(closure)


class MovesBeforeItsClosure(Own):
    def begin(self) -> None:
        for each in parameters_of(self):
            if each.grad is not None:
                each.mul_(0.99)


class HasNoGradientsInItsClosure(Own):
    has_gradients_in_closure = False


class TellsItsNorm(Own):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return 3.0


class Raises(Own):
    def prepare(self) -> None:
        raise ValueError("not today")


COUPLED = [
    (ClipsInside, "one by one differ"),
    (ShrinksWhatIsLarge, "one by one differ"),
    (SkipsAll, "one by one differ"),
    (ShrinksEveryTenthTime, "one by one differ"),
    (StepsTheLastLess, "one by one differ"),
    (Draws, "random"),
    (DrawsInPython, "random"),
    (DrawsInNumpy, "random"),
    (RemembersTheLargest, "changes largest"),
    (CountsInAList, "changes losses"),
    (CountsInItsState, "no parameter's"),
    (DecaysWithoutGradient, "one by one differ"),
    (KeepsParameters, "one by one differ|a trial could change|raised|beside"),
    (TellsItsNorm, "returns something"),
]


def own(kind: Any) -> Any:
    optimizer = optimizer_with_gradients(kind)
    parameters_of(optimizer)[3].grad = None
    return optimizer


def seed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)  # noqa: NPY002


def drawn() -> tuple[float, ...]:
    return torch.rand(()).item(), random.random(), numpy.random.rand()  # noqa: NPY002


@pytest.mark.parametrize(("kind", "reason"), COUPLED, ids=lambda each: getattr(each, "__name__", ""))
def test_an_optimizer_that_does_not_take_each_parameter_by_itself_is_not_cut(kind: Any, reason: str) -> None:
    plain, optimizer = own(kind), own(kind)
    slices, watch = sliced(optimizer, 1)
    seed()
    for _ in range(3):
        plain.step()
    expected = drawn()
    seed()
    for _ in range(3):
        optimizer.step()
    assert drawn() == expected  # a trial draws nothing
    slices.detach()
    assert_same_bits(plain, optimizer)
    assert small_copies.same(small_copies._attributes(optimizer), small_copies._attributes(plain))
    assert watch.slices == [[0, 1, 2, 3, 4]] * 3  # all of its parameters, as it may look at any of them
    assert len(watch.told) == 1
    assert re.search(f"^{kind.__name__} steps all its parameters at once: .*({reason})", watch.told[0])


steps_of_all = 0
GENERATOR, IN_PYTHON, IN_NUMPY = torch.Generator(), random.Random(0), numpy.random.default_rng(0)


class DrawsFromAGenerator(Own):
    def prepare(self) -> None:
        for each in parameters_of(self):
            each.add_(torch.randn(each.shape, generator=GENERATOR))


class DrawsInPythonFromAGenerator(Own):
    def prepare(self) -> None:
        parameters_of(self)[0].mul_(IN_PYTHON.random())


class DrawsInNumpyFromAGenerator(Own):
    def prepare(self) -> None:
        parameters_of(self)[0].mul_(IN_NUMPY.random())


class CountsInItsClass(Own):
    steps = 0

    def prepare(self) -> None:
        CountsInItsClass.steps += 1
        parameters_of(self)[0].div_(CountsInItsClass.steps)


class CountsInAGlobal(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        global steps_of_all
        steps_of_all += 1
        for each in parameters_of(self):
            each.add_(each.grad, alpha=-0.1 / steps_of_all)


class DrawsFromAGeneratorOfItsClass(Own):
    generator = random.Random(0)

    def prepare(self) -> None:
        parameters_of(self)[0].mul_(self.generator.random())


BESIDE = [
    DrawsFromAGenerator,
    DrawsInPythonFromAGenerator,
    DrawsInNumpyFromAGenerator,
    CountsInItsClass,
    CountsInAGlobal,
    DrawsFromAGeneratorOfItsClass,
]


@pytest.mark.parametrize("kind", BESIDE)
def test_a_trial_leaves_what_is_beside_an_optimizer_as_it_is(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for is_sliced in (False, True):
        GENERATOR.manual_seed(1)
        IN_PYTHON.seed(1)
        IN_NUMPY.bit_generator.state = numpy.random.PCG64(1).state
        CountsInItsClass.steps = 0
        monkeypatch.setitem(globals(), "steps_of_all", 0)
        DrawsFromAGeneratorOfItsClass.generator.seed(1)
        found.append(optimizer_with_gradients(kind))
        if is_sliced:
            sliced(found[-1], 1)[0]._needs.of(found[-1])
        for _ in range(3):
            found[-1].step()
    assert_same_bits(*found)


def test_what_a_step_raises_passes_on() -> None:
    optimizer = own(Raises)
    slices, watch = sliced(optimizer, 1)
    with pytest.raises(ValueError, match="not today"):
        optimizer.step()
    slices.detach()
    assert "a trial on small parameters raised ValueError: not today" in watch.told[0]
    assert watch.failures == [[0, 1, 2, 3, 4]]


def test_a_sound_optimizer_of_the_program_is_cut() -> None:
    watch = step_both(lambda: own(Own))
    assert watch.told == []
    assert watch.slices == [[0], [1], [2], [4]] * 3


class WarmsUp(Own):
    """Counts in its groups, in itself, and remembers what it has computed from that."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, count=0)
        self.steps, self.factors = 0, [1.0, 1.0, 1.0, 1.0]

    def prepare(self) -> None:
        self.steps += 1
        self.factors[self.steps % 4] = 1 - 0.9**self.steps
        for group in self.param_groups:
            group["rate"] = max(group.get("rate", 0.0), group["lr"] * min(1, (group["count"] + 1) / 4))

    def update(self, number: int, group: Any, parameter: Any) -> None:
        super().update(number, group, parameter)
        parameter.mul_(1 - group["rate"] * self.factors[self.steps % 4] * 0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.prepare()
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(number, group, parameter)
            group["count"] += 1


class PassesOverEmptyGroups(Own):
    """As fused optimizers do, which count the steps of a group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for number, group in enumerate(self.param_groups):
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - 0.01 / group["step"])
                    self.update(number, group, parameter)


@pytest.mark.parametrize("kind", [CountsInGroups, CountsInItself, WarmsUp, PassesOverEmptyGroups])
def test_an_optimizer_that_sets_the_same_in_each_slice_is_cut(kind: Any) -> None:
    def make() -> Any:
        optimizer = optimizer_with_gradients(kind)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 3)) for _ in range(2)], "lr": 0.3})
        for each in optimizer.param_groups[1]["params"]:
            each.grad = torch.full_like(each, 0.5)
        return optimizer

    plain, optimizer = make(), make()
    slices, watch = sliced(optimizer, 1)
    for number in range(6):
        for each in (plain, optimizer):
            if number == 3:  # a group without gradients is none that is not there
                each.param_groups[1]["params"][0].grad = each.param_groups[1]["params"][1].grad = None
            each.step()
        assert_same_bits(plain, optimizer)
        attributes = [small_copies._attributes(each) for each in (plain, optimizer)]
        assert small_copies.same(*attributes)
        groups = [[small_copies._entries(group) for group in each.param_groups] for each in (plain, optimizer)]
        assert small_copies.same(*groups)
    slices.detach()
    assert [len(each) for each in watch.slices[:21]] == [1] * 21  # the first three steps
    assert not [line for line in watch.told if "may differ" in line]


def test_a_step_that_is_cut_short_has_set_what_its_slices_have() -> None:
    optimizer = optimizer_with_gradients(CountsInItself)
    slices, watch = sliced(optimizer, 1)
    optimizer.step()
    optimizer.state[parameters_of(optimizer)[2]] = {"another": 1}
    with pytest.raises(KeyError):
        optimizer.step()
    slices.detach()
    assert watch.slices[5:] == [[0], [1]]
    assert optimizer.steps == 2


class FromAnotherMethod(Own):
    """Has its state from another method than its step, as those do that look at curvature now and then."""

    @torch.no_grad()
    def look(self) -> None:
        for parameter in parameters_of(self):
            state = self.state[parameter]
            if not state:
                state["momentum"], state["square"] = torch.zeros_like(parameter), torch.ones_like(parameter)
                state["steps"], state["count"] = 0, torch.tensor(0.0)
            state["square"].mul_(0.9).addcmul_(parameter.grad, parameter.grad, value=0.1)

    def update(self, number: int, group: Any, parameter: Any) -> None:
        state = self.state[parameter]
        state["steps"] += 1
        state["count"] += 1
        parameter.grad.div_(state["square"].sqrt())
        super().update(number, group, parameter)


class FromAnotherMethodTogether(FromAnotherMethod):
    def prepare(self) -> None:
        ClipsInside.prepare(self)  # type: ignore[arg-type]

    largest_norm = 1.0


@pytest.mark.parametrize(("kind", "count"), [(FromAnotherMethod, 1), (FromAnotherMethodTogether, 5)])
def test_what_has_its_state_from_elsewhere_is_tried_with_the_like_of_it(kind: Any, count: int) -> None:
    plain, optimizer = optimizer_with_gradients(kind), optimizer_with_gradients(kind)
    slices, watch = sliced(optimizer, 1)
    for number in range(4):
        for each in (plain, optimizer):
            if number % 2 == 0:
                each.look()
            each.step()
        assert_same_bits(plain, optimizer)
    slices.detach()
    assert {len(each) for each in watch.slices} == {count}
    assert bool(watch.told) is (count > 1)


class TakesARate(Own):
    @torch.no_grad()
    def step(self, closure: Any = None, rate: float = 1.0, *, shrinks: bool = False) -> Any:
        norm = sum(float(each.norm()) for each in parameters_of(self)) if shrinks else 1.0
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                self.update(number, group, parameter)
                parameter.mul_(rate).div_(norm)


def test_settings_that_a_step_is_given_are_given_to_each_slice() -> None:
    plain, optimizer = optimizer_with_gradients(TakesARate), optimizer_with_gradients(TakesARate)
    slices, watch = sliced(optimizer, 1)
    for given in ({}, {"rate": 0.5}, {"rate": 0.25}, {"rate": 2.0, "shrinks": True}, {"rate": torch.tensor(2.0)}):
        for each in (plain, optimizer):
            each.step(**given)
        assert_same_bits(plain, optimizer)
    with pytest.raises(TypeError, match="other"):
        optimizer.step(other=3)
    slices.detach()
    assert [len(each) for each in watch.slices[:17]] == [1] * 15 + [5] * 2


def test_the_place_of_a_group_is_kept_for_an_optimizer_that_asks_for_it() -> None:
    class ByPlace(Own):
        def update(self, number: int, group: Any, parameter: Any) -> None:
            parameter.add_(parameter.grad, alpha=-0.1 * (number + 1))

    def make() -> Any:
        optimizer = own(ByPlace)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))]})
        parameters_of(optimizer)[-1].grad = torch.ones(4)
        return optimizer

    watch = step_both(make)
    assert watch.told == []
    assert len(watch.slices) == 15


def test_matrices_between_vectors_that_are_clipped_together_are_not_parted() -> None:
    class ClipsMatrices(Own):
        def prepare(self) -> None:
            gradients = [each.grad for each in parameters_of(self) if each.dim() == 2]
            norm = nn.utils.get_total_norm(gradients)
            for each in gradients:
                each.div_(norm)

    def make() -> Any:
        return with_gradients(ClipsMatrices(model().parameters()))

    assert "one by one differ" in step_both(make).told[0]


def test_a_group_after_many_others_is_tried_too() -> None:
    class AverageInOneGroup(Own):
        def prepare(self) -> None:
            gradients = [each.grad for each in self.param_groups[-1]["params"]]
            for each in gradients:
                each.div_(nn.utils.get_total_norm(gradients))

    def make() -> Any:
        optimizer = own(AverageInOneGroup)
        for _ in range(4):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3))]})
        return with_gradients(optimizer)

    assert "one by one differ" in step_both(make).told[0]


class OnLists(Own):
    """Computes each group by ops on lists, which raise for an empty one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for number, group in enumerate(self.param_groups):
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
            momenta = [self.state[parameter]["momentum"] for parameter in parameters]
            torch._foreach_lerp_(momenta, [parameter.grad for parameter in parameters], self.weight(number))
            torch._foreach_add_(parameters, momenta, alpha=-group["lr"])

    def weight(self, number: int) -> float:
        return 0.3


class OnListsByPlace(OnLists):
    def weight(self, number: int) -> float:
        return 0.3 + 0.1 * number


def in_two_groups(kind: Any) -> Any:
    optimizer = own(kind)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3))], "lr": 0.2})
    for each in parameters_of(optimizer)[-2:]:
        each.grad = torch.linspace(-1, 1, each.numel())
    return optimizer


def test_an_optimizer_that_raises_for_empty_groups_is_cut_without_them() -> None:
    watch = step_both(lambda: in_two_groups(OnLists))
    assert watch.told == []
    assert watch.slices == [[0], [1], [2], [4], [5], [6]] * 3


def test_an_optimizer_that_raises_for_empty_groups_and_asks_for_the_place_of_one_is_not_cut() -> None:
    watch = step_both(lambda: in_two_groups(OnListsByPlace))
    assert watch.slices == [[0, 1, 2, 3, 4, 5, 6]] * 3
    assert "raised RuntimeError" in watch.told[0]


def test_a_trial_is_made_again_where_a_setting_is_switched_on() -> None:
    class Clips(Own):
        largest_norm = 1.0

        def prepare(self) -> None:
            if self.param_groups[0]["clip"]:
                ClipsInside.prepare(self)  # type: ignore[arg-type]

    def make() -> Any:
        return optimizer_with_gradients(functools.partial(Clips, clip=0.0))

    plain, optimizer = make(), make()
    slices, watch = sliced(optimizer, 1)
    for step in range(4):
        for each in (plain, optimizer):
            each.param_groups[0]["clip"] = float(step > 1)
            each.step()
    slices.detach()
    assert_same_bits(plain, optimizer)
    assert [len(each) for each in watch.slices] == [1] * 10 + [5] * 2


class _Late(Own):
    late = 0

    def update(self, number: int, group: Any, parameter: Any) -> None:
        super().update(number, group, parameter)
        self.state[parameter]["steps"] = steps = self.state[parameter].get("steps", 0) + 1
        if steps > small_copies.TRIAL_STEPS:
            self.change(group)

    def change(self, group: Any) -> None:
        self.late = 1


class _LateInGroups(_Late):
    def change(self, group: Any) -> None:
        group["late"] = 1


@pytest.mark.parametrize("kind", [_Late, _LateInGroups])
def test_an_optimizer_that_changes_itself_later_is_told_and_not_cut_again(kind: Any) -> None:
    plain, optimizer = optimizer_with_gradients(kind), optimizer_with_gradients(kind)
    slices, watch = sliced(optimizer, 1)
    for _ in range(small_copies.TRIAL_STEPS + 3):
        plain.step()
        optimizer.step()
        assert_same_bits(plain, optimizer)
        assert small_copies.same(small_copies._attributes(optimizer), small_copies._attributes(plain))
    slices.detach()
    assert "this step may differ: its step has changed late" in watch.told[0]
    assert [len(each) for each in watch.slices] == [1] * 5 * (small_copies.TRIAL_STEPS + 1) + [5] * 2


def test_what_derives_from_an_optimizer_of_pytorch_is_tried() -> None:
    class Averages(optim.AdamW):
        def _init_group(self, group: Any, parameters: Any, gradients: Any, *rest: Any) -> Any:
            result = super()._init_group(group, parameters, gradients, *rest)
            gradients[:] = [each / len(gradients) for each in gradients]
            return result

    watch = step_both(lambda: own(Averages))
    assert "one by one differ" in watch.told[0]


def test_a_step_of_pytorch_that_somebody_has_wrapped_is_tried() -> None:
    optimizer = optimizer_with_gradients()
    plain = diversion.plain_step(optimizer)
    assert is_known(optimizer, plain)
    wrapped = functools.wraps(plain)(lambda *args: plain(*args))
    assert not is_known(optimizer, wrapped)


def train_own(kind: Any, closing: bool, slicing: bool) -> tuple[Any, Any]:
    optimizer = own(kind)
    watch = sliced(optimizer, 1)[1] if slicing else None
    gradients = [None if each.grad is None else each.grad.clone() for each in parameters_of(optimizer)]
    calls = []

    def closure() -> str:
        calls.append(torch.is_grad_enabled())
        for each, gradient in zip(parameters_of(optimizer), gradients, strict=True):
            each.grad = None if gradient is None else gradient * each.detach().mean() * len(calls)
        return "loss"

    for _ in range(3):
        assert optimizer.step(closure if closing else None) == ("loss" if closing else None)
    return optimizer, (watch, calls)


WITH_CLOSURES = [Own, StepsTwice, MovesBeforeItsClosure, HasNoGradientsInItsClosure, DecaysWithoutGradient, ClipsInside]


@pytest.mark.parametrize("kind", WITH_CLOSURES)
def test_closures_of_optimizers_that_nobody_knows(kind: Any) -> None:
    plain, (_, expected_calls) = train_own(kind, True, False)
    optimizer, (watch, calls) = train_own(kind, True, True)
    assert_same_bits(plain, optimizer)
    assert calls == expected_calls
    assert (watch.told == []) == (kind is Own)
    assert watch.slices[-1] == ([4] if kind is Own else [0, 1, 2, 3, 4])


def test_a_step_that_calls_that_of_another_class_runs_its_hooks_as_often_as_plainly() -> None:
    class Derived(optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    optimizer_with_gradients(optim.AdamW)  # from now on the step of AdamW calls hooks, that of `Derived` as well
    events: list[str] = []

    def make() -> Any:
        optimizer = optimizer_with_gradients(Derived)
        optimizer.register_step_pre_hook(lambda *_: events.append("pre"))
        return optimizer

    other = optimizer_with_gradients(optim.AdamW)
    slices, _ = sliced(other, 1)
    with of_torch.register_optimizer_step_pre_hook(lambda its, *_: events.append(type(its).__name__)):
        watch = step_both(make, steps=1)
    slices.detach()
    assert events == ["Derived", "pre"] * 4
    assert "that of another class" in watch.told[0]


def test_lbfgs_is_not_cut() -> None:
    for slicing in (False, True):
        torch.manual_seed(0)
        network = model()
        optimizer = optim.LBFGS(network.parameters(), max_iter=4)
        watch = sliced(optimizer, 1)[1] if slicing else None
        train_lbfgs = [optimizer.step(functools.partial(closure_of, network, optimizer)).item() for _ in range(2)]
        if not slicing:
            expected = train_lbfgs
    assert train_lbfgs == expected
    assert watch is not None
    assert len(watch.slices) == 2
    assert len(watch.told) == 1


def closure_of(network: nn.Module, optimizer: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss = loss_of(network, 0)
    loss.backward()
    return loss


def test_a_trial_makes_nothing_large_and_reads_no_parameter() -> None:
    optimizer = own(Own)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2000, 2000))]})
    large = parameters_of(optimizer)[-1]
    large.grad = torch.zeros_like(large)
    tensors = [each for p in parameters_of(optimizer) for each in (p, p.grad) if each is not None]
    own_storages = {each.untyped_storage().data_ptr() for each in tensors}

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError("modes of the program see nothing of a trial")

    slices, _ = sliced(optimizer, 1)
    largest = 0
    made = small_copies._values

    def seen(sample: Any, number: int) -> torch.Tensor:
        nonlocal largest
        values = made(sample, number)
        largest = max(largest, values.numel())
        assert values.untyped_storage().data_ptr() not in own_storages
        return values

    small_copies._values = seen
    try:
        with Sizes():
            assert slices._trials.why_whole(optimizer, with_closure=False, arguments={}) is None
    finally:
        small_copies._values = made
    slices.detach()
    assert 0 < largest <= small_copies.LARGEST_ELEMENTS


def test_hooks_of_the_program_do_not_see_a_trial_and_it_warns_of_nothing() -> None:
    class Warns(Own):
        def prepare(self) -> None:
            warnings.warn("once", stacklevel=1)

    seen = []
    optimizer = optimizer_with_gradients(Warns)
    slices, _ = sliced(optimizer, 10000)
    handle = of_torch.register_optimizer_step_pre_hook(lambda its, *_: seen.append(its))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        optimizer.step()
    handle.remove()
    slices.detach()
    assert seen == [optimizer]
    assert len(warned) == 1


# Interrupts.


class _RaisesAtOp(TorchDispatchMode):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= function.namespace != "profiler"
        if self.left < 0:
            raise KeyboardInterrupt
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_an_interrupt_at_any_op_leaves_the_optimizer_whole(settings: dict[str, Any]) -> None:
    number, interrupts = 0, 0
    while interrupts == number:
        optimizer = optimizer_with_gradients(optim.AdamW, count=3, **settings)
        groups, entries = optimizer.param_groups, dict(optimizer.param_groups[0])
        own_parameters = list(parameters_of(optimizer))
        slices, watch = sliced(optimizer, 1)
        try:
            with _RaisesAtOp(number):
                optimizer.step()
        except KeyboardInterrupt:
            interrupts += 1
            assert watch.failures == [[len(watch.slices)]]
        assert optimizer.param_groups is groups
        assert [id(each) for each in parameters_of(optimizer)] == [id(each) for each in own_parameters]
        assert groups[0] == entries
        assert list(map(id, optimizer.state)) == list(map(id, own_parameters[: len(optimizer.state)]))
        optimizer.state.clear()
        optimizer.step()  # goes on as usual
        slices.detach()
        assert watch.slices[-3:] == [[0], [1], [2]]
        number += 1
    assert interrupts > 5


@pytest.mark.parametrize("where", ["before", "after"])
def test_an_interrupt_while_a_slice_is_brought_or_taken_is_told_too(where: str) -> None:
    optimizer = optimizer_with_gradients()
    slices, watch = sliced(optimizer, 1)

    def interrupted(parameters: Sequence[torch.Tensor]) -> None:
        if len(watch.slices) == 2:
            raise KeyboardInterrupt
        getattr(watch, where)(parameters)

    setattr(slices, f"_{where}", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    slices.detach()
    assert watch.failures == [[2]]
    assert [len(group["params"]) for group in optimizer.param_groups] == [5]
