"""What a device is, asked through one facade: the CPU has no streams, and a GPU answers as its own module does."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from pooch.errors import UsageError
from pooch.executor.engines import make_engine
from pooch.torchtools import accelerators, cuda_only
from pooch.torchtools.accelerators import current_stream, on_stream

CPU = torch.device("cpu")
on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
gpu = pytest.mark.parametrize("device", [pytest.param(torch.device("cuda", 0), marks=on_a_gpu, id="cuda")])


@pytest.mark.parametrize(
    ("kind", "expected"), [("cpu", False), ("meta", False), ("mps", False), ("cuda", True), ("xpu", True)]
)
def test_devices_with_streams_are_told_by_what_pytorch_has_for_them(kind: str, expected: bool) -> None:
    """Metal computes beside the host too, but PyTorch gives nobody its streams."""
    assert accelerators.has_streams(torch.device(kind)) == expected


def test_a_device_that_is_neither_is_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match=r"type 'mps'.*: move the model to the CPU") as caught:
        make_engine(torch.device("mps"))
    assert "\n" not in str(caught.value)


def test_a_cpu_needs_no_accelerator_for_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object) -> None:
        raise AssertionError("PyTorch's accelerator was asked")

    for name in ("synchronize", "empty_cache", "current_stream", "current_device_index"):
        monkeypatch.setattr(torch.accelerator, name, asked)
    accelerators.synchronize(CPU)
    accelerators.empty_cache(CPU)
    assert not accelerators.is_in_use(CPU)
    assert accelerators.is_available("cpu")
    assert accelerators.current_device("cpu") == CPU
    assert accelerators.granule_bytes("cpu") == 1
    assert cuda_only.versions(CPU) == {}
    assert not cuda_only.chooses_algorithms_by_timing(CPU)


@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda", 0), marks=on_a_gpu)], ids=str)
def test_a_random_state_is_put_back(device: torch.device) -> None:
    state = accelerators.random_state(device)
    first = torch.rand(8, device=device)
    assert accelerators.random_state(device) != state
    accelerators.set_random_state(device, state)
    assert torch.equal(first.cpu(), torch.rand(8, device=device).cpu())


def test_the_memory_of_a_device_without_a_limit_is_refused() -> None:
    with pytest.raises(RuntimeError, match="type xpu cannot be limited"):
        cuda_only.limit_memory(torch.device("xpu"), 0.5)


@gpu
def test_counters_are_those_of_the_device(device: torch.device) -> None:
    accelerators.empty_cache(device)
    before = accelerators.allocated_bytes(device)
    available = accelerators.available_bytes(device)
    accelerators.reset_peaks(device)
    value = torch.ones(2**20, device=device)
    assert accelerators.allocated_bytes(device) - before == value.nbytes
    assert available - accelerators.available_bytes(device) >= value.nbytes
    del value
    assert accelerators.allocated_bytes(device) == before == torch.cuda.memory_allocated(device)
    assert accelerators.peak_allocated_bytes(device) == before + 4 * 2**20
    # Since the peaks were reset, which the program's own counters do not see.
    reserved = torch.cuda.memory_reserved(device)
    assert reserved <= accelerators.peak_reserved_bytes(device) <= torch.cuda.max_memory_reserved(device)
    assert accelerators.total_bytes(device) == torch.cuda.get_device_properties(device).total_memory
    assert accelerators.name_of(device) == torch.cuda.get_device_name(device)
    assert device in accelerators.all_accelerators()
    assert device in accelerators.accelerators_in_use()
    assert accelerators.current_device("cuda") == device
    assert accelerators.granule_bytes("cuda") == 512
    assert set(cuda_only.versions(device)) == {"cuda"}


@gpu
def test_a_stream_is_current_inside_and_not_after(device: torch.device) -> None:
    before, other = current_stream(device), accelerators.new_stream(device)
    with on_stream(other):
        assert current_stream(device).stream_id == other.stream_id == torch.cuda.current_stream(device).stream_id
        with on_stream(before):
            assert current_stream(device) == before
        assert current_stream(device) == other
    with pytest.raises(ValueError, match="inside"), on_stream(other):
        raise ValueError("inside")
    assert current_stream(device) == before


@gpu
def test_threads_enter_the_same_stream_at_the_same_time(device: torch.device) -> None:
    """Two steps may copy at once, each beside a stream of its own, to which its thread returns."""
    shared, together, failed = accelerators.new_stream(device), threading.Barrier(2, timeout=60), []

    def enter(own: torch.Stream, leaves_first: bool) -> None:
        try:
            with on_stream(own):
                if not leaves_first:
                    together.wait()  # the other one is inside
                with on_stream(shared):
                    if leaves_first:
                        together.wait()
                    together.wait()  # both are inside
                    assert current_stream(device) == shared
                    if not leaves_first:
                        together.wait()  # the other one has left
                if leaves_first:
                    together.wait()
                assert current_stream(device) == own
        except Exception as error:  # noqa: BLE001
            failed.append(error)

    threads = [threading.Thread(target=enter, args=(accelerators.new_stream(device), first)) for first in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_a_stream_of_another_device_leaves_the_current_device() -> None:
    there = torch.device("cuda", 1)
    stream = accelerators.new_stream(there)
    with on_stream(stream):
        assert torch.ones(1, device=there).device == there
    assert torch.cuda.current_device() == 0
    assert current_stream(there) != stream


@gpu
def test_events_tell_the_time_between_them(device: torch.device) -> None:
    stream = current_stream(device)
    begin, end = (accelerators.new_event(device, timed=True) for _ in range(2))
    begin.record(stream)
    torch.cuda._sleep(10**6)
    end.record(stream)
    end.synchronize()
    assert begin.elapsed_time(end) > 0


@gpu
def test_asking_for_the_stream_makes_no_object_of_python(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for each op; `torch.cuda.Stream` is a class of Python's, made anew by each `current_stream`."""
    made: list[Callable[..., object]] = []
    new = torch.cuda.Stream.__new__

    def noted(cls: type, *given: object, **named: object) -> object:
        made.append(cls)
        return new(cls, *given, **named)

    monkeypatch.setattr(torch.cuda.Stream, "__new__", noted)
    torch.cuda.current_stream(device)
    assert len(made) == 1
    current_stream(device)
    assert len(made) == 1
