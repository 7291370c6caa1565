"""All kinds of files, by name. A kind is imported when it is asked for: that of ONNX files takes long."""

from __future__ import annotations

from importlib import import_module

from benchmarks.fuzz_files.judging import Kind

_PLACES = {
    "profile": ("documents", "PROFILES"),
    "plan": ("documents", "PLANS"),
    "cache": ("caches", "CACHES"),
    "packing": ("tables", "PACKING"),
    "devices": ("tables", "CATALOGUES"),
    "onnx": ("onnx_models", "MODELS"),
}
KINDS = tuple(_PLACES)


def kind_of(name: str) -> Kind:
    """Return a kind.

    Args:
        name: One of `KINDS`.
    """
    module, attribute = _PLACES[name]
    found: Kind = getattr(import_module(f"benchmarks.fuzz_files.{module}"), attribute)
    return found
