"""What copies take, as learned from copies: each direction by itself, whatever their sizes and whoever waits."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from pooch.ir import Link
from pooch.machine import CopySpeed, Lane, Store, Value
from pooch.simulator.modelled import ModelledClock, ModelledCounters, ModelledMemory, ModelledStorage, ModelledTier

MEGABYTE = 2**20
LINK = Link("a modelled tier", 0.2, 0.1, 5e6, 1e6)


def ms_of(size_bytes: int, rate: float, latency_ms: float = 0.2) -> float:
    return latency_ms + size_bytes / rate


def test_each_direction_is_learned_by_itself() -> None:
    speed = CopySpeed("a tier")
    for _ in range(50):
        speed.out.note(8 * MEGABYTE, ms_of(8 * MEGABYTE, 5e6))
        speed.back.note(8 * MEGABYTE, ms_of(8 * MEGABYTE, 1e6))
    assert speed.out.copy_ms(8 * MEGABYTE) == pytest.approx(ms_of(8 * MEGABYTE, 5e6), rel=0.05)
    assert speed.back_ms(8 * MEGABYTE) == pytest.approx(ms_of(8 * MEGABYTE, 1e6), rel=0.05)
    assert speed.back.bytes_per_ms * 5 == pytest.approx(speed.out.bytes_per_ms, rel=0.1)


@pytest.mark.parametrize("small_bytes", [256, 4096, 2**17])
def test_small_copies_do_not_spoil_the_rate(small_bytes: int) -> None:
    lane = Lane()
    for _ in range(50):
        lane.note(8 * MEGABYTE, ms_of(8 * MEGABYTE, 5e6))
    for _ in range(200):
        lane.note(small_bytes, ms_of(small_bytes, 5e6))
    assert lane.bytes_per_ms == pytest.approx(5e6, rel=0.1)
    assert lane.copy_ms(8 * MEGABYTE) == pytest.approx(ms_of(8 * MEGABYTE, 5e6), rel=0.15)


def test_small_copies_tell_the_latency() -> None:
    lane = Lane()
    for _ in range(100):
        lane.note(4096, 3.0)
    assert lane.copy_ms(4096) == pytest.approx(3.0, rel=0.01)


@pytest.mark.parametrize("size_bytes", [4096, 2**17])
def test_many_copies_at_once_tell_what_each_of_them_would(size_bytes: int) -> None:
    one_by_one, together = Lane(), Lane()
    for _ in range(20):
        for _ in range(32):
            one_by_one.note(size_bytes, ms_of(size_bytes, 2e6))
        together.note(32 * size_bytes, 32 * ms_of(size_bytes, 2e6), 32)
    assert together.copy_ms(size_bytes) == pytest.approx(one_by_one.copy_ms(size_bytes), rel=0.01)
    assert together.bytes_per_ms == pytest.approx(one_by_one.bytes_per_ms, rel=0.1)
    assert together.noted_bytes == one_by_one.noted_bytes


def test_copies_of_mixed_sizes_are_learned_whatever_their_order() -> None:
    chance = random.Random(0)
    for rate, latency_ms in ((5e6, 0.05), (1e6, 0.5), (2e7, 0.02)):
        lane = Lane()
        for _ in range(300):
            size_bytes = chance.choice((4096, 2**18, MEGABYTE, 16 * MEGABYTE))
            lane.note(size_bytes, ms_of(size_bytes, rate, latency_ms) * chance.uniform(0.8, 1.25))
        assert lane.bytes_per_ms == pytest.approx(rate, rel=0.25)


def test_a_process_that_stands_still_in_a_copy_does_not_spoil_the_rate() -> None:
    lane = Lane()
    lane.start_from(0.1, 1e6)
    lane.note(8 * MEGABYTE, 1e6)
    assert lane.bytes_per_ms > 1e6 / 3
    for _ in range(20):
        lane.note(8 * MEGABYTE, ms_of(8 * MEGABYTE, 1e6))
    assert lane.bytes_per_ms == pytest.approx(1e6, rel=0.1)


def test_what_was_measured_is_where_learning_starts() -> None:
    speed = CopySpeed("a tier")
    speed.start_from(Link("a tier", 0.2, 0.1, 5e6, 1e6, ranks=2))
    assert speed.out.copy_ms(MEGABYTE) == pytest.approx(0.2 + 2 * MEGABYTE / 5e6)
    assert speed.back_ms(MEGABYTE) == pytest.approx(0.1 + 2 * MEGABYTE / 1e6)


def test_what_training_has_told_in_one_direction_is_not_replaced_by_a_measurement() -> None:
    speed = CopySpeed("a tier")
    for _ in range(30):
        speed.out.note(8 * MEGABYTE, ms_of(8 * MEGABYTE, 2e6))
    speed.start_from(LINK)
    assert speed.out.bytes_per_ms == pytest.approx(2e6, rel=0.05)
    assert speed.back.bytes_per_ms == 1e6


@dataclass
class LateTicket:
    """A copy whose time is known only some time after it was waited for."""

    copy_ms: float | None = None
    error: BaseException | None = None
    moved_bytes: int = 64 * MEGABYTE

    def is_done(self) -> bool:
        return self.copy_ms is not None

    def wait(self) -> float:
        return 0.0


def test_a_copy_that_nobody_waited_for_is_learned_from_when_its_time_is_known() -> None:
    speed = CopySpeed("a tier")
    first, second, failed = LateTicket(), LateTicket(), LateTicket(error=OSError())
    speed.learn(first, 64 * MEGABYTE, outwards=True)
    speed.learn(failed, MEGABYTE, outwards=True)
    assert (speed.out.noted_bytes, speed.back.noted_bytes) == (0, 0)
    first.copy_ms = 10.0
    speed.learn(second, MEGABYTE, outwards=False)
    assert (speed.out.noted_bytes, speed.back.noted_bytes) == (64 * MEGABYTE, 0)
    for _ in range(100):  # those that never end are forgotten
        speed.learn(LateTicket(), MEGABYTE, outwards=False)
    assert len(speed._untimed) < 10


def test_the_store_learns_from_what_copies_take_and_not_from_how_long_they_are_waited_for() -> None:
    tier, speed = ModelledTier(ModelledClock(LINK)), CopySpeed("a modelled tier")
    memory, counters = ModelledMemory(), ModelledCounters()
    store = Store(memory, tier, speed)
    for number in range(30):
        value = Value(number, None, ModelledStorage(memory, 8 * MEGABYTE))
        place = tier.take(value.size_bytes)
        assert place is not None
        store.start_out(value, place, counters)
        tier.clock.compute(100.0)  # it has ended long before somebody waits
        assert store.finish_out(value, counters) == 0.0
        store.drop(value)
        store.start_in(value, counters)
        tier.clock.compute(100.0)
        store.finish_in(value, counters)
    assert speed.out.copy_ms(8 * MEGABYTE) == pytest.approx(LINK.out_ms(8 * MEGABYTE), rel=0.05)
    assert speed.back_ms(8 * MEGABYTE) == pytest.approx(LINK.in_ms(8 * MEGABYTE), rel=0.05)
