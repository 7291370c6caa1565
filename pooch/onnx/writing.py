"""Writes a trained model back into its graph: the same names and open dimensions, new weights."""

from __future__ import annotations

import onnx
import torch

from ..ground.errors import WorkloadError
from .model import OnnxModel
from .reading import digest_of, read_model

_DATA_FIELDS = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "raw_data")


def trained_proto(model: OnnxModel) -> onnx.ModelProto:
    """Return the model of the file with trained weights and statistics, in inference mode.

    Raises:
        WorkloadError: the file is missing or has changed.
    """
    if digest_of(model.source) != model.source_digest:
        raise WorkloadError(f"{model.source} changed while its model was trained: train again")
    proto = read_model(model.source)
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, path in model.stored.items():
        _put(tensors[name], state[path])
    _to_inference(proto.graph)
    return proto


def _put(stored: onnx.TensorProto, tensor: torch.Tensor) -> None:
    values = tensor.detach().cpu().contiguous()
    raw = values.reshape(-1).view(torch.uint8).numpy().tobytes()  # for any type, including bfloat16
    for field in _DATA_FIELDS:
        stored.ClearField(field)  # type: ignore[arg-type, unused-ignore]
    stored.raw_data = raw


def _to_inference(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        if node.op_type == "BatchNormalization":
            del node.output[1:]
            kept = [attribute for attribute in node.attribute if attribute.name != "training_mode"]
            del node.attribute[:]
            node.attribute.extend(kept)
        elif node.op_type == "Dropout":
            del node.input[2:]
    made = {name for node in graph.node for name in node.output} | {each.name for each in graph.initializer}
    kept_values = [value for value in graph.value_info if value.name in made]
    del graph.value_info[:]
    graph.value_info.extend(kept_values)
