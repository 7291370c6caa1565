"""Measure a device of this machine as a device model, so that steps can be modelled for it without running them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...devices import DeviceModel, Efficiency, LinkModel
from ...ground.progress import Progress, silent

if TYPE_CHECKING:
    import torch

    from ...ir import Link
    from ...profiler.hardware import DeviceRates


def measure_device_model(device: torch.device, name: str, progress: Progress = silent) -> DeviceModel:
    """Measure rates, memory bandwidth and the link of a device; `name` is what a catalogue will call it."""
    from ...profiler.hardware import describe_device, measure_rates
    from ...torchtools.accelerators import has_streams
    from ...torchtools.cuda_only import blas_workspace_bytes
    from ..device_links import measure_device_link

    rates = measure_rates(device, progress)
    progress("measuring the link to the swap tier")
    link = measure_device_link(device)
    here = describe_device(device)
    versions = ", ".join(f"{key} {version}" for key, version in here.software.items())
    tflops, efficiency = _peaks(rates)
    return DeviceModel(
        name=name,
        title=here.name,
        kind=here.kind,
        memory_bytes=here.memory_bytes,
        tflops=tflops,
        memory_gb_per_s=rates.memory_gb_per_s,
        link=_link_model(link),
        efficiency=efficiency,
        tensor_cores=has_streams(device),
        launch_us=rates.launch_us,
        blas_workspace_mib=blas_workspace_bytes(device) / 2**20,
        copy_share=max(link.out_compute_share, link.in_compute_share),
        source=f"measured here ({versions})",
    )


def _peaks(rates: DeviceRates) -> tuple[dict[str, float], Efficiency]:
    """One peak rate per type, and the share of it that matrix products and convolutions reach."""
    matmul, convolution = rates.matmul_tflops["float32"], rates.convolution_tflops["float32"]
    peak = max(matmul, convolution)
    reduced = [name for name in rates.matmul_tflops if name != "float32"]
    half = max(reduced, key=rates.matmul_tflops.__getitem__, default="")
    tensor = min(1.0, rates.convolution_tflops[half] / rates.matmul_tflops[half]) if half else 1.0
    efficiency = Efficiency(matmul / peak, convolution / peak, tensor, 1.0, 1.0)
    tflops = {name: rate / efficiency.matmul for name, rate in rates.matmul_tflops.items()}
    if rates.tf32_convolution_tflops:
        tflops["tf32"] = rates.tf32_convolution_tflops / tensor
    return tflops, efficiency


def _link_model(link: Link) -> LinkModel:
    latency_us = 1000 * max(link.out_latency_ms, link.in_latency_ms)
    return LinkModel(link.tier, link.out_bytes_per_ms / 1e6, link.in_bytes_per_ms / 1e6, link.full_duplex, latency_us)
