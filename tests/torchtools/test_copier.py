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
        self.copier = module.Copier(CHUNK_BYTES, 4096, lambda *given: self.noted.append(given), True)

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


# Masks and constants --------------------------------------------------------------------------------------------------


def moved_through(opened: Opened, storage: torch.UntypedStorage, is_checked: bool = True) -> int:
    """How many bytes a copy out moves, after which a copy in has brought every byte back."""
    room, back = opened.room(is_checked), storage_of(storage.nbytes(), 99)
    out, into = room.copy_out(storage, 0), room.copy_in(back, 0)
    into.wait()
    assert (out.error, into.error) == (None, None)
    assert is_same(storage, back)
    assert into.moved_bytes == out.moved_bytes
    return int(out.moved_bytes)


@pytest.mark.parametrize("size", [65, 1000, 4097, CHUNK_BYTES, CHUNK_BYTES + 13])
@pytest.mark.parametrize("is_checked", [True, False])
def test_truth_values_move_as_bits(opened: Opened, size: int, is_checked: bool) -> None:
    mask = torch.rand(size, generator=torch.Generator().manual_seed(size)) < 0.3
    rest = size % CHUNK_BYTES if size % CHUNK_BYTES < 64 else 0  # a chunk that is too small to be looked at
    assert moved_through(opened, mask.untyped_storage(), is_checked) == -(-(size - rest) // 8) + rest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.complex64])
def test_what_dropout_multiplies_with_moves_as_bits(opened: Opened, dtype: torch.dtype) -> None:
    kept = torch.rand(CHUNK_BYTES, generator=torch.Generator().manual_seed(0)) < 0.9
    factors = kept.to(dtype) * 3
    assert moved_through(opened, factors.untyped_storage()) == CHUNK_BYTES // 8


def test_a_constant_is_not_moved_at_all_and_others_are_whole(opened: Opened) -> None:
    constants = [torch.zeros(CHUNK_BYTES), torch.full((999,), 0.3), torch.full((77,), 1.7, dtype=torch.float64)]
    assert [moved_through(opened, each.untyped_storage()) for each in constants] == [0, 0, 0]
    assert opened.noted == []  # they tell nothing of how fast the file is
    for place in (0, 63, 64, 1000, CHUNK_BYTES // 4 - 1):
        almost = torch.full((CHUNK_BYTES // 4,), 5.0)
        almost[place], almost[place // 2 - 3] = 6.0, 7.0
        assert moved_through(opened, almost.untyped_storage()) == CHUNK_BYTES


def test_truth_values_with_other_bytes_keep_every_one_of_them(opened: Opened) -> None:
    strange = (torch.arange(8192) % 3).to(torch.uint8).view(torch.bool)
    assert moved_through(opened, strange.untyped_storage()) == 8192
    two = torch.where(torch.arange(8192) % 5 == 0, 200, 2).to(torch.uint8).view(torch.bool)  # neither 0 nor 1
    assert moved_through(opened, two.untyped_storage()) == 1024


def test_a_view_moves_all_of_its_storage(opened: Opened) -> None:
    base = torch.rand(64, 128, generator=torch.Generator().manual_seed(0)) < 0.5
    assert moved_through(opened, base.t()[3::2, 1:].untyped_storage()) == 1024
    mixed = storage_of(CHUNK_BYTES + 4096)  # the first chunk is a mask, the second is not
    bytes_in_place(mixed)[:CHUNK_BYTES] &= 1
    assert moved_through(opened, mixed) == CHUNK_BYTES // 8 + 4096


def test_few_different_words_of_any_kind_come_back(opened: Opened) -> None:
    random = torch.Generator().manual_seed(3)
    for _ in range(150):
        words = int(torch.randint(1, 5, (1,), generator=random))
        width, count = (
            2 ** int(torch.randint(0, 4, (1,), generator=random)),
            int(torch.randint(1, 3000, (1,), generator=random)),
        )
        kinds = torch.randint(0, 256, (words, width), dtype=torch.uint8, generator=random)
        drawn = torch.randint(0, words, (count,), generator=random)
        if float(torch.rand(1, generator=random)) < 0.5:  # long runs, of which a look at the first words tells nothing
            drawn = drawn.sort().values
        moved_through(opened, kinds[drawn].contiguous().untyped_storage())


def test_one_bit_of_a_packed_mask_that_changes_in_the_file_is_an_error(opened: Opened) -> None:
    room = opened.room()
    room.copy_out((torch.arange(8192) % 3 == 0).untyped_storage(), 0).wait()
    byte = os.pread(opened.descriptor, 1, 700)[0]
    os.pwrite(opened.descriptor, bytes([byte ^ 4]), 700)
    ticket = room.copy_in(storage_of(8192), 0)
    ticket.wait()
    assert ticket.error is not None
    assert ticket.error.args == copier.OTHER_BYTES


def test_what_comes_back_is_read_as_it_was_written_last(opened: Opened) -> None:
    room, back = opened.room(), storage_of(8192, 9)
    for storage in (
        torch.zeros(2048).untyped_storage(),
        storage_of(8192),
        (torch.arange(8192) % 7 == 0).untyped_storage(),
    ):
        room.copy_out(storage, 0)
        room.copy_in(back, 0).wait()
        assert is_same(back, storage)


def test_without_packing_every_byte_moves(tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = torch.ones(8192, dtype=torch.bool).untyped_storage()
    assert copier.is_packed(mask)
    monkeypatch.setenv(copier.PACKING, "0")
    assert not copier.is_packed(mask)
    plain = Opened.__new__(Opened)
    plain.descriptor, plain.noted = opened.descriptor, []
    plain.copier = type(opened.copier)(
        CHUNK_BYTES, 4096, lambda *given: plain.noted.append(given), copier.packs_copies()
    )
    assert moved_through(plain, mask) == 8192
    plain.copier.stop()
