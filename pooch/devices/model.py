"""A device that need not be here: what a model of a step has to know of it. Frozen data, no torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Literal

from pooch.errors import UsageError
from pooch.ir import Device, Link

OpClass = Literal["matmul", "convolution"]


@dataclass(frozen=True, slots=True)
class LinkModel:
    """The way to host memory: peak rates per direction in GB/s (10^9 bytes), and the fixed cost of one copy in us."""

    name: str
    out_gb_per_s: float
    in_gb_per_s: float
    full_duplex: bool = True
    latency_us: float = 20.0


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What of each peak rate is reached, 0 to 1. `tensor_convolution`: of convolutions on tensor cores (tf32, half
    precision), which are harder to keep busy than plain units.
    """

    matmul: float = 1.0
    convolution: float = 1.0
    tensor_convolution: float = 1.0
    memory: float = 1.0
    link: float = 1.0


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """One device.

    Attributes:
        name: as typed, such as "V100-PCIe". title: for people.
        kind: "cpu", or the type of the accelerator as PyTorch calls it ("cuda").
        memory_bytes: device memory in all.
        tflops: peak rates by type, in 10^12 floating-point operations per second: at least "float32"; "tf32" is
            float32 data on tensor cores.
        memory_gb_per_s: peak bandwidth of its memory, in 10^9 bytes per second.
        link: to host memory.
        efficiency: what of the peaks is reached.
        tensor_cores: whether half precision runs on tensor cores.
        launch_us: time that every op takes at least.
        copy_share: compute work that one ms of copying displaces (0: copy engines do it alone).
        blas_workspace_mib: of a GPU, what cuBLAS takes in each thread that calls it, as PyTorch has it by default:
            8.125, and 32 from Hopper on.
        source: where the figures are from. recalled: those that were not checked when entered.

    Raises:
        UsageError: a figure is missing, not positive, or not finite.
    """

    name: str
    title: str
    kind: str
    memory_bytes: int
    tflops: dict[str, float]
    memory_gb_per_s: float
    link: LinkModel
    efficiency: Efficiency = field(default_factory=Efficiency)
    tensor_cores: bool = True
    launch_us: float = 5.0
    copy_share: float = 0.0
    blas_workspace_mib: float = 8.125
    source: str = ""
    recalled: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.kind.isidentifier():
            raise UsageError(f"device {self.name!r}: its kind is {self.kind!r}: give cpu, or cuda for a GPU")
        if "float32" not in self.tflops:
            raise UsageError(f"device {self.name!r} names no float32 rate: give tflops.float32")
        positive = {
            "memory_bytes": self.memory_bytes,
            "memory_gb_per_s": self.memory_gb_per_s,
            "link.out_gb_per_s": self.link.out_gb_per_s,
            "link.in_gb_per_s": self.link.in_gb_per_s,
            **{f"tflops.{name}": rate for name, rate in self.tflops.items()},
        }
        shares = asdict(self.efficiency)
        other = {
            "launch_us": self.launch_us,
            "copy_share": self.copy_share,
            "link.latency_us": self.link.latency_us,
            "blas_workspace_mib": self.blas_workspace_mib,
        }
        for name, number in {**positive, **shares, **other}.items():
            least_is_zero = name in other
            if not math.isfinite(number) or number < 0 or (number == 0 and not least_is_zero):
                raise UsageError(f"device {self.name!r}: {name} is {number}: give a positive number")
        for name, share in shares.items():
            if share > 1:
                raise UsageError(f"device {self.name!r}: efficiency.{name} is {share}: give at most 1")

    def flops_per_ms(self, dtype: str, op_class: OpClass) -> float:
        """Reached rate, in floating-point operations per ms.

        Args:
            dtype: "float32", "float16", ... A type that the device has no rate for runs as float32.
            op_class: float32 convolutions run as tf32 where the device has it, matrix products do not: so are
                PyTorch's defaults.
        """
        rates = [(dtype if dtype in self.tflops else "float32", self.tensor_cores and dtype in ("float16", "bfloat16"))]
        if op_class == "convolution" and dtype == "float32" and "tf32" in self.tflops:
            rates.append(("tf32", True))  # the library takes the faster algorithm
        return max(self.tflops[name] * self._share(op_class, on_tensor_cores) for name, on_tensor_cores in rates) * 1e9

    def _share(self, op_class: OpClass, on_tensor_cores: bool) -> float:
        if op_class == "matmul":
            return self.efficiency.matmul
        return self.efficiency.tensor_convolution if on_tensor_cores else self.efficiency.convolution

    @property
    def bytes_per_ms(self) -> float:
        """Reached bandwidth of its memory, in bytes per ms."""
        return self.memory_gb_per_s * self.efficiency.memory * 1e6

    def op_ms(self, flops: float, moved_bytes: float, dtype: str, op_class: OpClass) -> float:
        """Roofline: an op lasts as long as its arithmetic or its memory traffic, whichever is longer, and is launched.

        Args:
            flops: floating-point operations. moved_bytes: read and written in device memory.
        """
        arithmetic_ms = flops / self.flops_per_ms(dtype, op_class) if flops else 0.0
        return max(arithmetic_ms, moved_bytes / self.bytes_per_ms) + self.launch_us / 1000

    @property
    def blas_workspace_bytes(self) -> int:
        """What each thread takes that multiplies matrices; nothing on a CPU."""
        return round(self.blas_workspace_mib * 2**20) if self.kind == "cuda" else 0

    def as_device(self, software: dict[str, str]) -> Device:
        """The device as a profile names it, marked as modelled."""
        return Device(self.kind, self.title, self.memory_bytes, True, software)

    def as_link(self) -> Link:
        """The link as a profile names it."""
        out, back = (rate * self.efficiency.link * 1e6 for rate in (self.link.out_gb_per_s, self.link.in_gb_per_s))
        latency_ms = self.link.latency_us / 1000
        tier = f"{'host memory over ' if self.kind != 'cpu' else ''}{self.link.name}, modelled"
        duplex, share = self.link.full_duplex, self.copy_share
        return Link(tier, latency_ms, latency_ms, out, back, duplex, share, share)
