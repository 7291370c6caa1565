"""Changed ONNX files: fields of the format, attributes of operators, shapes, names, paths of external data, bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from benchmarks.fuzz_files.judging import CANARY, Defect, Kind, command, refusal
from benchmarks.fuzz_files.mutations import ODD_TEXTS, changed_bytes
from pooch.errors import PoochError
from pooch.onnx.workload import onnx_builder
from tests.onnx.support import save_graph
from tests.onnx.test_operators import CASES, build

MODEL = "model.onnx"
_MOST_DIMENSIONS = 64  # of an array of numpy
_ODD_SIZES = (0, 1, -1, 2, 3, 7, -5, 64, 2**20, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, -(2**63))
_ATTRIBUTES = (
    "strides", "dilations", "pads", "kernel_shape", "group", "output_padding", "output_shape", "axis", "axes", "perm",
    "to", "alpha", "epsilon", "num_heads", "hidden_size", "keepdims", "blocksize", "num_groups", "size", "p", "mode",
    "auto_pad", "ceil_mode", "direction", "equation", "split", "num_outputs", "batch_dims", "storage_order", "k",
)  # fmt: skip
_LOCATIONS = (
    "../canary",
    "../../canary",
    "/etc/passwd",
    "../../../../../../etc/passwd",
    "",
    ".",
    "link",
    "weights.bin",
)


@cache
def _operators() -> tuple[bytes, ...]:
    """A file for each operator that can be trained."""
    found = []
    with TemporaryDirectory() as folder:
        for case in CASES:
            path = Path(folder) / MODEL
            build(case, path)
            found.append(path.read_bytes())
    return tuple(found)


@cache
def _networks() -> tuple[bytes, ...]:
    """Small networks that train: convolutions with a head, an attention, one that computes shapes."""
    draw = numpy.random.default_rng(5)

    def floats(*shape: int) -> Any:
        return draw.standard_normal(shape).astype("float32")

    node, image = helper.make_node, {"x": floats(2, 3, 8, 8)}
    whole = {"rows": numpy.array([0], "int64"), "rest": numpy.array([-1], "int64")}
    convolutions = [
        node("Conv", ["x", "w", "b"], ["c"], "/features/conv", pads=[1, 1, 1, 1], strides=[2, 1], group=1),
        node("BatchNormalization", ["c", "s", "o", "m", "v"], ["n"], "/features/norm"),
        node("Relu", ["n"], ["r"]), node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Shape", ["p"], ["shape"]), node("Gather", ["shape", "rows"], ["batch"], axis=0),
        node("Concat", ["batch", "rest"], ["flat"], axis=0), node("Reshape", ["p", "flat"], ["f"]),
        node("Gemm", ["f", "h"], ["y"], "head", transB=1),
    ]  # fmt: skip
    weights = {"w": floats(4, 3, 3, 3), "b": floats(4), "s": floats(4), "o": floats(4), "m": floats(4)}
    weights |= {"v": abs(floats(4)) + 1, "h": floats(5, 32), **whole}
    attention = [
        node("Gather", ["t", "x"], ["e"]), node("MatMul", ["e", "q"], ["qs"]), node("MatMul", ["e", "k"], ["ks"]),
        node("Transpose", ["ks"], ["kt"], perm=[0, 2, 1]), node("MatMul", ["qs", "kt"], ["a"]),
        node("Softmax", ["a"], ["soft"], axis=-1), node("MatMul", ["soft", "e"], ["o"]),
        node("Split", ["o"], ["left", "right"], axis=2, num_outputs=2), node("Mul", ["left", "right"], ["y"]),
    ]  # fmt: skip
    tokens = {"x": draw.integers(0, 9, (2, 5)).astype("int64")}
    with TemporaryDirectory() as folder:
        path = Path(folder) / MODEL
        one = save_graph(path, convolutions, image, weights, ["y"]).read_bytes()
        tables = {"t": floats(9, 8), "q": floats(8, 8), "k": floats(8, 8)}
        other = save_graph(path, attention, tokens, tables, ["y"]).read_bytes()
    return one, other


def _write(random: Random, folder: Path) -> None:
    content = random.choice(_networks() if random.random() < 0.5 else _operators())
    if random.random() < 0.2:
        (folder / MODEL).write_bytes(changed_bytes(random, content))
        return
    model = onnx.ModelProto()
    model.ParseFromString(content)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        if not model.graph.node or not model.graph.input:
            break
        random.choice(_CHANGES)(random, model, folder)
    (folder / MODEL).write_bytes(model.SerializeToString())


# Changes --------------------------------------------------------------------------------------------------------------


def _messages(message: Any) -> Iterator[Any]:
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for each in value if field.is_repeated else (value,):
                yield from _messages(each)


def _any_field(random: Random, model: onnx.ModelProto, folder: Path) -> None:
    """Drop, double, exchange or set a field of a message, wherever it is."""
    message = random.choice(list(_messages(model.graph if random.random() < 0.9 else model)))
    fields = message.ListFields()
    if not fields:
        return
    field, value = random.choice(fields)
    if field.is_repeated:
        _change_list(random, field, value, _names(model))
    elif random.random() < 0.3 or field.message_type is not None:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _other(random, field, value, _names(model)))


def _names(model: onnx.ModelProto) -> list[str]:
    return [name for node in model.graph.node for name in (*node.input, *node.output)] or ["x"]


def _change_list(random: Random, field: Any, values: Any, names: list[str]) -> None:
    one, other = random.randrange(len(values)), random.randrange(len(values))
    change = random.randrange(4)
    if change == 0:
        del values[one]
    elif change == 1:
        values.extend([values[one]] * random.choice((1, 1, 1, 50)))
    elif field.message_type is not None:
        held = type(values[one])()
        held.CopyFrom(values[one])
        values[one].CopyFrom(values[other])
        values[other].CopyFrom(held)
    elif change == 2:
        values[one], values[other] = values[other], values[one]
    else:
        values[one] = _other(random, field, values[one], names)


def _other(random: Random, field: Any, value: Any, names: list[str]) -> Any:
    if isinstance(value, float):
        return random.choice((0.0, -1.0, 1e30, float("nan"), float("inf"), value * 2))
    if isinstance(value, str):
        found = random.choice((*names, *names, random.choice(ODD_TEXTS)))
        return found.encode("utf-8", "replace").decode()
    if isinstance(value, bytes):
        return changed_bytes(random, value)
    if field.enum_type is not None:
        return random.choice([each.number for each in field.enum_type.values])
    small = field.type == field.TYPE_INT32
    sizes = [size for size in _ODD_SIZES if not small or abs(size) < 2**31]
    return random.choice((*sizes, max(-9, min(value, 2**30)) + random.choice((-1, 1))))


def _an_attribute(random: Random, model: onnx.ModelProto, folder: Path) -> None:
    """A node gets an attribute, in a form that its operator may not know."""
    node = random.choice(model.graph.node)
    known = [each.name for each in node.attribute]
    name = random.choice((*known, *known, *_ATTRIBUTES))
    kept = [each for each in node.attribute if each.name != name]
    sizes = [random.choice(_ODD_SIZES) for _ in range(random.choice((0, 1, 2, 2, 2, 3, 4, 4, 9)))]
    nested = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "inner", [], [])
    values: tuple[Any, ...] = (
        sizes or [1], sizes or [1], random.choice(_ODD_SIZES), random.choice(_ODD_SIZES), 0.5, [0.5, float("nan")],
        "SAME_UPPER", "text", ["a", "b"], numpy_helper.from_array(numpy.ones((2, 2), "float32")), nested,
    )  # fmt: skip
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, random.choice(values))])


def _a_cycle(random: Random, model: onnx.ModelProto, folder: Path) -> None:
    """A node reads what it, or one after it, makes."""
    nodes = model.graph.node
    one, other = random.randrange(len(nodes)), random.randrange(len(nodes))
    one, other = min(one, other), max(one, other)
    if nodes[one].input and nodes[other].output:
        nodes[one].input[random.randrange(len(nodes[one].input))] = nodes[other].output[0]


def _dimensions(random: Random, model: onnx.ModelProto, folder: Path) -> None:
    """An input or a weight says that it has another shape."""
    graph = model.graph
    if graph.initializer and random.random() < 0.6:
        stored = random.choice(graph.initializer)
        dims = [random.choice((*_ODD_SIZES, *stored.dims)) for _ in range(random.choice((0, 1, 2, 3, 4, 70)))]
        if random.random() < 0.5:
            dims = list(stored.dims)
            random.shuffle(dims)
        del stored.dims[:]
        stored.dims.extend(dims)
        return
    shape = random.choice(graph.input).type.tensor_type.shape
    for dimension in shape.dim:
        if random.random() < 0.5:
            dimension.dim_value = random.choice(_ODD_SIZES)
        elif random.random() < 0.2:
            dimension.dim_param = random.choice(ODD_TEXTS).encode("utf-8", "replace").decode()
    if random.random() < 0.2:
        shape.dim.add().dim_value = random.choice(_ODD_SIZES)


def _a_constant(random: Random, model: onnx.ModelProto, folder: Path) -> None:
    """A stored tensor of whole numbers, such as a shape or pads, has others."""
    whole = [each for each in model.graph.initializer if each.data_type == TensorProto.INT64]
    if not whole:
        _dimensions(random, model, folder)
        return
    stored = random.choice(whole)
    shape = list(stored.dims) if random.random() < 0.7 else [random.choice((0, 1, 2, 5))]
    numbers = [random.choice(_ODD_SIZES) for _ in range(min(1000, math.prod(shape)))]
    shape = shape if len(numbers) == math.prod(shape) and len(shape) <= _MOST_DIMENSIONS else [len(numbers)]
    stored.CopyFrom(numpy_helper.from_array(numpy.array(numbers, "int64").reshape(shape), stored.name))


def _external_data(random: Random, model: onnx.ModelProto, folder: Path) -> None:
    """A weight lies in another file, or says so."""
    if not model.graph.initializer:
        return
    stored = random.choice(model.graph.initializer)
    link = folder / "link"
    if not link.is_symlink():
        link.symlink_to("../canary")
    (folder / "weights.bin").write_bytes(bytes(random.choice((0, 10, 5000))))
    stored.ClearField("raw_data")
    stored.data_location = TensorProto.EXTERNAL
    entries = {"location": random.choice(_LOCATIONS)}
    if random.random() < 0.5:
        entries["offset"] = str(random.choice((*_ODD_SIZES, "text", "1e3")))
    if random.random() < 0.5:
        entries["length"] = str(random.choice((*_ODD_SIZES, "text", "")))
    del stored.external_data[:]
    for key, value in entries.items():
        stored.external_data.add(key=key, value=value)


def _another_operator(random: Random, model: onnx.ModelProto, folder: Path) -> None:
    node = random.choice(model.graph.node)
    node.op_type = random.choice((*(case.kind for case in CASES), "If", "Loop", "Scan", "System", ""))
    if random.random() < 0.2:
        node.domain = random.choice(("ai.onnx", "evil", "", "ai.onnx.ml"))


def _many_nodes(random: Random, model: onnx.ModelProto, folder: Path) -> None:
    """A row of nodes in front of the first; in a long one, each name of a module is inside of the one before."""
    last, count = model.graph.input[0].name if model.graph.input else "x", random.choice((10, 300, 1500))
    deep = random.random() < 0.5
    for number in range(count):
        name = "/".join(["a"] * min(number, 400)) if deep else f"n{number}"
        model.graph.node.insert(0, helper.make_node("Identity", [last], [f"chain{number}"], name))
        last = f"chain{number}"


def _metadata(random: Random, model: onnx.ModelProto, folder: Path) -> None:
    """What the exporter tells of a node's module, as Python text, is something else."""
    node = random.choice(model.graph.node)
    key = random.choice(("pkg.torch.onnx.name_scopes", "pkg.torch.onnx.class_hierarchy"))
    deep = random.choice((10, 100, 100_000))
    texts = (
        "['', 'a.b', 'c']", "[1, None]", "__import__('os').system('id')", "[" * deep, "[" * deep + "]" * deep, "{}",
        "['" + "a." * 3000 + "b', 'c']", "['forward', 'x']", "['..', '__class__']", "-" * deep + "1", "\x00",
    )  # fmt: skip
    node.metadata_props.add(key=key, value=random.choice(texts))


