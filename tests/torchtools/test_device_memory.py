"""What a device has left, how running out is recognised, and that a failed attempt leaves nothing behind."""

from __future__ import annotations

import errno
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from pooch.ground import process_limits
from pooch.ground.process_limits import is_limited
from pooch.torchtools.device_memory import free_bytes
from pooch.torchtools.out_of_memory import forgotten, is_out_of_memory
from tests.children import child_environment

MIB = 2**20

SAID = [
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("could not create a primitive"),
    RuntimeError("could not create a memory object"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("Intel oneMKL DFTI ERROR: Memory allocation failed"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("can't start new thread"),
    torch.OutOfMemoryError("CUDA out of memory."),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]

OTHERS = [
    RuntimeError("could not create a primitive descriptor for a convolution forward propagation primitive"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("unsupported memory format option Preserve"),
    OSError(errno.ENOSPC, "No space left on device"),
    ValueError("out of memory"),
]


@pytest.mark.parametrize("error", SAID, ids=str)
def test_every_form_in_which_memory_runs_out_is_recognised(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_other_errors_are_not_taken_for_it(error: BaseException) -> None:
    assert not is_out_of_memory(error)


@pytest.mark.parametrize("chained", [False, True])
def test_a_forgotten_error_holds_nothing_of_the_failed_attempt(chained: bool) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def attempt() -> None:
        activation = torch.ones(1000)
        held.append(weakref.ref(activation))
        try:
            raise MemoryError
        except MemoryError as error:
            if chained:
                raise RuntimeError("std::bad_alloc") from error
            raise

    with pytest.raises((MemoryError, RuntimeError)) as caught:
        attempt()
    error = caught.value
    del caught
    assert held[0]() is not None
    forgotten(error)
    assert held[0]() is None


CHILD = """
import resource
import torch
from pooch.ground.process_limits import is_limited
from pooch.torchtools.device_memory import free_bytes
from pooch.torchtools.malloc import return_large_blocks
device = torch.device("cpu")
assert not is_limited()
return_large_blocks()
data = int(next(l.split()[1] for l in open("/proc/self/status") if l.startswith("VmData"))) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (data + 200 * 2**20, -1))
assert is_limited()
before = free_bytes(device)
held = torch.empty(64 * 2**20, dtype=torch.uint8)
after = free_bytes(device)
del held
again = free_bytes(device)
try:
    torch.empty(before + 2**20, dtype=torch.uint8)
    print("it fitted")
except RuntimeError:
    print(before // 2**20, (before - after) // 2**20, (before - again) // 2**20)
"""


def test_a_limit_of_the_process_is_what_is_left_and_freed_blocks_come_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, check=False, timeout=120, env=child_environment()
    )
    assert done.returncode == 0, done.stderr
    left, taken, kept = map(int, done.stdout.split())
    assert 190 <= left <= 200
    assert 64 <= taken <= 66
    assert kept <= 1


def test_without_a_limit_the_machine_says_what_is_left() -> None:
    assert not is_limited()
    assert free_bytes(torch.device("cpu")) > 100 * MIB


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ("0::/job/part", [300, 1050]),
        ("5:cpu,memory:/job\n4:pids:/\n0::/", [2550]),
        ("5:memory:/not/in/this/container", []),
        ("4:pids:/job", []),
    ],
)
def test_control_groups_of_both_versions_say_what_is_left(
    own: str, expected: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = tmp_path / "cgroup"
    group(root / "job/part", memory__max=1000, memory__current=800, memory__stat="anon 1\ninactive_file 100")
    group(root / "job", memory__max=2000, memory__current=1000, memory__stat="inactive_file 50")
    group(root, memory__max="max", memory__current=5, memory__stat="")
    job, no_limit = root / "memory/job", 9223372036854771712
    stat = "cache 7\ntotal_inactive_file 50"
    group(job, memory__limit_in_bytes=3000, memory__usage_in_bytes=500, memory__stat=stat)
    group(root / "memory", memory__limit_in_bytes=no_limit, memory__usage_in_bytes=5, memory__stat=stat)
    (tmp_path / "own").write_text(own + "\n")
    monkeypatch.setattr(process_limits, "_CGROUP", root)
    monkeypatch.setattr(process_limits, "_OWN_GROUPS", tmp_path / "own")
    assert process_limits.left_by_control_groups() == expected
