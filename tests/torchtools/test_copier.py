"""The thread of C++ that copies: every byte comes back or an error does, nobody waits in vain, and Ctrl-C is heard."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pooch.errors import TierError
from pooch.torchtools import copier
from pooch.torchtools.tensors import bytes_in_place
from tests.executor.copiers import copy_threads, through_python

pytestmark = pytest.mark.cpu
CHUNK_BYTES = 64 * 1024  # small, so that most sizes take several
SIZES = [0, 1, 63, 64, 65, 4095, 4096, 4097, CHUNK_BYTES - 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 777, 2**20]
PATIENCE_S = 20
Noted = list[tuple[bool, int, float]]


class Opened:
    """An unnamed file, and a copier that notes copies of 4096 bytes and more."""

    def __init__(self, directory: Path, module: Any) -> None:
        self.descriptor = os.open(directory, os.O_RDWR | os.O_TMPFILE, 0o600)
        self.noted: Noted = []
        self.copier = module.Copier(CHUNK_BYTES, 4096, lambda *given: self.noted.append(given))

    def room(self, is_checked: bool = True) -> Any:
        return self.copier.room(self, self.descriptor, is_checked)

    def close(self) -> None:
        self.copier.stop()
        os.close(self.descriptor)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    module = copier.LIBRARY.get()
    if module is None:
        pytest.skip(f"no native thread that copies: {copier.LIBRARY.why_not}")
    found = Opened(tmp_path, module)
    yield found
    found.close()


@pytest.fixture
def hooked(tmp_path: Path, opened: Opened) -> Iterator[Opened]:
    """The same, whose system calls are those of Python's `os`."""
    found = Opened(tmp_path, through_python())
    yield found
    found.close()


def storage_of(size_bytes: int, seed: int = 0) -> torch.UntypedStorage:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator).untyped_storage()


