"""The CUDA arena's functions, and how PyTorch is told to use them.

PyTorch takes another allocator only before it has allocated anything on a GPU, and then for the whole process. Under
it, `torch.cuda.memory_allocated` and its relatives are missing (pytorch issues 98481 and 140687), so bytes are counted
here.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import numpy as np

from ... import native
from ...errors import UsageError
from ..cpu_allocator.arena import ArenaCalls, Integers
from ..cuda_only import install_allocator

SOURCE = Path(__file__).with_name("cuda_arena.cpp")
HEADERS = (Path(__file__).parents[1] / "placement.h",)
RUNTIME_NAMES = (
    "cudaMalloc", "cudaFree", "cudaEventCreateWithFlags", "cudaEventRecord", "cudaStreamWaitEvent", "cudaEventDestroy",
    "cudaSetDevice", "cudaGetDevice", "cudaGetLastError",
)  # fmt: skip
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
    "read": ([_LONGS, _LONGS], None),
    "serve": ([_INT, _POINTER, _I64, _LONGS, _LONGS, _LONGS, _I64], _INT),
    "begin_step": ([_POINTER], _INT),
    "stop": ([], None),
    "counters": ([_LONGS], None),
    "bytes": ([_LONGS], None),
    "reset_peaks": ([], None),
    "empty_pool": ([_INT], None),
}


@dataclass(frozen=True, slots=True)
class CudaBytes:
    """Bytes that the allocator counts.

    Attributes:
        live: that tensors asked for, now.
        peak: their highest number since `reset_peaks`.
        reserved: taken from the device, now.
        peak_reserved: their highest number since `reset_peaks`.
    """

    live: int
    peak: int
    reserved: int
    peak_reserved: int


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
        self._functions["set_functions"](ctypes.byref(functions))
        self._device_functions = functions

    def install(self) -> None:
        """Make it PyTorch's CUDA allocator, for good.

        Raises:
            UsageError: PyTorch has allocated on a GPU already, or its CUDA runtime is not found.
        """
        self.use(DeviceFunctions.of_runtime(_loaded_runtime()))
        address = ctypes.cast(self._functions["record_stream"], ctypes.c_void_p).value
        assert address is not None
        try:
            install_allocator(str(self.path), "pooch_cuda_alloc", "pooch_cuda_free", address)
        except RuntimeError as error:
            raise UsageError(
                "the CUDA allocator can only be chosen before anything is allocated on a GPU: do it at the beginning"
            ) from error

    def alloc(self, size: int, device: int, stream: int) -> int:
        """Allocate as PyTorch does; 0 if there is no memory, for which PyTorch itself gets an exception."""
        return self._functions["try_alloc"](size, device, stream) or 0

    def free(self, pointer: int, size: int, device: int, stream: int) -> None:
        """Free as PyTorch does."""
        self._functions["free"](pointer, size, device, stream)

    def record_stream(self, pointer: int, stream: int) -> None:
        """Note that a stream uses a block, as `tensor.record_stream` does."""
        self._functions["record_stream"](pointer, stream)

    def record(self, device: int, stream: int) -> None:
        """Begin to record the requests on a stream. An arena that serves is taken off."""
        self._functions["record"](device, stream)

    def serve(
        self, device: int, stream: int, sizes: Integers, offsets: Integers, rooms: Integers, arena_bytes: int
    ) -> bool:
        """Serve the requests on a stream from a new arena, see `ArenaFunctions.serve`; `begin_step` comes next."""
        whole = [np.ascontiguousarray(each, dtype=np.int64) for each in (sizes, offsets, rooms)]
        return bool(self._functions["serve"](device, stream, len(whole[0]), *whole, arena_bytes))

    def begin_step(self, stream: int) -> bool:
        """Begin a step on a stream. False if it cannot be ordered after the last one, on another stream."""
        return bool(self._functions["begin_step"](stream))

    def bytes(self) -> CudaBytes:
        """Live and reserved bytes of all devices."""
        found = np.zeros(len(fields(CudaBytes)), dtype=np.int64)
        self._functions["bytes"](found)
        return CudaBytes(*found.tolist())

    def reset_peaks(self) -> None:
        """Let the peaks begin at the present figures."""
        self._functions["reset_peaks"]()

    def empty_pool(self, device: int) -> None:
        """Give the blocks that are kept for later back to the device."""
        self._functions["empty_pool"](device)


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
