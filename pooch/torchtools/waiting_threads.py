"""Tells by its innermost frame whether a thread waits, and has not been told to go on."""

from __future__ import annotations

import dis
import threading
from collections.abc import Callable, Collection
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any


def does_wait(frame: FrameType | None, threads: Collection[threading.Thread]) -> bool:
    """Whether a thread waits or sleeps: it runs no Python code until somebody tells it to, or some time has passed.

    Args:
        frame: Its innermost frame. None: it runs no Python code, as those of autograd between steps.
        threads: The threads that are running.
    """
    if frame is None:
        return True
    waits = _WAITING.get((str(frame.f_globals.get("__name__")), frame.f_code.co_name))
    if waits is not None:
        return waits(frame.f_locals, threads)
    return _calls_sleep(frame.f_code, frame.f_lasti)


def _on_a_condition(names: dict[str, Any], _: object) -> bool:
    """A condition takes a lock off its list as it releases it."""
    condition, waiter = names.get("self"), names.get("waiter")
    waiting: Collection[object] = getattr(condition, "_waiters", ())
    return waiter is not None and waiter in list(waiting)


def _for_work(names: dict[str, Any], _: object) -> bool:
    """A worker forgets what it has done before it looks for more."""
    queue = names.get("work_queue")
    return queue is not None and names.get("work_item") is None and queue.qsize() == 0


def _for_a_thread(names: dict[str, Any], threads: Collection[threading.Thread]) -> bool:
    return names.get("self") in threads


def _for_others(*_: object) -> bool:
    """What comes from another process, or from the system, is not seen before it is there."""
    return True


_WAITING: dict[tuple[str, str], Callable[[dict[str, Any], Collection[threading.Thread]], bool]] = {
    # by module and function, whether the thread in it is still to wait
    ("concurrent.futures.thread", "_worker"): _for_work,
    ("multiprocessing.connection", "_recv"): _for_others,
    ("selectors", "select"): _for_others,
    ("socket", "accept"): _for_others,
    ("socket", "readinto"): _for_others,
    ("subprocess", "_try_wait"): _for_others,
    ("threading", "_wait_for_tstate_lock"): _for_a_thread,  # until Python 3.12
    ("threading", "join"): _for_a_thread,
    ("threading", "wait"): _on_a_condition,
    ("torch._inductor.compile_worker.subproc_pool", "_recv_msg"): _for_others,
}


@lru_cache(64)
def _calls_sleep(code: CodeType, offset: int) -> bool:
    """Whether an instruction calls what is named `sleep`, as `time.sleep` is: it has no frame of its own.

    What a call calls is the last thing that was loaded of those that begin at the same place in the source.
    """
    called = None
    begins: dict[tuple[int, int], str] = {}  # the last name that was loaded, by where the expression begins
    for each in dis.get_instructions(code):
        place = each.positions
        if place is None or place.lineno is None or place.col_offset is None:
            continue
        begin = place.lineno, place.col_offset
        if each.offset == offset:
            called = begins.get(begin) if each.opname.startswith("CALL") else None
            break
        if each.opname.startswith("LOAD"):
            begins[begin] = str(each.argval)
    return called == "sleep"
