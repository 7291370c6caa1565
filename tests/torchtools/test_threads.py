"""Threads that train, and those that only wait."""

from __future__ import annotations

import gc
import queue
import selectors
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import wraps
from multiprocessing import Pipe

import pytest
import torch

import pooch
from pooch.torchtools.threads import OwnThread, is_alone
from tests.live_before import live_before

Told = tuple[threading.Thread, Callable[[], object]]  # a thread that waits, and what tells it to go on


@contextmanager
def running(target: Callable[[], object], stop: Callable[[], object]) -> Iterator[None]:
    """Run a function in a thread until it is told to stop."""
    thread = threading.Thread(target=target)
    thread.start()
    try:
        yield
    finally:
        stop()
        thread.join()


def comes_true(condition: Callable[[], bool]) -> bool:
    """Whether something becomes true: a thread takes a moment until it waits."""
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


@contextmanager
def on_an_event() -> Iterator[None]:
    event = threading.Event()
    with running(event.wait, event.set):
        yield


@contextmanager
def on_a_queue() -> Iterator[None]:
    waiting: queue.Queue[None] = queue.Queue()
    with running(waiting.get, lambda: waiting.put(None)):
        yield


@contextmanager
def on_a_pipe() -> Iterator[None]:
    receiver, sender = Pipe(duplex=False)
    with receiver, sender, running(receiver.recv, lambda: sender.send(None)):
        yield


@contextmanager
def on_sockets() -> Iterator[None]:
    here, there = socket.socketpair()
    with here, there, selectors.DefaultSelector() as selector:
        selector.register(here, selectors.EVENT_READ)
        with running(selector.select, lambda: there.send(b"-")):
            yield


@contextmanager
def on_a_process() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True)
    with running(process.wait, lambda: process.communicate("\n")):
        yield


@contextmanager
def on_another_thread() -> Iterator[None]:
    event = threading.Event()
    with running(event.wait, event.set):
        others = [each for each in threading.enumerate() if each is not threading.current_thread()]
        with running(others[-1].join, event.set):
            yield


@contextmanager
def on_work() -> Iterator[None]:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        yield


def asleep(call: Callable[[list[bool]], None]) -> Callable[[], contextmanager[None]]:  # type: ignore[valid-type]
    @contextmanager
    @wraps(call)
    def sleeping() -> Iterator[None]:  # type: ignore[misc]
        is_over = list[bool]()
        with running(lambda: call(is_over), lambda: is_over.append(True)):
            yield

    return sleeping  # type: ignore[return-value]


@asleep
def asleep_by_module(is_over: list[bool]) -> None:
    while not is_over:
        time.sleep(0.05)


@asleep
def asleep_by_name(is_over: list[bool]) -> None:
    from time import sleep

    while not is_over:
        sleep(max(0.01, min(0.05, 1.0)) if is_over is not None else float("nan"))


@asleep
def asleep_by_unpacked_arguments(is_over: list[bool]) -> None:
    given = [0.05]
    while not is_over:
        time.sleep(*given)


@contextmanager
def in_a_progress_bar() -> Iterator[None]:
    tqdm = pytest.importorskip("tqdm")
    for _ in tqdm.tqdm(range(1)):
        assert any(type(each).__module__.startswith("tqdm") for each in threading.enumerate())
        yield


WAITS = [
    on_an_event,
    on_a_queue,
    on_a_pipe,
    on_sockets,
    on_a_process,
    on_another_thread,
    on_work,
    asleep_by_module,
    asleep_by_name,
    asleep_by_unpacked_arguments,
    in_a_progress_bar,
]


@pytest.mark.parametrize("waits", WAITS, ids=lambda each: each.__name__)
def test_a_thread_that_waits_trains_nothing(waits: Callable[[], contextmanager[None]]) -> None:  # type: ignore[valid-type]
    with waits():  # type: ignore[attr-defined]
        assert threading.active_count() > 1
        assert comes_true(is_alone)


def test_one_that_computes_may_train() -> None:
    is_over = False

    def compute() -> None:
        while not is_over:
            torch.ones(10).sum()

    def stop() -> None:
        nonlocal is_over
        is_over = True

    with running(compute, stop):
        assert not any(is_alone() for _ in range(100))
    assert is_alone()


def test_one_that_only_looks_up_how_long_it_sleeps_may_train() -> None:
    """Not in a call of `sleep`: in one within its arguments, or in one of its result."""
    is_over = list[bool]()
    numbers = list(range(2_000_000))

    def arguments() -> None:
        while not is_over:
            time.sleep(1e-9 * max(numbers))

    def result() -> None:
        while not is_over:
            Resting().sleep(0).index(numbers[-1])

    class Resting:
        def sleep(self, _: float) -> list[int]:
            return numbers

    for work in (arguments, result):
        with running(work, lambda: is_over.append(True)):
            assert comes_true(lambda: not is_alone())
        is_over.clear()


