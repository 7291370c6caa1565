"""Small ONNX files, made here, and what onnxruntime computes from them."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

OPSET = 20
Arrays = Mapping[str, numpy.ndarray[Any, Any]]


def save_graph(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Arrays,
    weights: Arrays,
    outputs: Sequence[str],
    opset: int = OPSET,
) -> Path:
    """A file of the nodes; inputs have the types and shapes of the arrays."""
    values = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in inputs.items()
    ]
    stored = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    made = [onnx.ValueInfoProto(name=name) for name in outputs]  # inference finds out the types
    graph = helper.make_graph(list(nodes), "graph", values, made, stored)
    version = helper.find_min_ir_version_for([helper.make_opsetid("", opset)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=version)
    model = onnx.shape_inference.infer_shapes(model)
    for output in model.graph.output:
        if not output.type.tensor_type.HasField("shape"):  # of a few operators inference knows the type alone
            first = next(iter(inputs.values()))
            output.CopyFrom(helper.make_tensor_value_info(output.name, TensorProto.FLOAT, first.shape))
    path.write_bytes(model.SerializeToString())
    return path


def run_onnxruntime(path: Path, inputs: Arrays) -> list[torch.Tensor]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return [torch.as_tensor(each) for each in session.run(None, dict(inputs))]


def export(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], path: Path, *, dynamo: bool = True, **options: Any
) -> Path:
    """PyTorch's own exporters, quietly: the newer one (dynamo) or the older one."""
    logging.disable(logging.WARNING)
    given = {"verbose": False, "external_data": False} if dynamo else {}
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(model, inputs, str(path), dynamo=dynamo, **given, **options)
    finally:
        logging.disable(logging.NOTSET)
    return path
