"""The catalogue of devices as tables."""

from __future__ import annotations

from collections.abc import Iterable

from ..devices import DeviceModel
from ..ground.units import format_bytes
from .fitting import Column, FittedTable

_RATES = ("float32", "tf32", "float16", "bfloat16")


def catalogue_tables(models: Iterable[DeviceModel]) -> list[FittedTable]:
    """Figures of each device, and where they are from."""
    models = list(models)
    title = "devices to model: peak rates, dense, in TFLOP/s; GB/s of memory, and of the link each way"
    rates = [Column(name, drop=2 if name in ("tf32", "float16") else 0) for name in _RATES]
    others = [Column("GB/s"), Column("link GB/s"), Column("link", "text", drop=1)]
    table = FittedTable(title, [Column("name", "word"), Column("memory"), *rates, *others])
    names = ("device", "source", "recalled, not checked")
    sources = FittedTable(
        "where the figures are from", [Column("name", "word"), *(Column(each, "text") for each in names)]
    )
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