_CHANGES = (
    _any_field, _any_field, _any_field, _any_field, _an_attribute, _an_attribute, _an_attribute, _a_cycle, _dimensions,
    _dimensions, _a_constant, _external_data, _another_operator, _many_nodes, _metadata,
)  # fmt: skip


# What becomes of it ---------------------------------------------------------------------------------------------------


def _judge(random: Random, folder: Path) -> str:
    path = folder / MODEL
    try:
        workload = onnx_builder(str(path))()
    except PoochError as error:
        refusal(error)
        return "refused"
    secret = torch.frombuffer(bytearray(CANARY[:4]), dtype=torch.float32)
    if any((held == secret.to(held.dtype)).any() for held in workload.model.state_dict().values() if held.dim()):
        raise Defect("it holds bytes of a file outside of its folder")
    elements = sum(held.numel() for held in workload.model.state_dict().values())
    if elements > 10**8:
        raise Defect(f"a small file has become {elements} weights")
    if random.random() < 0.1:
        mode = random.choice(("run", "fake", "fake"))
        outcome = command("profile", path, "--mode", mode, "--repeats", 1, "-o", folder / "profile.json")
        return f"accepted, {outcome}"
    return "accepted"


def _untouched(folder: Path) -> None:
    (folder / MODEL).write_bytes(_networks()[0])
    _load_what_profiles_need()


@cache
def _load_what_profiles_need() -> None:
    """Profile a step once, so that native code that it needs is built and loaded before a case is watched."""
    with TemporaryDirectory(prefix="pooch-fuzz-") as folder:
        path = Path(folder) / MODEL
        path.write_bytes(_networks()[0])
        command("profile", path, "--mode", "run", "--repeats", 1, "-o", Path(folder) / "profile.json")


MODELS = Kind("onnx", _write, _judge, _untouched)
