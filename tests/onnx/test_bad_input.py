"""Files that are broken, hostile or beyond what is understood: one line each, and nothing runs."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import onnx
import pytest
from onnx import helper

from pooch.errors import UsageError, WorkloadError
from pooch.workloads import load_workload
from tests.onnx.support import save_graph

WEIGHT = {"w": numpy.ones((4, 3), dtype="float32")}
ROWS = {"x": numpy.ones((2, 4), dtype="float32")}


def matmul(path: Path, *more: onnx.NodeProto, output: str = "y", weights: Any = None) -> Path:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], "product"), *more]
    return save_graph(path, nodes, ROWS, weights or WEIGHT, [output])


def changed(path: Path, change: Any) -> Path:
    model = onnx.load(matmul(path))
    change(model)
    path.write_bytes(model.SerializeToString())
    return path


def refusal(path: Path, error: type[Exception] = WorkloadError, batch_size: int | None = None, **settings: Any) -> str:
    with pytest.raises(error) as caught:
        load_workload(str(path), batch_size=batch_size, settings=settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_good_file_is_taken(tmp_path: Path) -> None:
    workload = load_workload(str(matmul(tmp_path / "m.onnx")))
    assert workload.batch_size == 2
    assert workload.name == "m.onnx"
    workload.forward().backward()
    assert [tuple(p.shape) for p in workload.model.parameters()] == [(4, 3)]


def test_a_missing_file_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / "folder.onnx").mkdir()
    assert "does not exist" in refusal(tmp_path / "absent.onnx")
    assert "is a folder" in refusal(tmp_path / "folder.onnx")
    os.mkfifo(tmp_path / "pipe.onnx")
    assert "is not a regular file" in refusal(tmp_path / "pipe.onnx")


def test_a_file_larger_than_any_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "m.onnx").open("wb") as file:
        file.truncate(2**40)
    assert "it is larger than any such file" in refusal(tmp_path / "m.onnx")


@pytest.mark.parametrize("content", [b"", b"hello", b"\x08", b"PK\x03\x04 a zip", bytes(range(256))])
def test_a_file_that_is_not_onnx(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    assert "truncated or not an ONNX file" in refusal(path)


def test_a_truncated_file_at_every_length(tmp_path: Path) -> None:
    path = matmul(tmp_path / "m.onnx")
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert ": " in refusal(path)


@pytest.mark.parametrize("version", [0, 999])
def test_an_opset_that_is_not_understood(tmp_path: Path, version: int) -> None:
    path = changed(tmp_path / "m.onnx", lambda model: setattr(model.opset_import[0], "version", version))
    message = refusal(path)
    assert f"opset {version}" in message
    assert f"7 to {onnx.defs.onnx_opset_version()}" in message


def test_no_opset_at_all(tmp_path: Path) -> None:
    assert "names no opset" in refusal(changed(tmp_path / "m.onnx", lambda model: model.ClearField("opset_import")))


def test_all_unsupported_operators_are_named_at_once(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Unique", ["y"], ["a"]),
        helper.make_node("Hardmax", ["y"], ["b"]),
        helper.make_node("Hardmax", ["b"], ["c"]),
        helper.make_node("FusedGelu", ["c"], ["z"], domain="com.microsoft"),
    ]
    message = refusal(changed(tmp_path / "m.onnx", lambda model: model.graph.node.extend(nodes)))
    assert "Hardmax (2x), Unique (1x), com.microsoft::FusedGelu (1x)" in message


def calling(path: Path, functions: dict[str, list[str]]) -> Path:
    """A file of functions, the first of which is called. Each calls others, one on the result of the other."""
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    made = []
    for name, called in functions.items():
        values = ["a", *(f"v{index}" for index in range(1, len(called))), "b"]
        pairs = zip(called, pairwise(values), strict=True)
        nodes = [helper.make_node(each, [x], [y], domain="own" if each in functions else "") for each, (x, y) in pairs]
        made.append(helper.make_function("own", name, ["a"], ["b"], nodes, opsets))
    first = helper.make_node(next(iter(functions)), ["y"], ["z"], domain="own")
    model = onnx.load(matmul(path))
    model.graph.node.append(first)
    model.graph.output[0].name = "z"
    model.functions.extend(made)
    model.opset_import.append(opsets[1])
    path.write_bytes(model.SerializeToString())
    return path


def test_functions_of_the_file_are_inlined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(onnx, "inliner", raising=False)  # as long as nobody has imported it, onnx does not have it
    monkeypatch.delitem(sys.modules, "onnx.inliner", raising=False)
    monkeypatch.delitem(sys.modules, "pooch.onnx.functions", raising=False)
    monkeypatch.delitem(sys.modules, "pooch.onnx.reading", raising=False)
    reading = importlib.import_module("pooch.onnx.reading")
    model = reading.read_model(calling(tmp_path / "m.onnx", {"F": ["G", "Tanh", "G"], "G": ["Relu", "Abs"]}))
    assert [node.op_type for node in model.graph.node] == ["MatMul", "Relu", "Abs", "Tanh", "Relu", "Abs"]


def test_functions_that_call_themselves_or_double_in_each_other_are_not_inlined(tmp_path: Path) -> None:
    endless = calling(tmp_path / "m.onnx", {"F": ["G"], "G": ["F"]})
    assert "calls itself" in refusal(endless)
    doubling = {f"F{index}": [f"F{index + 1}"] * 2 for index in range(60)} | {"F60": ["Relu"]}
    assert "nodes" in refusal(calling(tmp_path / "m.onnx", doubling))


def test_a_form_of_an_operator_that_is_not_supported_names_the_node(tmp_path: Path) -> None:
    weights = WEIGHT | {"image": numpy.ones((1, 1, 4, 4), dtype="float32")}
    nodes = [
        helper.make_node("MaxPool", ["image"], ["p", "i"], "the_pool", kernel_shape=[2, 2], storage_order=1),
        helper.make_node("ReduceSum", ["i"], ["s"], keepdims=0),
        helper.make_node("Cast", ["s"], ["f"], to=1),
        helper.make_node("Add", ["y", "f"], ["z"]),
    ]
    message = refusal(matmul(tmp_path / "m.onnx", *nodes, output="z", weights=weights))
    assert "'the_pool' (MaxPool)" in message
    assert "indices" in message


def test_a_shape_that_depends_on_the_data(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
        helper.make_node("Cast", ["s"], ["n"], to=7),
        helper.make_node("Unsqueeze", ["n", "zero"], ["shape"]),
        helper.make_node("Expand", ["y", "shape"], ["z"], "grow"),
    ]
    weights = WEIGHT | {"zero": numpy.array([0])}
    message = refusal(matmul(tmp_path / "m.onnx", *nodes, output="z", weights=weights))
    assert "'grow' (Expand)" in message
    assert "depends on the data" in message


def test_shapes_that_do_not_fit_name_the_node(tmp_path: Path) -> None:
    nodes = [helper.make_node("Reshape", ["y", "shape"], ["z"], "fold")]
    weights = WEIGHT | {"shape": numpy.array([5, 5])}
    path = tmp_path / "m.onnx"
    matmul(path, *nodes, output="z", weights=WEIGHT | {"shape": numpy.array([6, 1])})
    model = onnx.load(path)
    model.graph.initializer[1].CopyFrom(onnx.numpy_helper.from_array(weights["shape"], "shape"))
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    path.write_bytes(model.SerializeToString())
    assert "'fold' (Reshape)" in refusal(path)


def outside(path: Path, location: str) -> Path:
    """The weight kept in another file, as the format allows."""

    def move(model: onnx.ModelProto) -> None:
        weight = model.graph.initializer[0]
        weight.ClearField("raw_data")
        weight.data_location = onnx.TensorProto.EXTERNAL
        weight.external_data.add(key="location", value=location)
        weight.external_data.add(key="length", value="48")

    return changed(path, move)


def test_external_data_beside_the_file_is_read(tmp_path: Path) -> None:
    path = outside(tmp_path / "m.onnx", "weights.bin")
    (tmp_path / "weights.bin").write_bytes(numpy.full((4, 3), 7, dtype="float32").tobytes())
    parameter = next(load_workload(str(path)).model.parameters())
    assert parameter.unique().tolist() == [7.0]


@pytest.mark.parametrize("content", [None, b"short"])
def test_external_data_that_is_missing_or_short(tmp_path: Path, content: bytes | None) -> None:
    path = outside(tmp_path / "m.onnx", "weights.bin")
    if content is not None:
        (tmp_path / "weights.bin").write_bytes(content)
    assert "external data" in refusal(path)


@pytest.mark.parametrize("how", ["parent", "absolute", "link"])
def test_external_data_outside_of_the_folder_is_not_read(tmp_path: Path, how: str) -> None:
    secret = tmp_path / "secret.bin"
    secret.write_bytes(numpy.full((4, 3), 7, dtype="float32").tobytes())
    folder = tmp_path / "folder"
    folder.mkdir()
    location = {"parent": "../secret.bin", "absolute": str(secret), "link": "link.bin"}[how]
    if how == "link":
        (folder / "link.bin").symlink_to(secret)
    assert "external data" in refusal(outside(folder / "m.onnx", location))


def test_names_in_the_file_become_attributes_and_nothing_else(tmp_path: Path) -> None:
    hostile = "__class__/../forward.a b;import os#.weight"
    weights = {hostile: WEIGHT["w"], "half": numpy.ones(3, dtype="float32"), "_steps": numpy.ones(3, dtype="float32")}
    nodes = [
        helper.make_node("MatMul", ["x", hostile], ["m"], "train"),
        helper.make_node("Add", ["m", "half"], ["a"], "parameters/eval"),
        helper.make_node("Add", ["a", "_steps"], ["y"], "eval/eval"),
    ]
    workload = load_workload(str(save_graph(tmp_path / "m.onnx", nodes, ROWS, weights, ["y"])))
    workload.forward().backward()
    names = [name for name, _ in workload.model.named_parameters()]
    assert len(names) == 3
    assert all(part.isidentifier() for name in names for part in name.split("."))
    assert workload.model.train() is workload.model


def test_a_missing_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = matmul(tmp_path / "m.onnx")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "onnx" else find_spec(name))
    assert "pip install onnx onnxruntime onnxscript" in refusal(path)


def open_batch(path: Path, *names: str) -> Path:
    def open_up(model: onnx.ModelProto) -> None:
        for dimension, name in zip(model.graph.input[0].type.tensor_type.shape.dim, names, strict=False):
            dimension.dim_param = name
        model.graph.output[0].type.tensor_type.shape.dim[0].dim_param = names[0]

    return changed(path, open_up)


def test_an_open_batch_is_given_and_a_fixed_one_is_not(tmp_path: Path) -> None:
    assert load_workload(str(open_batch(tmp_path / "open.onnx", "batch")), batch_size=5).batch_size == 5
    assert "fixed at 2" in refusal(matmul(tmp_path / "m.onnx"), UsageError, batch_size=5)


def test_other_open_dimensions_are_named(tmp_path: Path) -> None:
    path = open_batch(tmp_path / "m.onnx", "batch", "width-1")
    assert "--set width_1=16" in refusal(path, UsageError)
    assert load_workload(str(path), settings={"width_1": 4}).forward().ndim == 0
    assert "not a positive integer" in refusal(path, UsageError, width_1=0)
    assert "'depth'" in refusal(path, UsageError, width_1=4, depth=3)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"loss": "hinge"}, "cross_entropy"),
        ({"mode": "fast"}, "exported, train, eval"),
        ({"output": "nothing"}, "it has y"),
    ],
)
def test_settings_that_it_does_not_have(tmp_path: Path, settings: dict[str, str], expected: str) -> None:
    assert expected in refusal(matmul(tmp_path / "m.onnx"), UsageError, **settings)


def test_freezing_everything_leaves_nothing_to_train(tmp_path: Path) -> None:
    told = refusal(matmul(tmp_path / "m.onnx"), freeze="*")
    assert "no weights to train" in told
    assert "freeze" in told


def test_a_model_without_weights_has_nothing_to_train_and_nothing_was_frozen(tmp_path: Path) -> None:
    path = save_graph(tmp_path / "m.onnx", [helper.make_node("Relu", ["x"], ["y"])], ROWS, {}, ["y"])
    told = refusal(path)
    assert "no weights to train" in told
    assert "freeze" not in told


def test_what_the_checker_says_goes_on_with_the_remedy(tmp_path: Path) -> None:
    def twice(model: onnx.ModelProto) -> None:
        model.graph.node.append(model.graph.node[0])

    assert refusal(changed(tmp_path / "m.onnx", twice)).endswith("multiple times: export it again")


HUGE = 2**40


def whole(*numbers: int) -> numpy.ndarray[Any, Any]:
    return numpy.array(numbers, dtype="int64")


@pytest.mark.parametrize(
    ("kind", "inputs", "constants"),
    [
        ("Expand", ["c", "s"], {"c": numpy.ones(1, "float32"), "s": whole(HUGE)}),
        ("ConstantOfShape", ["s"], {"s": whole(2**29)}),
        ("Tile", ["c", "s"], {"c": numpy.ones(3, "float32"), "s": whole(HUGE)}),
        ("Pad", ["c", "s"], {"c": numpy.ones(3, "float32"), "s": whole(0, HUGE)}),
        ("Resize", ["c", "", "", "s"], {"c": numpy.ones((1, 1, 1, 1), "float32"), "s": whole(1, 1, 2**20, 2**20)}),
        ("OneHot", ["i", "d", "v"], {"i": whole(0, 1), "d": whole(HUGE), "v": numpy.array([0, 1], "float32")}),
    ],
)  # fmt: skip
def test_constants_of_excessive_size_are_not_made(
    tmp_path: Path, kind: str, inputs: list[str], constants: dict[str, numpy.ndarray[Any, Any]]
) -> None:
    exact = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"} if kind == "Resize" else {}
    made = helper.make_node(kind, inputs, ["big"], **exact)
    total = helper.make_node("ReduceMax", ["big"], ["one"], keepdims=0)
    path = matmul(
        tmp_path / "m.onnx", made, total, helper.make_node("Add", ["y", "one"], ["z"]), output="z",
        weights=WEIGHT | constants,
    )  # fmt: skip
    message = refusal(path)
    assert kind in message
    assert "makes a constant of" in message


def test_constants_that_double_in_each_node_are_not_made(tmp_path: Path) -> None:
    names = ["c", *(f"c{level}" for level in range(40))]
    tower = [helper.make_node("Concat", [a, a], [b], axis=0) for a, b in pairwise(names)]
    total = helper.make_node("ReduceMax", [names[-1]], ["one"], keepdims=0)
    constants = WEIGHT | {"c": numpy.ones(1, "float32")}
    path = matmul(
        tmp_path / "m.onnx", *tower, total, helper.make_node("Add", ["y", "one"], ["z"]), output="z", weights=constants
    )
    assert "makes a constant of" in refusal(path)


def test_a_shape_of_millions_of_numbers_is_refused(tmp_path: Path) -> None:
    constants = WEIGHT | {"c": whole(1), "s": whole(2**22)}
    made = helper.make_node("Expand", ["c", "s"], ["shape"])
    path = matmul(
        tmp_path / "m.onnx", made, helper.make_node("Reshape", ["y", "shape"], ["z"]), output="z", weights=constants
    )
    assert "has 4194304 elements" in refusal(path)


@pytest.mark.parametrize("dims", [[HUGE], [2**62, 4], [2**31, 2**31], [-1, 4]])
def test_weights_that_claim_a_huge_shape(tmp_path: Path, dims: list[int]) -> None:
    def claim(model: Any) -> None:
        del model.graph.initializer[0].dims[:]
        model.graph.initializer[0].dims.extend(dims)

    assert "not a valid ONNX model" in refusal(changed(tmp_path / "m.onnx", claim))
