"""The CUDA arena's functions, and how PyTorch is told to use them.

PyTorch takes another allocator only before it has allocated anything on a GPU, and then for the whole process. Under
it, `torch.cuda.memory_allocated` and its relatives raise or return 0 (pytorch issues 98481 and 140687), and torch's
profiler hears of no memory. So bytes are counted here, and `accelerators` asks here; and the profiler is told here.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import numpy as np
import torch

from ...ground import native
from ...ground.errors import UsageError
from .. import accelerators
from ..cpu_allocator.arena import ALL, ArenaCalls, Integers
from ..cuda_only import AllocatorFunctions, install_allocator

SOURCE = Path(__file__).with_name("cuda_arena.cpp")
HEADERS = (Path(__file__).parents[1] / "placement.h",)
RUNTIME_NAMES = (
    "cudaMalloc", "cudaFree", "cudaEventCreateWithFlags", "cudaEventRecord", "cudaStreamWaitEvent", "cudaEventDestroy",
    "cudaSetDevice", "cudaGetDevice", "cudaGetLastError", "cudaMemGetInfo",
)  # fmt: skip
PROFILER_REPORT = "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE"  # of libc10, in every PyTorch since 1.6
_INT, _POINTER, _I64 = ctypes.c_int, ctypes.c_void_p, ctypes.c_int64
_OUT = ctypes.POINTER(ctypes.c_void_p)
_LONGS = np.ctypeslib.ndpointer(np.int64, flags="C_CONTIGUOUS")


class DeviceFunctions(ctypes.Structure):
    """The functions of a CUDA runtime that the allocator calls, in the order of `RUNTIME_NAMES`."""

    _fields_ = (
        ("malloc", ctypes.CFUNCTYPE(_INT, _OUT, ctypes.c_size_t)),
        ("free", ctypes.CFUNCTYPE(_INT, _POINTER)),
        ("create_event", ctypes.CFUNCTYPE(_INT, _OUT, ctypes.c_uint)),
        ("record_event", ctypes.CFUNCTYPE(_INT, _POINTER, _POINTER)),
        ("wait_event", ctypes.CFUNCTYPE(_INT, _POINTER, _POINTER, ctypes.c_uint)),
        ("destroy_event", ctypes.CFUNCTYPE(_INT, _POINTER)),
        ("set_device", ctypes.CFUNCTYPE(_INT, _INT)),
        ("get_device", ctypes.CFUNCTYPE(_INT, ctypes.POINTER(_INT))),
        ("get_last_error", ctypes.CFUNCTYPE(_INT)),
        ("memory_info", ctypes.CFUNCTYPE(_INT, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t))),
    )

    @classmethod
    def of_runtime(cls, library: ctypes.CDLL) -> DeviceFunctions:
        """Return the functions of a CUDA runtime."""
        pairs = zip(cls._fields_, RUNTIME_NAMES, strict=True)
        return cls(*(kind((name, library)) for (_, kind), name in pairs))


_SIGNATURES: native.Signatures = {
    "try_alloc": ([ctypes.c_ssize_t, _INT, _POINTER], _POINTER),
    "free": ([_POINTER, ctypes.c_ssize_t, _INT, _POINTER], None),
    "record_stream": ([_POINTER, _POINTER], None),
    "set_functions": ([ctypes.POINTER(DeviceFunctions)], None),
    "record": ([_INT, _POINTER], None),
    "recorded": ([], _I64),
    "requests": ([], _I64),
    "read": ([_LONGS, _LONGS], None),
    "serve": ([_INT, _POINTER, _I64, _LONGS, _LONGS, _LONGS, _I64], _INT),
    "begin_step": ([_POINTER, _I64, _I64], _INT),
    "stop": ([], None),
    "counters": ([_LONGS], None),
    "bytes": ([_INT, _LONGS], None),
    "reset_peaks": ([_INT], None),
    "empty_pool": ([_INT], None),
    "empty_pools": ([], None),
    "limit": ([ctypes.c_double, _INT], None),
    "refuse_graphs": ([], None),
    "report_to": ([_POINTER], None),
}


@dataclass(frozen=True, slots=True)
class CudaBytes:
    """What the allocator counts on one device; each peak is the highest figure since `reset_peaks`.

    Attributes:
        requested: bytes that live tensors asked for.
        peak_requested: their peak.
        allocated: the same, each block rounded up to the allocator's granularity.
        peak_allocated: their peak.
        blocks: number of live blocks.
        peak_blocks: their peak.
        reserved: bytes taken from the device.
        peak_reserved: their peak.
    """

    requested: int
    peak_requested: int
    allocated: int
    peak_allocated: int
    blocks: int
    peak_blocks: int
    reserved: int
    peak_reserved: int

    def by_name(self) -> dict[str, int]:
        """By PyTorch's names; no block is left whole here, so all count as small ones."""
        names = ("requested_bytes.all", "allocated_bytes.all", "allocation.small_pool", "reserved_bytes.all")
        figures = (getattr(self, each.name) for each in fields(self))
        return dict(zip((f"{name}.{when}" for name in names for when in ("current", "peak")), figures, strict=True))


