"""The catalogue of devices as tables."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from ..devices import DeviceModel
from ..units import format_bytes
from .tables import titled_table

_RATES = ("float32", "tf32", "float16", "bfloat16")


def catalogue_tables(models: Iterable[DeviceModel]) -> list[Table]:
    """Figures of each device, and where they are from."""
    models = list(models)
    table = titled_table("devices to model: peak rates, dense, in TFLOP/s; GB/s of memory, and of the link each way")
    for name in ("name", "memory", *_RATES, "GB/s", "link GB/s", "link"):
        table.add_column(name, justify="left" if name in ("name", "link") else "right", overflow="fold")
    sources = titled_table("where the figures are from")
    for name in ("name", "device", "source", "recalled, not checked"):
        sources.add_column(name, overflow="fold")
    for model in models:
        table.add_row(*_figures(model))
        sources.add_row(model.name, model.title, model.source, ", ".join(model.recalled))
    return [table, sources]


def _figures(model: DeviceModel) -> list[str]:
    link = model.link
    rates = [f"{model.tflops[name]:.4g}" if name in model.tflops else "-" for name in _RATES]
    each_way = dict.fromkeys((f"{link.out_gb_per_s:.4g}", f"{link.in_gb_per_s:.4g}"))
    duplex = "both ways at once" if link.full_duplex else "one way at a time"
    memory = f"{model.memory_gb_per_s:.4g}"
    return [model.name, format_bytes(model.memory_bytes), *rates, memory, "/".join(each_way), f"{link.name}, {duplex}"]