@contextmanager
def nobody_else_runs() -> Iterator[None]:
    """As long as what is called within gives the interpreter to nobody."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def by_an_event() -> Told:
    event = threading.Event()
    return threading.Thread(target=event.wait), event.set


def by_a_barrier() -> Told:
    barrier = threading.Barrier(2)
    return threading.Thread(target=barrier.wait), barrier.wait


def by_a_queue() -> Told:
    waiting: queue.Queue[None] = queue.Queue()
    return threading.Thread(target=waiting.get), lambda: waiting.put(None)


def by_room_in_a_queue() -> Told:
    waiting: queue.Queue[None] = queue.Queue(1)
    waiting.put(None)
    return threading.Thread(target=waiting.put, args=(None,)), waiting.get


@pytest.mark.parametrize("told", [by_an_event, by_a_barrier, by_a_queue, by_room_in_a_queue])
def test_one_that_was_told_to_go_on_waits_no_longer(told: Callable[[], Told]) -> None:
    """It trains as soon as it has the interpreter, which may be in the midst of what the answer is for."""
    thread, go_on = told()
    thread.start()
    assert comes_true(is_alone)
    with nobody_else_runs():
        go_on()
        assert not is_alone()
    thread.join()
    assert is_alone()


def test_a_worker_that_was_given_work_waits_no_longer() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        assert comes_true(is_alone)
        with nobody_else_runs():
            work = pool.submit(int)
            assert not is_alone()
        work.result()
        assert comes_true(is_alone)


def test_one_whose_thread_has_ended_waits_for_it_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_another_thread():
        assert comes_true(is_alone)
        *others, _, waiting = threading.enumerate()  # it waits for the one that began before it
        monkeypatch.setattr(threading, "enumerate", lambda: [*others, waiting])
        assert not is_alone()


def test_one_that_is_just_starting_may_train(monkeypatch: pytest.MonkeyPatch) -> None:
    name = next(each for each in ("_start_joinable_thread", "_start_new_thread") if hasattr(threading, each))
    start, found = getattr(threading, name), list[bool]()

    def looking(*args: object, **kwargs: object) -> object:
        found.append(is_alone())
        return start(*args, **kwargs)

    monkeypatch.setattr(threading, name, looking)
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert found == [False]


def test_one_that_prints_in_a_progress_bar_may_train() -> None:
    """It is in a package with threads that never train, but none of them."""
    tqdm = pytest.importorskip("tqdm")
    is_in, is_over = threading.Event(), threading.Event()

    class File:
        def write(self, text: str) -> None:
            is_in.set()

        def flush(self) -> None:
            pass

    def train() -> None:
        for _ in tqdm.tqdm(iter(lambda: is_over.is_set() or None, True), file=File(), mininterval=0):
            pass

    with running(train, is_over.set):
        is_in.wait()
        assert not all(is_alone() for _ in range(100))


def test_one_that_has_run_a_backward_pass_of_its_own_may_go_on() -> None:
    is_over, has_trained = threading.Event(), threading.Event()

    def train() -> None:
        torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()  # not governed
        has_trained.set()
        is_over.wait()

    with pooch.auto(torch.nn.Linear(2, 2), live_before() + 2**20, tell=lambda _: None), running(train, is_over.set):
        has_trained.wait()
        time.sleep(0.05)
        assert not is_alone()


def test_one_that_has_trained_may_go_on() -> None:
    is_over, has_trained = threading.Event(), threading.Event()

    def train() -> None:
        OwnThread()
        has_trained.set()
        is_over.wait()

    with running(train, is_over.set):
        has_trained.wait()
        time.sleep(0.05)
        assert not is_alone()
    assert is_alone()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="autograd has threads of its own for devices")
def test_those_of_autograd_train_nothing_of_their_own() -> None:
    found = []

    def look(_: torch.Tensor) -> None:
        found.append((OwnThread(), threading.current_thread()))  # Python knows of the thread from then on

    there = torch.ones(2, device="cuda", requires_grad=True)
    there.register_hook(look)
    there.sum().backward()
    ((own, thread),) = found
    assert thread in threading.enumerate()
    assert not own.is_here
    assert comes_true(is_alone)


class Known:
    pass


def test_a_look_at_threads_keeps_nothing_of_its_callers_alive() -> None:
    with on_an_event():

        def look() -> weakref.ref[Known]:
            known = Known()
            assert comes_true(is_alone)
            return weakref.ref(known)

        gc.disable()
        try:
            assert look()() is None
        finally:
            gc.enable()
