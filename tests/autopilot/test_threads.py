"""Several threads that train under one budget: the bits of each are its own, and nothing breaks."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pooch
from pooch.autopilot import Auto, autopilot
from pooch.autopilot.persistence import Persistence
from pooch.autopilot.requests import PlanRequests
from pooch.autopilot.stacks import can_outlast_the_call, nothing_is_around
from pooch.ground.errors import UsageError
from pooch.profiler import live
from pooch.torchtools import standing_aside
from pooch.torchtools.memory_trace import live_bytes
from pooch.torchtools.threads import OwnThread
from tests.children import child_environment
from tests.counting import the_allocator
from tests.executor.support import is_same
from tests.executor.test_overlapping_threads import DURING, Busy
from tests.live_before import live_before
from tests.other_threads import another_thread

pytestmark = pytest.mark.cpu
CPU = torch.device("cpu")
WIDTH, ROWS = 64, 512


@pytest.fixture(autouse=True)
def no_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about steps without a plan, and about recorded ones."""
    monkeypatch.setattr(PlanRequests, "ask", lambda *_: None)
    monkeypatch.setattr(PlanRequests, "warm_up", lambda *_: None)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    gc.collect()
    assert gc.isenabled()
    assert not the_allocator().is_in_use
    assert not torch._C._autograd._profiler_enabled()  # type: ignore[attr-defined]


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = [layer for _ in range(5) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Tanh())]
    return nn.Sequential(*layers)


def trained(model: nn.Module, seed: int, steps: int) -> list[Tensor]:
    """Losses and gradients of some steps."""
    optimizer, generator = torch.optim.SGD(model.parameters(), 0.1), torch.Generator().manual_seed(seed)
    found = []
    for _ in range(steps):
        loss = model(torch.randn(ROWS, WIDTH, generator=generator)).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return found


def warmed_up(model: nn.Module, rows: Tensor) -> None:
    """The first step of all is not recorded."""
    model(rows).square().mean().backward()
    model.zero_grad()


