"""Converts types and tensors of ONNX to PyTorch."""

from __future__ import annotations

from typing import Any

import onnx
import torch

from .registry import UnsupportedVariant

_TYPES: dict[int, torch.dtype] = {
    onnx.TensorProto.FLOAT: torch.float32,
    onnx.TensorProto.DOUBLE: torch.float64,
    onnx.TensorProto.FLOAT16: torch.float16,
    onnx.TensorProto.BFLOAT16: torch.bfloat16,
    onnx.TensorProto.INT64: torch.int64,
    onnx.TensorProto.INT32: torch.int32,
    onnx.TensorProto.INT16: torch.int16,
    onnx.TensorProto.INT8: torch.int8,
    onnx.TensorProto.UINT8: torch.uint8,
    onnx.TensorProto.BOOL: torch.bool,
}


def torch_type(code: int) -> torch.dtype:
    """Return the PyTorch type for an ONNX type code.

    Raises:
        UnsupportedVariant: there is none that can be trained.
    """
    if code not in _TYPES:
        name = onnx.TensorProto.DataType.Name(code) if code in onnx.TensorProto.DataType.values() else str(code)
        raise UnsupportedVariant(f"tensors of type {name}")
    return _TYPES[code]


def tensor_of(stored: onnx.TensorProto) -> torch.Tensor:
    """Convert a tensor of the file to a PyTorch tensor.

    Raises:
        UnsupportedVariant: its type cannot be trained.
    """
    dtype = torch_type(stored.data_type)
    array: Any = onnx.numpy_helper.to_array(stored)
    if dtype is torch.bfloat16:
        array = array.astype("float32")  # exact: bfloat16 is its upper half
    return torch.tensor(array).to(dtype)
