"""What ONNX support adds to Pooch: `model.onnx` as a workload, and export to ONNX."""

from __future__ import annotations

from ..ground.plugins import Plugin, Provided

PLUGIN = Plugin(
    workload_files={".onnx": Provided(f"{__package__}.file", "onnx_function")},
    exporters={".onnx": Provided(f"{__package__}.exporting", "onnx_exporter")},
)