def in_threads(*works: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  (raised below)
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def known(auto: Auto) -> int:
    """Number of kinds of steps that a record tells of."""
    return [shape.in_core_peak_bytes is not None for shape in auto.summary().shapes].count(True)


def in_a_thread(work: Callable[[], list[Tensor]]) -> list[Tensor]:
    found: list[Tensor] = []

    def waited_for() -> None:
        time.sleep(0.05)  # until the calling thread waits
        found.extend(work())

    in_threads(waited_for)
    return found


def trained_at_once(count: int, budget: int | None) -> tuple[list[list[Tensor]], Auto | None]:
    models = [network(number) for number in range(count)]
    auto = None if budget is None else Auto(models, live_bytes(CPU) + budget, tell=lambda _: None)
    found: list[list[Tensor]] = [[] for _ in range(count)]

    def work(number: int) -> None:
        found[number] = trained(models[number], number, 6)

    in_threads(*(lambda number=number: work(number) for number in range(count)))
    if auto is not None:
        auto.remove()
    return found, auto


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("natively", [True, False], ids=["natively", "by torch's profiler"])
def test_threads_that_train_at_once_keep_their_bits(
    count: int, natively: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not natively:
        monkeypatch.setattr("pooch.torchtools.thread_tracer.can_trace_threads", lambda device: False)
        monkeypatch.setattr(live, "can_trace_threads", lambda device: False)
    plain, _ = trained_at_once(count, None)
    for _ in range(3):
        found, auto = trained_at_once(count, 500_000)
        for theirs, ours in zip(plain, found, strict=True):
            assert len(theirs) == len(ours)
            assert all(map(is_same, theirs, ours))
        assert auto is not None
        summary = auto.summary()
        assert summary.steps > 0
        assert summary.swapped_bytes + summary.recomputed_ops + summary.steps_recorded > 0


def test_steps_are_recorded_in_any_thread_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Persistence, "_is_needed", lambda *_: False)  # steps in which parameters leave are not recorded
    models = [network(number) for number in range(2)]
    plain = [trained(network(number), number, 3) for number in range(2)]
    with Auto(models, live_bytes(CPU) + 500_000, tell=lambda _: None) as auto:
        for number in range(2):
            assert all(map(is_same, plain[number], in_a_thread(lambda n=number: trained(models[n], n, 3))))
        assert auto.summary().steps == 6
        assert known(auto) == 2
        assert auto.summary().swapped_bytes


def test_a_step_left_open_by_a_thread_that_is_gone_is_over() -> None:
    model, kept = network(0), list[Tensor]()
    plain = trained(network(0), 0, 3)
    with Auto([model], live_bytes(CPU) + 500_000, tell=lambda _: None) as auto:
        in_threads(lambda: kept.append(model(torch.randn(ROWS, WIDTH))))
        assert all(map(is_same, plain, trained(model, 0, 3)))
        assert auto.summary().steps == 4
        in_threads(lambda: kept.append(model(torch.randn(ROWS, WIDTH))))
    kept[1].sum().backward()  # it can still be read
    assert auto.summary().steps == 5
    assert "data" not in vars(Tensor), "what watches accesses is still in place"
    assert not standing_aside._users


def test_a_step_left_open_by_a_thread_that_waits_does_not_keep_others_from_theirs() -> None:
    """As where a model is shown some rows before a thread trains it. No step was governed, and nothing said so."""
    plain, told = [*trained(network(0), 0, 6), *trained(network(0), 0, 1)], list[str]()
    model = network(0)
    with Auto([model], live_bytes(CPU) + 500_000, tell=told.append) as auto:
        shown = model(torch.randn(4, WIDTH))
        found = in_a_thread(lambda: trained(model, 0, 6))
        assert auto.summary().steps == 6  # what was shown, and all but the first of those that are trained
        model.load_state_dict(network(0).state_dict())
        model.zero_grad()
        found += trained(model, 0, 1)
        assert auto.summary().steps == 7
        assert shown.requires_grad
        assert auto._driver.running is None
    assert all(map(is_same, plain, found))
    assert can_outlast_the_call()
    assert nothing_is_around(), "hooks of the step that was left open are still in place"


def test_a_step_goes_on_that_others_were_not_kept_from_theirs_by() -> None:
    """Its thread waits between its two passes while another trains: it counts as over, and has its bits."""

    def between(models: list[nn.Module], rows: Tensor) -> list[Tensor]:
        hidden = models[0](rows)
        found = in_a_thread(lambda: trained(models[1], 1, 4))
        (hidden.tanh() * hidden).square().mean().backward()
        return found + [p.grad.clone() for p in models[0].parameters() if p.grad is not None]

    rows = torch.randn(ROWS, WIDTH)
    plain = between([network(0), network(1)], rows)
    models = [network(0), network(1)]
    with Auto(models, live_bytes(CPU) + 500_000, tell=lambda _: None) as auto:
        found = between(models, rows)
        assert auto.summary().steps == 4
        warmed_up(models[0], rows)
        assert auto.summary().steps == 5
    assert all(map(is_same, plain, found))


class InThreads(nn.Module):
    """Has threads call another model, and waits for them, as `nn.DataParallel` does."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.first, self.others = nn.Linear(WIDTH, WIDTH), [other]  # a list, so that it is no part of this one

    def forward(self, rows: Tensor) -> Tensor:
        hidden, found = self.first(rows).tanh(), list[Tensor]()

        def work() -> None:
            time.sleep(0.05)  # until the other thread waits
            found.append(self.others[0](hidden))

        for _ in range(4):
            in_threads(work)
        return sum(found, hidden)


def test_a_step_whose_call_waits_for_other_threads_goes_on() -> None:
    other, rows = network(1), torch.randn(ROWS, WIDTH)
    model = InThreads(other)
    with Auto([model, other], live_bytes(CPU) + 2_000_000, tell=lambda _: None) as auto:
        loss = model(rows).square().mean()
        running = auto._driver.running
        assert running is not None
        assert running.is_of_this_thread
        assert running.beside == 4
        loss.backward()
        assert auto.summary().steps == 1


def told_of_a_step(other: Callable[[list[nn.Module], list[Tensor]], None], *, is_in_core: bool = False) -> str:
    """What is told of a step under which the budget is passed, by what another thread does between its two passes."""
    models, told, kept = [network(number) for number in range(2)], list[str](), list[Tensor]()
    with Auto(models, live_bytes(CPU) + 2_500_000, tell=told.append) as auto:
        rows = torch.randn(ROWS, WIDTH)
        for _ in range(4 * is_in_core):
            warmed_up(models[0], rows)
        loss = models[0](rows).square().mean()
        running = auto._driver.running
        assert running is not None
        assert (running.decision == "in-core") == is_in_core
        in_threads(lambda: other(models, kept))
        loss.backward()
        assert auto.summary().steps_over_budget == 1
    (found,) = [line for line in told if " over the budget of " in line]
    return found


def takes(_: object, kept: list[Tensor]) -> None:
    kept.append(torch.zeros(1_000_000))
    kept.clear()


def trains(models: list[nn.Module], kept: list[Tensor]) -> None:
    kept.append(models[1](torch.randn(4 * ROWS, WIDTH)))


def test_where_another_thread_takes_the_memory_that_is_told() -> None:
    """Nothing of the step had been asked to leave, so it was not so that all of it had left."""
    with another_thread(may_train=False):  # the one that took it may have ended by the end of the step
        assert "another thread took it" in told_of_a_step(takes)


@pytest.mark.parametrize("is_in_core", [False, True])
def test_where_another_thread_trains_at_the_same_time_that_is_told(is_in_core: bool) -> None:
    assert "another thread trains at the same time" in told_of_a_step(trains, is_in_core=is_in_core)


def test_a_step_whose_ops_overlap_in_two_threads_trains_on_and_is_not_recorded() -> None:
    """As where `torch.jit.fork` runs them. An error for steps that are measured alone ended the training."""
    model, rows = Busy(), torch.rand(16, 8)
    model(rows).backward()
    plain = [p.grad for p in model.parameters() if p.grad is not None]
    with Auto([model], live_bytes(CPU) + 2**20, tell=lambda _: None) as auto:
        for _ in range(6):
            model.zero_grad()
            model.beside = lambda: torch.cos(rows)
            loss = model(rows)
            DURING.clear()
            loss.backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        assert auto.summary().steps == 6
        assert not known(auto)
    assert all(map(is_same, plain, found))


def test_a_share_that_does_not_become_known_as_backward_passes_run_in_other_threads_is_told_of() -> None:
    model, told = network(0), list[str]()
    with Auto([model], "60%", tell=told.append) as auto, ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            pool.submit(model, torch.randn(ROWS, WIDTH)).result().square().mean().backward()
        assert auto.budget_bytes is None
        assert sum("runs in another thread than its forward pass" in line for line in told) == 1


def test_two_threads_that_begin_to_hold_a_budget_at_once_do_not_both_hold_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each moved what the other one had moved."""
    is_first, refused = threading.Lock(), list[UsageError]()
    real = autopilot.live_bytes_of

    def slowly(device: torch.device) -> object:
        if is_first.acquire(blocking=False):
            in_threads(second)
        return real(device)

    def second() -> None:
        try:
            Auto([network(1)], 2**30).remove()
        except UsageError as error:
            refused.append(error)

    monkeypatch.setattr(autopilot, "live_bytes_of", slowly)
    model = network(0)
    with Auto([model], 2**30) as auto:
        assert len(refused) == 1
        warmed_up(model, torch.randn(ROWS, WIDTH))
        assert auto.summary().steps == 1
    Auto([model], 2**30).remove()


def test_a_step_that_another_thread_ends_as_one_begins_is_no_error() -> None:
    """The thread of a step gives it back while another one looks whose it is."""
    model, rows = network(0), torch.randn(ROWS, WIDTH)
    with Auto([model], live_bytes(CPU) + 500_000, tell=lambda _: None) as auto:
        driver: Any = auto._driver

        class Ending:
            is_here = False

            @property
            def has_ended(self) -> bool:
                driver._claimed = None
                return False

        driver._claimed = Ending()
        warmed_up(model, rows)
        assert auto.summary().steps == 1


def test_what_was_there_before_is_counted_again_once_no_other_thread_may_train() -> None:
    """It was counted at steps 1, 2, 3, 10 and 100 or not at all."""
    model, before = network(0), [torch.zeros(2**20)]
    with Auto([model], live_bytes(CPU) + 500_000, tell=lambda _: None) as auto:
        counted_bytes = auto._driver._live.now()
        with another_thread(may_train=True):
            trained(model, 0, 1)
            before.clear()
            trained(model, 0, 3)
            assert auto._driver._live.now() >= counted_bytes
        trained(model, 0, 1)
        assert auto._driver._live.now() < counted_bytes - 2 * 2**20


def test_a_thread_with_the_number_of_another_is_not_that() -> None:
    numbers, threads = list[int](), list[OwnThread]()

    def work() -> None:
        numbers.append(threading.get_ident())
        threads.append(OwnThread())

    for _ in range(20):
        in_threads(work)
    assert len(set(numbers)) < 20  # numbers come again
    assert all(thread.has_ended and not thread.is_here for thread in threads)
    assert OwnThread().is_here
    assert not OwnThread().has_ended


def test_steps_are_recorded_while_the_programs_profiler_runs_and_where_it_begins_and_ends() -> None:
    model = network(0)
    plain = trained(network(0), 0, 1)
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    with Auto([model], live_bytes(CPU) + 2**30, tell=lambda _: None) as auto:
        warmed_up(model, rows)
        profiler = torch.profiler.profile()
        profiler.__enter__()
        output = model(rows)
        profiler.__exit__(None, None, None)
        with torch.profiler.profile() as within:
            loss = output.square().mean()
            loss.backward()
    assert known(auto) == 1
    found = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    assert all(map(is_same, plain, found))
    for each in (profiler, within):
        names = [event.key for event in each.key_averages()]
        assert any("mm" in name for name in names)
        assert not any("pooch" in name for name in names)


def test_a_thread_lets_go_of_nothing_that_another_has_saved() -> None:
    """PyTorch ends the process if one thread releases a storage that another one is just releasing."""
    model, rows = network(0), torch.randn(ROWS, WIDTH)
    with Auto([model], live_bytes(CPU) + 2**30, tell=lambda _: None) as auto:
        warmed_up(model, rows)
        loss = model(rows).square().mean()
        evictor = auto._driver.evictor
        in_threads(lambda: evictor.make_room(10_000))
        assert not evictor.stats.swapped_out_bytes
        evictor.make_room(10_000)
        assert evictor.stats.swapped_out_bytes  # its own thread does
        loss.backward()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        model(rows).square().mean().backward()
    assert all(map(is_same, found, [p.grad for p in model.parameters() if p.grad is not None]))


def test_what_is_away_as_a_step_of_several_threads_is_recorded_is_not_looked_at() -> None:
    width = 256

    def found(budget: int | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*[each for _ in range(6) for each in (nn.Linear(width, width), nn.GELU())])
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        losses: list[torch.Tensor] = []
        around = nullcontext() if budget is None else pooch.auto(model, live_before() + budget, tell=lambda line: None)
        with around, ThreadPoolExecutor(1) as pool:
            for number in range(5):
                rows = torch.randn(512, width)
                if number % 3 == 0:
                    loss = model(rows).square().mean()
                    pool.submit(loss.backward).result()
                elif number % 3 == 1:
                    loss = pool.submit(model, rows).result().square().mean()
                    loss.backward()
                else:
                    loss = pool.submit(model[2:], model[:2](rows)).result().square().mean()
                    pool.submit(loss.backward).result()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach().clone())
        return losses + [each.detach().clone() for each in model.parameters()]

    assert all(torch.equal(*pair) for pair in zip(found(4 * 2**20), found(None), strict=True))


