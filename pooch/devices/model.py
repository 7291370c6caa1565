"""Device models: what modelling a step needs to know about a device. No torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Literal

from ..ground.errors import UsageError
from ..ir import Device, Link

OpKind = Literal["matmul", "convolution"]
_MOST_BYTES = 2**53  # 8 PiB; files give memory in GiB, which is exact up to there
_LEAST, _MOST = 1e-6, 1e12  # of other figures: with these, no time is infinite


@dataclass(frozen=True, slots=True)
class LinkModel:
    """The link to host memory.

    Attributes:
        name: such as "PCIe 3.0 x16".
        out_gb_per_s: peak rate to the host, in 10^9 bytes per second.
        in_gb_per_s: peak rate from the host.
        full_duplex: whether both directions run at once at full rate.
        latency_us: fixed cost of one copy.
    """

    name: str
    out_gb_per_s: float
    in_gb_per_s: float
    full_duplex: bool = True
    latency_us: float = 20.0


@dataclass(frozen=True, slots=True)
class PeersModel:
    """The link between several of these devices in one machine.

    Attributes:
        name: such as "NVLink 4".
        gb_per_s: peak rate at which a device sends, and receives at the same time, in 10^9 bytes per second.
        latency_us: fixed cost of one collective.
    """

    name: str
    gb_per_s: float
    latency_us: float = 20.0


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Share of each peak rate that is reached, from 0 to 1.

    Attributes:
        matmul: of matrix products.
        convolution: of convolutions without tensor cores.
        tensor_convolution: of convolutions on tensor cores (tf32, half precision), which are harder to keep busy.
        memory: of the memory bandwidth.
        link: of the link to host memory, and of that between devices.
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
        name: such as "V100-PCIe".
        title: name for the reader.
        kind: "cpu", or the type of the accelerator as PyTorch calls it ("cuda").
        memory_bytes: total device memory.
        tflops: peak rates by type in 10^12 floating-point operations per second, at least for "float32"; "tf32" is
            float32 data on tensor cores.
        memory_gb_per_s: peak memory bandwidth in 10^9 bytes per second.
        link: to host memory.
        efficiency: share of the peak rates that is reached.
        tensor_cores: whether half precision runs on tensor cores.
        launch_us: minimum time of an op.
        copy_share: compute time in ms that 1 ms of copying displaces (0: free overlap).
        blas_workspace_mib: memory that cuBLAS takes in each thread that uses it, with PyTorch's defaults: 8.125, and 32
            from Hopper on.
        peers: link between several of these devices, or None if it depends on the machine.
        source: of the figures.
        recalled: figures that were not checked against a source.

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
    peers: PeersModel | None = None
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
            **({} if self.peers is None else {"peers.gb_per_s": self.peers.gb_per_s}),
            **{f"tflops.{name}": rate for name, rate in self.tflops.items()},
        }
        shares = asdict(self.efficiency)
        other = {
            "launch_us": self.launch_us,
            "copy_share": self.copy_share,
            "link.latency_us": self.link.latency_us,
            "blas_workspace_mib": self.blas_workspace_mib,
            **({} if self.peers is None else {"peers.latency_us": self.peers.latency_us}),
        }
        for name, number in {**positive, **shares, **other}.items():
            least_is_zero = name in other
            if not math.isfinite(number) or number < 0 or (number == 0 and not least_is_zero):
                raise UsageError(f"device {self.name!r}: {name} is {number}: give a positive number")
            if name != "memory_bytes" and not (_LEAST <= number <= _MOST or number == 0):
                raise UsageError(f"device {self.name!r}: {name} is {number}: give {_LEAST:g} to {_MOST:g}")
        if self.memory_bytes > _MOST_BYTES:
            raise UsageError(f"device {self.name!r}: memory_bytes is {self.memory_bytes}: give at most 8 PiB")
        for name, share in shares.items():
            if share > 1:
                raise UsageError(f"device {self.name!r}: efficiency.{name} is {share}: give at most 1")

    def flops_per_ms(self, dtype: str, op_kind: OpKind) -> float:
        """Reached rate in floating-point operations per ms; a dtype without a rate runs as float32.

        By PyTorch's defaults, float32 convolutions run as tf32 if the device has it, and matrix products do not.
        """
        rates = [(dtype if dtype in self.tflops else "float32", self.tensor_cores and dtype in ("float16", "bfloat16"))]
        if op_kind == "convolution" and dtype == "float32" and "tf32" in self.tflops:
            rates.append(("tf32", True))  # the library uses the faster algorithm
        return max(self.tflops[name] * self._share(op_kind, on_tensor_cores) for name, on_tensor_cores in rates) * 1e9

    def _share(self, op_kind: OpKind, on_tensor_cores: bool) -> float:
        if op_kind == "matmul":
            return self.efficiency.matmul
        return self.efficiency.tensor_convolution if on_tensor_cores else self.efficiency.convolution

    @property
    def bytes_per_ms(self) -> float:
        """Reached memory bandwidth in bytes per ms."""
        return self.memory_gb_per_s * self.efficiency.memory * 1e6

    def op_ms(self, flops: float, moved_bytes: float, dtype: str, op_kind: OpKind) -> float:
        """Roofline: the time of the arithmetic or of the memory traffic, whichever is longer, plus the launch."""
        arithmetic_ms = flops / self.flops_per_ms(dtype, op_kind) if flops else 0.0
        return max(arithmetic_ms, moved_bytes / self.bytes_per_ms) + self.launch_us / 1000

    @property
    def blas_workspace_bytes(self) -> int:
        """Bytes that cuBLAS takes in each thread that multiplies matrices; 0 on a CPU."""
        return round(self.blas_workspace_mib * 2**20) if self.kind != "cpu" else 0

    def as_device(self, software: dict[str, str]) -> Device:
        """The device of a profile, marked as modelled."""
        return Device(self.kind, self.title, self.memory_bytes, True, software)

    def as_link(self) -> Link:
        """The link of a profile."""
        out, back = (rate * self.efficiency.link * 1e6 for rate in (self.link.out_gb_per_s, self.link.in_gb_per_s))
        latency_ms = self.link.latency_us / 1000
        tier = f"{'host memory over ' if self.kind != 'cpu' else ''}{self.link.name}, modelled"
        duplex, share = self.link.full_duplex, self.copy_share
        return Link(tier, latency_ms, latency_ms, out, back, duplex, share, share)
