"""Reads and checks an ONNX model, or reports in one line what is wrong with it.

Nothing in the file is executed: it is parsed as data, operators outside the default domain are refused, and external
tensors are read by the onnx package, which refuses paths outside the folder of the file.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx.version_converter
from onnx.external_data_helper import load_external_data_for_model, uses_external_data

from ..ground.errors import WorkloadError
from ..ground.reading import file_bytes
from ..ground.wording import error_text
from . import operators as _operators  # noqa: F401 - fills the registry
from .functions import all_nodes, without_functions
from .registry import BRANCH, OPERATORS
from .trainable import FLOATS

OLDEST_OPSET = 7  # earlier opsets specify broadcasting in attributes: files that have one are converted
_MOST_BYTES = (1 << 31) - 1  # what protobuf takes; larger models have external data
_DEFAULT_DOMAINS = ("", "ai.onnx")


def read_model(path: Path) -> onnx.ModelProto:
    """Read and check a model, with its external data.

    Raises:
        WorkloadError: the file cannot be read, is not a valid ONNX model, or has operators that cannot be trained.
    """
    model = _parsed(path)
    if 0 < _opset(model, path) < OLDEST_OPSET:
        _check(model, path)
        model = _converted(model, path)
    opset_of(model, path)
    model = without_functions(model, path)
    _refuse_unsupported(model, path)
    _load_external_data(model, path)
    _check(model, path)
    _store_weights(model.graph)
    return model


def _store_weights(graph: onnx.GraphProto) -> None:
    """Make initializers of constants where there are no others: some exporters write weights as nodes."""
    if any(math.prod(stored.dims) > 1 and stored.data_type in FLOATS for stored in graph.initializer):
        return
    for position in reversed(range(len(graph.node))):
        node = graph.node[position]
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            stored = graph.initializer.add()
            stored.CopyFrom(node.attribute[0].t)
            stored.name = node.output[0]
            del graph.node[position]


def digest_of(path: Path) -> str:
    """Return a digest of a file's bytes, or "" if it cannot be read."""
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return ""


def opset_of(model: onnx.ModelProto, path: Path) -> int:
    """Return the version of the default operator set.

    Raises:
        WorkloadError: it is missing or not supported.
    """
    version = _opset(model, path)
    if not OLDEST_OPSET <= version <= onnx.defs.onnx_opset_version():
        raise _of_other_opset(path, version)
    return version


def _opset(model: onnx.ModelProto, path: Path) -> int:
    versions = [entry.version for entry in model.opset_import if entry.domain in _DEFAULT_DOMAINS]
    if not versions:
        raise WorkloadError(
            f"{path} names no opset of the default domain, so it is not a valid ONNX model: export it again"
        )
    return int(versions[0])


def _of_other_opset(path: Path, version: int) -> WorkloadError:
    newest = onnx.defs.onnx_opset_version()
    return WorkloadError(
        f"{path} uses opset {version}, but only {OLDEST_OPSET} to {newest} are supported: "
        "export it again with one of these"
    )


def _converted(model: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """Return a model of an older opset in the oldest that is supported, where the onnx package can convert it."""
    other = _of_other_opset(path, _opset(model, path))
    if any(node.op_type == "PRelu" for node in model.graph.node):  # its slopes were one for each channel
        raise other
    try:
        return onnx.version_converter.convert_version(model, OLDEST_OPSET)
    except Exception as error:  # onnx raises several types; not all operators have a conversion
        raise other from error


def _parsed(path: Path) -> onnx.ModelProto:
    try:
        raw = file_bytes(path, _MOST_BYTES)
    except OSError as error:
        raise WorkloadError(f"cannot read {path}: {error.strerror}: check the path") from error
    model = onnx.ModelProto()
    try:
        model.ParseFromString(raw)
    except Exception as error:  # protobuf's own type, which differs between its implementations
        raise WorkloadError(f"{path} is truncated or not an ONNX file: export it again") from error
    if not model.graph.node:
        raise WorkloadError(f"{path} is truncated or not an ONNX file (it has no nodes): export it again")
    return model


def _refuse_unsupported(model: onnx.ModelProto, path: Path) -> None:
    unknown: dict[str, int] = {}
    for node in all_nodes(model.graph.node):
        name = node.op_type if node.domain in _DEFAULT_DOMAINS else f"{node.domain}::{node.op_type}"
        if name not in OPERATORS and name != BRANCH:
            unknown[name] = unknown.get(name, 0) + 1
    if unknown:
        listed = ", ".join(f"{name} ({count}x)" for name, count in sorted(unknown.items()))
        raise WorkloadError(
            f"{path} has operators that cannot be trained: {listed}: export it without them "
            "(docs/onnx.md lists the supported ones)"
        )


def _load_external_data(model: onnx.ModelProto, path: Path) -> None:
    if not any(uses_external_data(tensor) for tensor in _tensors(model)):
        return
    try:
        load_external_data_for_model(model, str(path.resolve().parent))
    except Exception as error:  # missing, too short, or outside the folder
        raise WorkloadError(
            f"the external data of {path} cannot be read: {error_text(error)}: keep its files next to it"
        ) from error


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    yield from model.graph.initializer
    for node in all_nodes(model.graph.node):
        for attribute in node.attribute:
            yield from attribute.g.initializer
            if attribute.HasField("t"):
                yield attribute.t


def _check(model: onnx.ModelProto, path: Path) -> None:
    if model.graph.sparse_initializer:
        raise WorkloadError(f"{path} has sparse initializers, which cannot be trained: export dense ones")
    try:
        onnx.checker.check_model(str(path))  # by path: a model over 2 GiB cannot be checked from memory
    except Exception as error:  # onnx raises several types
        raise WorkloadError(f"{path} is not a valid ONNX model: {error_text(error)}: export it again") from error