def is_same(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    return bytes_of(one) == bytes_of(other)


def bytes_of(storage: torch.UntypedStorage) -> bytes:
    return bytes_in_place(storage).tobytes() if storage.nbytes() else b""


@pytest.mark.parametrize("is_checked", [True, False])
def test_every_size_comes_back_in_the_order_in_which_it_was_asked_for(opened: Opened, is_checked: bool) -> None:
    room, offset = opened.room(is_checked), 0
    pairs, tickets = [], []
    for number, size in enumerate(SIZES):
        pairs.append((storage_of(size, number), storage_of(size, 99)))
        tickets += [room.copy_out(pairs[-1][0], offset), room.copy_in(pairs[-1][1], offset)]
        offset += -(-size // 4096) * 4096
    room.finish()
    assert all(ticket.is_done() and ticket.error is None and ticket.storage is None for ticket in tickets)
    assert all(ticket.copy_ms >= 0 for ticket in tickets)
    assert all(is_same(*pair) for pair in pairs)
    noted = [(outwards, size) for outwards, size, _ in opened.noted]
    assert noted == [(outwards, size) for size in SIZES if size >= 4096 for outwards in (True, False)]


def test_what_a_room_holds_now_is_what_comes_back(opened: Opened) -> None:
    room, back = opened.room(), storage_of(8192, 9)
    for seed in range(3):
        room.copy_out(storage_of(8192, seed), 0)
    room.copy_in(back, 0).wait()
    assert is_same(back, storage_of(8192, 2))


@pytest.mark.parametrize("size", [1, 64, 4095, CHUNK_BYTES + 5])
@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("bit", [0, 7])
def test_one_bit_that_changes_in_the_file_is_an_error(opened: Opened, size: int, place: int, bit: int) -> None:
    room = opened.room()
    room.copy_out(storage_of(size), 0).wait()
    at = place % size
    byte = os.pread(opened.descriptor, 1, at)[0]
    os.pwrite(opened.descriptor, bytes([byte ^ (1 << bit)]), at)
    ticket = room.copy_in(storage_of(size, 1), 0)
    ticket.wait()
    assert isinstance(ticket.error, OSError)
    assert ticket.error.args == copier.OTHER_BYTES
    assert ticket.error is ticket.error  # one object, as whoever raises it may note more on it
    assert ticket.copy_ms is None


def test_bytes_that_change_their_places_are_an_error(opened: Opened) -> None:
    room = opened.room()
    room.copy_out(storage_of(8192), 0).wait()
    whole = os.pread(opened.descriptor, 8192, 0)
    for first, second in ((0, 8), (0, 64), (64, 4096)):
        moved = bytearray(whole)
        moved[first : first + 8], moved[second : second + 8] = whole[second : second + 8], whole[first : first + 8]
        os.pwrite(opened.descriptor, moved, 0)
        ticket = room.copy_in(storage_of(8192, 1), 0)
        ticket.wait()
        assert ticket.error is not None


def test_what_was_never_written_is_an_error(opened: Opened) -> None:
    os.ftruncate(opened.descriptor, 2**20)
    ticket = opened.room().copy_in(storage_of(4096), 0)
    ticket.wait()
    assert ticket.error.args == copier.OTHER_BYTES


def test_a_file_that_ends_early_and_one_that_is_closed_are_errors(opened: Opened) -> None:
    ticket = opened.room(False).copy_in(storage_of(8192), 0)
    ticket.wait()
    assert ticket.error.args == copier.ENDED_EARLY
    room = opened.copier.room(opened, 10**6, True)
    ticket = room.copy_out(storage_of(8192), 0)
    ticket.wait()
    assert ticket.error.errno == errno.EBADF
    after = opened.room().copy_out(storage_of(8192), 0)
    after.wait()
    assert after.error is None  # the thread goes on


def test_a_write_that_failed_is_not_read_back(hooked: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    room, real = hooked.room(), os.pwrite
    room.copy_out(storage_of(4096, 1), 0).wait()

    def half(descriptor: int, view: memoryview, at: int) -> int:
        real(descriptor, view[:2048], at)
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwrite", half)
    failed = room.copy_out(storage_of(4096, 2), 0)
    failed.wait()
    assert failed.error.errno == errno.ENOSPC
    assert failed.storage is None
    back = room.copy_in(storage_of(4096, 3), 0)
    back.wait()
    assert back.error.args == copier.OTHER_BYTES


def test_memory_is_held_until_somebody_learns_of_the_end_of_its_copy(
    hooked: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, real = threading.Event(), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *given: (gate.wait(PATIENCE_S), real(*given))[1])
    room, expected = hooked.room(), bytes_of(storage_of(2**16, 3))
    ticket = room.copy_out(storage_of(2**16, 3), 0)  # which nobody else holds
    assert not ticket.is_done()
    assert ticket.error is None
    assert ticket.copy_ms is None
    assert ticket.storage is not None
    del ticket  # nor the ticket
    gate.set()
    room.finish()
    assert os.pread(hooked.descriptor, 2**16, 0) == expected


@contextmanager
def once_this_thread_waits(act: Callable[[], object]) -> Iterator[None]:
    """Have another thread do something once this one gives up the interpreter, which it does not by itself."""
    ready = threading.Event()
    acting = threading.Thread(target=lambda: (ready.wait(PATIENCE_S), act()))
    acting.start()
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1000)
        ready.set()
        yield
    finally:
        sys.setswitchinterval(before)
        acting.join()


def test_waiting_is_counted_and_lets_other_threads_run(hooked: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, real = threading.Event(), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *given: (gate.wait(PATIENCE_S), real(*given))[1])
    ticket = hooked.room().copy_out(storage_of(4096), 0)
    with once_this_thread_waits(gate.set):
        waited_ms = ticket.wait()
    assert waited_ms > 0
    assert ticket.wait() == 0


def test_an_interrupt_ends_the_wait_and_not_the_copy(hooked: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, real = threading.Event(), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *given: (gate.wait(PATIENCE_S), real(*given))[1])
    ticket = hooked.room().copy_out(storage_of(4096), 0)
    with pytest.raises(KeyboardInterrupt), once_this_thread_waits(lambda: os.kill(os.getpid(), signal.SIGINT)):
        ticket.wait()
    assert not ticket.is_done()
    gate.set()
    ticket.wait()
    assert ticket.error is None


def test_stopping_completes_what_was_submitted(hooked: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, real = threading.Event(), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *given: (gate.wait(PATIENCE_S), real(*given))[1])
    before, room = copy_threads(), hooked.room()
    tickets = [room.copy_out(storage_of(4096, seed), 4096 * seed) for seed in range(5)]
    stopping = threading.Thread(target=hooked.copier.stop)
    stopping.start()
    assert hooked.copier.is_alive()
    gate.set()
    stopping.join(PATIENCE_S)
    assert not hooked.copier.is_alive()
    assert all(ticket.is_done() and ticket.error is None for ticket in tickets)
    assert copy_threads() < before


def test_a_fork_in_mid_copy_waits_for_nothing_and_has_a_thread_of_its_own(
    hooked: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, begun, real = threading.Event(), threading.Event(), os.pwrite

    def stuck(*given: Any) -> int:
        begun.set()
        gate.wait(PATIENCE_S)
        return real(*given)

    monkeypatch.setattr(os, "pwrite", stuck)
    room = hooked.room()
    ticket = room.copy_out(storage_of(4096, 1), 0)
    assert begun.wait(PATIENCE_S)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        child = os.fork()
    if child == 0:
        os.pwrite = real
        os._exit(0 if _goes_on(hooked, room, ticket) else 1)
    limit = threading.Timer(PATIENCE_S, lambda: os.kill(child, 9))
    limit.start()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    limit.cancel()
    gate.set()
    ticket.wait()
    assert status == 0
    assert ticket.error is None


def _goes_on(hooked: Opened, room: Any, ticket: Any) -> bool:
    ticket.wait()
    if not isinstance(ticket.error, TierError) or hooked.copier.is_alive():
        return False
    back = storage_of(4096, 9)
    again = [room.copy_out(storage_of(4096, 2), 8192), room.copy_in(back, 8192)]
    room.finish()
    hooked.copier.stop()
    return all(each.is_done() and each.error is None for each in again) and is_same(back, storage_of(4096, 2))


def test_a_wrong_call_is_refused_and_leaves_nothing(opened: Opened) -> None:
    room = opened.room()
    with pytest.raises(TypeError):
        room.copy_out(storage_of(1))
    with pytest.raises(TypeError):
        room.copy_out(object(), 0)
    with pytest.raises(TypeError):
        room.copy_out(storage_of(1), "0")
    room.finish()