class CudaArena(ArenaCalls):
    """The compiled allocator. There is one for the process: see `cuda_arena`.

    Args:
        path: of the compiled library.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(native.bound_functions(ctypes.CDLL(str(path)), "pooch_cuda", _SIGNATURES))
        self._device_functions: DeviceFunctions | None = None

    def use(self, functions: DeviceFunctions) -> None:
        """Set the functions of the runtime. They must not change while anything is allocated."""
        self.functions["set_functions"](ctypes.byref(functions))
        self._device_functions = functions

    def install(self) -> None:
        """Make it PyTorch's CUDA allocator, for good. Once is enough; a second call does nothing.

        Raises:
            UsageError: PyTorch has allocated on a GPU already, or its CUDA runtime is not found.
        """
        if installed_arena() is self:
            return
        self.use(DeviceFunctions.of_runtime(_loaded_runtime()))
        functions = AllocatorFunctions(
            "pooch_cuda_alloc", "pooch_cuda_free",
            *(self._address(name) for name in ("record_stream", "empty_pools", "limit", "refuse_graphs")),
        )  # fmt: skip
        try:
            device_type = install_allocator(str(self.path), functions)
        except RuntimeError as error:
            raise UsageError(
                "the CUDA allocator can only be chosen before anything is allocated on a GPU: do it at the beginning"
            ) from error
        report = _profiler_report()
        self.functions["report_to"](report)
        accelerators.count_memory_with(device_type, self, tells_profiler=report is not None)
        _INSTALLED.append(self)

    def _address(self, name: str) -> int:
        address = ctypes.cast(self.functions[name], ctypes.c_void_p).value
        assert address is not None
        return address

    def alloc(self, size: int, device: int, stream: int) -> int:
        """Allocate as PyTorch does; 0 if there is no memory, for which PyTorch itself gets an exception."""
        return self.functions["try_alloc"](size, device, stream) or 0

    def free(self, pointer: int, size: int, device: int, stream: int) -> None:
        """Free as PyTorch does."""
        self.functions["free"](pointer, size, device, stream)

    def record_stream(self, pointer: int, stream: int) -> None:
        """Note that a stream uses a block, as `tensor.record_stream` does."""
        self.functions["record_stream"](pointer, stream)

    def record(self, device: int, stream: int) -> None:
        """Begin to record the requests on a stream. An arena that serves is taken off."""
        self.functions["record"](device, stream)

    def serve(
        self, device: int, stream: int, sizes: Integers, offsets: Integers, rooms: Integers, arena_bytes: int
    ) -> bool:
        """Serve the requests on a stream from a new arena, see `ArenaFunctions.serve`; `begin_step` comes next."""
        whole = [np.ascontiguousarray(each, dtype=np.int64) for each in (sizes, offsets, rooms)]
        return bool(self.functions["serve"](device, stream, len(whole[0]), *whole, arena_bytes))

    def begin_step(self, stream: int, first: int = 0, end: int = ALL) -> bool:
        """Begin a step on a stream, see `ArenaFunctions.begin_step`.

        Returns:
            False if it cannot be ordered after the last one, on another stream.
        """
        return bool(self.functions["begin_step"](stream, first, end))

    def bytes(self, device: int) -> CudaBytes:
        """What is counted on a device."""
        found = np.zeros(len(fields(CudaBytes)), dtype=np.int64)
        self.functions["bytes"](device, found)
        return CudaBytes(*found.tolist())

    def memory_counters(self, device: int) -> dict[str, int]:
        """`bytes` by PyTorch's names."""
        return self.bytes(device).by_name()

    def reset_peaks(self, device: int) -> None:
        """Let the peaks of a device begin at the present figures."""
        self.functions["reset_peaks"](device)

    def limit(self, share: float, device: int) -> None:
        """Limit what is reserved to a share of a device's memory."""
        self.functions["limit"](share, device)

    def empty_pool(self, device: int) -> None:
        """Give the blocks that are kept for later back to a device."""
        self.functions["empty_pool"](device)


_INSTALLED: list[CudaArena] = []


def installed_arena() -> CudaArena | None:
    """Return the allocator that PyTorch uses for CUDA in this process; None: its own."""
    return _INSTALLED[0] if _INSTALLED else None


@cache
def cuda_arena() -> CudaArena | str:
    """Return the process's CUDA arena, not installed yet, or in a few words why there is none."""
    try:
        return CudaArena(built_library())
    except (native.BuildError, OSError, AttributeError) as error:
        return str(error)


def built_library() -> Path:
    """Return the compiled allocator. It links against nothing but the C++ library.

    Raises:
        BuildError: there is no compiler, or it fails.
    """
    return native.built_library("cuda_arena", SOURCE, headers=HEADERS)


def _loaded_runtime() -> ctypes.CDLL:
    """The CUDA runtime that PyTorch has loaded. Initialising CUDA would already choose the allocator."""
    loaded = ctypes.CDLL(None)
    if not hasattr(loaded, RUNTIME_NAMES[0]):
        raise UsageError("no CUDA runtime is loaded: this PyTorch was built without CUDA")
    return loaded


def _profiler_report() -> ctypes.c_void_p | None:
    """PyTorch's function that tells its profiler of memory, or None if this PyTorch has it under another name."""
    try:
        function = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))[PROFILER_REPORT]
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p)