_FRESH_THREAD = """
import ctypes, threading
import torch
from torch import nn

torch.set_num_threads(1)  # of the main thread; PyTorch sets others' with the first parallel op that each of them runs
import pooch

threads_now, used = ctypes.PyDLL(None).omp_get_max_threads, []
model = nn.Sequential(*[each for _ in range(4) for each in (nn.Linear(64, 64), nn.Tanh())])
for layer in model:
    layer.register_forward_pre_hook(lambda *_: used.append(threads_now()))


def train():
    for _ in range(3):
        model(torch.randn(64, 64)).square().mean().backward()


def found(budget):
    used.clear()
    auto = None if budget is None else pooch.auto(model, budget, tell=lambda line: None)
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    if auto is not None:
        auto.remove()
        assert auto.summary().swapped_bytes + auto.summary().recomputed_ops > 0
    return list(used)


plain = found(None)
assert (plain[0], plain[-1]) == (3, 1), plain
governed = found(sum(each.nbytes for each in model.parameters()) * 2 + 120_000)
assert governed == plain, governed
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch has OpenMP's threads, which are asked, on Linux")
@pytest.mark.parametrize("native", ["0", "1"])
def test_a_thread_s_first_ops_use_as_many_threads_as_without_a_budget(native: str) -> None:
    """PyTorch sets the number of a thread when it is first asked, and its first matrix products depend on it."""
    environment = child_environment(OMP_NUM_THREADS="3", POOCH_NATIVE_WATCH=native)
    subprocess.run([sys.executable, "-c", _FRESH_THREAD], env=environment, check=True, timeout=120)
