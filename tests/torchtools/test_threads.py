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
from multiprocessing import Pipe

import pytest
import torch

from pooch.torchtools.threads import OwnThread, is_alone


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
