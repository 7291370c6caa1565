"""More than one operator: branches, sequences as PyTorch writes them, random numbers, older and newer opsets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from pooch.errors import WorkloadError
from pooch.onnx.exporting import export_trained
from pooch.onnx.model import OnnxModel
from pooch.workloads import Workload, load_workload
from tests.onnx.support import export, run_onnxruntime, save_graph

GENERATOR = numpy.random.default_rng(5)
ROWS = GENERATOR.uniform(-1, 1, (2, 4)).astype("float32")
WEIGHT = GENERATOR.uniform(-1, 1, (4, 3)).astype("float32")
PRODUCT = helper.make_node("MatMul", ["x", "w"], ["y"])


def outputs_of(workload: Workload, *inputs: Any) -> Tensor:
    assert isinstance(workload.model, OnnxModel)
    result = workload.model(*[torch.as_tensor(each) for each in inputs])
    assert isinstance(result, Tensor)
    return result


def trained_and_written(workload: Workload, path: Path) -> Tensor:
    """Trains a step, and checks that the written file gives what the model does; returns that."""
    workload.forward().backward()
    workload.optimizer.step()
    export_trained(workload, path)
    (result,) = run_onnxruntime(path, {"x": ROWS})
    torch.testing.assert_close(result, outputs_of(workload, ROWS).detach())
    return result


def refusal(path: Path) -> str:
    with pytest.raises(WorkloadError) as caught:
        load_workload(str(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def branch(name: str, *nodes: onnx.NodeProto, **stored: Any) -> onnx.GraphProto:
    initializers = [numpy_helper.from_array(array, key) for key, array in stored.items()]
    outputs = [helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, None)]
    return helper.make_graph(list(nodes), name, [], outputs, initializers)


def branching(path: Path, *condition: onnx.NodeProto, **stored: Any) -> Path:
    """Doubles the product in one branch, and multiplies it with a stored weight in the other."""
    yes = branch("yes", helper.make_node("Add", ["y", "y"], ["yes_out"]))
    no = branch("no", helper.make_node("MatMul", ["y", "v"], ["no_out"]))
    chosen = helper.make_node("If", ["condition"], ["z"], "chosen", then_branch=yes, else_branch=no)
    weights = {"w": WEIGHT, "v": WEIGHT[:3, :3].copy(), **stored}
    return save_graph(path, [PRODUCT, *condition, chosen], {"x": ROWS}, weights, ["z"])


@pytest.mark.parametrize("size", [2, 3])
def test_a_branch_that_shapes_choose_is_taken(tmp_path: Path, size: int) -> None:
    path = branching(
        tmp_path / "m.onnx",
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "zero"], ["size"]),
        helper.make_node("Equal", ["size", "wanted"], ["condition"]),
        zero=numpy.array(0, "int64"), wanted=numpy.array(size, "int64"),
    )  # fmt: skip
    workload = load_workload(str(path))
    (expected,) = run_onnxruntime(path, {"x": ROWS})
    torch.testing.assert_close(outputs_of(workload, ROWS), expected)
    trained = {tuple(parameter.shape) for parameter in workload.model.parameters()}
    assert trained == {(4, 3), (3, 3)}  # weights that a branch reads are trained like others
    workload.forward().backward()


def test_branches_may_use_the_same_names(tmp_path: Path) -> None:
    """Each adds a constant of the same name, one of them within a branch of its own."""

    def adding(name: str, value: float, *, is_deep: bool = False) -> onnx.GraphProto:
        stored = {} if is_deep else {"c": numpy.full(3, value, "float32")}
        add = helper.make_node("Add", ["y" if name == "one" else "z", "c"], [f"{name}_out"])
        if not is_deep:
            return branch(name, add, **stored)
        inner = adding(name, value)
        chosen = helper.make_node("If", ["yes"], [f"{name}_deep"], then_branch=inner, else_branch=inner)
        return branch(name, chosen, helper.make_node("Identity", [f"{name}_deep"], [f"{name}_out"]))

    first, second = adding("one", 1.0), adding("two", 10.0, is_deep=True)
    nodes = [
        PRODUCT,
        helper.make_node("If", ["yes"], ["z"], then_branch=first, else_branch=first),
        helper.make_node("If", ["yes"], ["end"], then_branch=second, else_branch=second),
    ]
    path = save_graph(tmp_path / "m.onnx", nodes, {"x": ROWS}, {"w": WEIGHT, "yes": numpy.array(True)}, ["end"])
    found = outputs_of(load_workload(str(path)), ROWS).detach()
    torch.testing.assert_close(found, torch.as_tensor(ROWS @ WEIGHT + 11))


def test_a_branch_that_the_data_choose_is_refused(tmp_path: Path) -> None:
    total = helper.make_node("ReduceMax", ["x"], ["total"], keepdims=0)
    positive = helper.make_node("Greater", ["total", "zero"], ["condition"])
    message = refusal(branching(tmp_path / "m.onnx", total, positive, zero=numpy.array(0, "float32")))
    assert "'chosen' (If)" in message
    assert "depends on the data" in message


def test_a_condition_of_several_numbers_is_refused(tmp_path: Path) -> None:
    same = helper.make_node("Equal", ["shape", "shape"], ["condition"])
    path = branching(tmp_path / "m.onnx", helper.make_node("Shape", ["x"], ["shape"]), same)
    assert "its condition is not one number" in refusal(path)


def test_an_unsupported_operator_within_a_branch_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    yes = branch("yes", helper.make_node("Hardmax", ["y"], ["yes_out"]))
    no = branch("no", helper.make_node("Identity", ["y"], ["no_out"]))
    chosen = helper.make_node("If", ["c"], ["z"], then_branch=yes, else_branch=no)
    save_graph(path, [PRODUCT, chosen], {"x": ROWS}, {"w": WEIGHT, "c": numpy.array(True)}, ["z"])
    assert "Hardmax (1x)" in refusal(path)


class Gated(nn.Module):
    """Parts of a product, limits of its type, and an average over a list of them."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.out = nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        values, gates, rest = self.wide(x).chunk(3, -1)
        joined = torch.stack([values * torch.sigmoid(gates), nn.functional.relu6(rest)], 1)
        return self.out(joined.mean(1))


def test_a_file_of_pytorchs_exporter_that_nothing_simplified_is_trained_whole(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, rows = Gated().train(), torch.as_tensor(ROWS)
    path = export(model, (rows,), tmp_path / "m.onnx", optimize=False)
    kinds = {node.op_type for node in onnx.load(path).graph.node}
    assert {"SplitToSequence", "SequenceAt", "CastLike"} <= kinds, kinds
    workload = load_workload(str(path))
    torch.testing.assert_close(outputs_of(workload, rows), model(rows))
    assert [p.shape for p in workload.model.parameters()] == [p.shape for p in model.parameters()]
    trained_and_written(workload, tmp_path / "trained.onnx")


def test_an_output_that_is_a_sequence_is_refused(tmp_path: Path) -> None:
    split = helper.make_node("SplitToSequence", ["y"], ["parts"], axis=1)
    graph = helper.make_graph(
        [PRODUCT, split], "graph", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ROWS.shape)],
        [helper.make_tensor_sequence_value_info("parts", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(WEIGHT, "w")],
    )  # fmt: skip
    path = tmp_path / "m.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]).SerializeToString())
    assert "'parts' is a sequence" in refusal(path)


RANDOM = {
    "RandomNormalLike": ({"mean": 3.0, "scale": 0.5, "seed": 1.0}, 3.0, 0.5),
    "RandomUniformLike": ({"low": 2.0, "high": 4.0}, 3.0, 0.577),
    "Bernoulli": ({}, 0.25, 0.433),
}


@pytest.mark.parametrize("kind", list(RANDOM))
def test_random_numbers_are_drawn_in_every_step(tmp_path: Path, kind: str) -> None:
    """Also where the shape comes from a constant, of which everything else would be computed once."""
    attributes, mean, deviation = RANDOM[kind]
    quarters = numpy.full((200, 300), 0.25, "float32")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node(kind, ["like"], ["noise"], **attributes),
        helper.make_node("Add", ["y", "noise"], ["z"]),
    ]
    rows, zeros = numpy.ones((200, 4), "float32"), numpy.zeros((4, 300), "float32")
    path = save_graph(tmp_path / "m.onnx", nodes, {"x": rows}, {"w": zeros, "like": quarters}, ["z"], 17)
    workload = load_workload(str(path))
    torch.manual_seed(0)
    first, second = outputs_of(workload, rows), outputs_of(workload, rows)
    torch.manual_seed(0)
    assert torch.equal(outputs_of(workload, rows), first)
    assert not torch.equal(first, second)
    assert abs(float(first.mean()) - mean) < 0.02
    assert abs(float(first.std()) - deviation) < 0.02


def test_a_written_file_that_draws_numbers_is_not_called_wrong(tmp_path: Path) -> None:
    noise = helper.make_node("RandomNormalLike", ["y"], ["noise"])
    nodes = [PRODUCT, noise, helper.make_node("Add", ["y", "noise"], ["z"])]
    workload = load_workload(str(save_graph(tmp_path / "m.onnx", nodes, {"x": ROWS}, {"w": WEIGHT}, ["z"])))
    report = export_trained(workload, tmp_path / "trained.onnx")
    report.refuse_different()
    assert "its outputs are random" in report.line()
    assert report.record()["is_random"] is True


@pytest.mark.parametrize(("reverse", "exclusive"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_cumulative_product_is_that_of_its_specification(tmp_path: Path, reverse: int, exclusive: int) -> None:
    if onnx.defs.onnx_opset_version() < 26:
        pytest.skip("this onnx package does not define CumProd")
    nodes = [PRODUCT, helper.make_node("CumProd", ["y", "a"], ["z"], reverse=reverse, exclusive=exclusive)]
    stored = {"w": WEIGHT, "a": numpy.array(1, "int64")}
    path = save_graph(tmp_path / "m.onnx", nodes, {"x": ROWS}, stored, ["z"], 26)
    found = outputs_of(load_workload(str(path)), ROWS).detach().numpy()
    factors = ROWS @ WEIGHT
    for row, line in zip(found, factors, strict=True):
        for place, value in enumerate(row):
            own = 1 - exclusive
            taken = line[place + 1 - own :] if reverse else line[: place + own]
            assert value == pytest.approx(float(numpy.prod(taken)), rel=1e-5)


def test_an_attribute_of_a_newer_operator_is_not_passed_over(tmp_path: Path) -> None:
    """`left_window_size` limits attention since opset 25: without it, results would be others."""
    known = onnx.defs.get_schema("Attention", onnx.defs.onnx_opset_version()).attributes
    if "left_window_size" not in known:
        pytest.skip("this onnx package does not define windows of attention")
    heads = GENERATOR.uniform(-1, 1, (1, 2, 4, 4)).astype("float32")

    def saved(**attributes: int) -> Path:
        nodes = [
            helper.make_node("MatMul", ["x", "w"], ["y"]),
            helper.make_node("Attention", ["y", "y", "y"], ["z"], "attention", **attributes),
        ]
        square = WEIGHT[:, :1] * numpy.ones((4, 4), "float32")
        return save_graph(
            tmp_path / "m.onnx", nodes, {"x": heads}, {"w": square}, ["z"], onnx.defs.onnx_opset_version()
        )

    message = refusal(saved(left_window_size=1))
    assert "'attention' (Attention)" in message
    assert "left_window_size=1" in message
    load_workload(str(saved(left_window_size=-1, is_causal=1)))  # what is left out as well


def older(path: Path, *nodes: onnx.NodeProto, **stored: Any) -> Path:
    """A file of opset 6 as PyTorch 0.3 wrote them: broadcasting in attributes, weights among the inputs."""
    arrays = {"w": WEIGHT, **stored}
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ROWS.shape)]
    inputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape) for name, array in arrays.items()]
    outputs = [helper.make_tensor_value_info("z", TensorProto.FLOAT, (2, 3))]
    initializers = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph([PRODUCT, *nodes], "graph", inputs, outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 6)], ir_version=3)
    path.write_bytes(model.SerializeToString())
    return path


def test_a_file_of_an_older_opset_is_converted(tmp_path: Path) -> None:
    bias = GENERATOR.uniform(-1, 1, 3).astype("float32")
    path = older(tmp_path / "m.onnx", helper.make_node("Add", ["y", "b"], ["z"], broadcast=1, axis=1), b=bias)
    workload = load_workload(str(path))
    torch.testing.assert_close(outputs_of(workload, ROWS).detach(), torch.as_tensor(ROWS @ WEIGHT + bias))
    assert sorted(p.numel() for p in workload.model.parameters()) == [3, 12]
    trained_and_written(workload, tmp_path / "trained.onnx")


def test_an_older_file_that_would_mean_something_else_is_refused(tmp_path: Path) -> None:
    """Slopes of PRelu were one for each channel, and are broadcast from the last axis now."""
    path = older(tmp_path / "m.onnx", helper.make_node("PRelu", ["y", "s"], ["z"]), s=numpy.ones(3, "float32"))
    assert "uses opset 6" in refusal(path)


def test_weights_that_are_nodes_are_trained_where_there_are_no_others(tmp_path: Path) -> None:
    bias = GENERATOR.uniform(-1, 1, 3).astype("float32")
    constants = [
        helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array))
        for name, array in {"w": WEIGHT, "b": bias, "axes": numpy.array([0], "int64")}.items()
    ]
    more = helper.make_node("Add", ["y", "b"], ["sum"]), helper.make_node("Unsqueeze", ["sum", "axes"], ["z"])
    path = save_graph(tmp_path / "m.onnx", [*constants, PRODUCT, *more], {"x": ROWS}, {}, ["z"])
    workload = load_workload(str(path))
    assert sorted(p.numel() for p in workload.model.parameters()) == [3, 12]
    result = trained_and_written(workload, tmp_path / "trained.onnx")
    assert not numpy.allclose(result.numpy()[0], ROWS @ WEIGHT + bias)


def test_a_constant_beside_weights_stays_one(tmp_path: Path) -> None:
    scale = helper.make_node("Constant", [], ["s"], value=numpy_helper.from_array(WEIGHT[0].copy()))
    nodes = [scale, PRODUCT, helper.make_node("Mul", ["y", "s"], ["z"])]
    workload = load_workload(str(save_graph(tmp_path / "m.onnx", nodes, {"x": ROWS}, {"w": WEIGHT}, ["z"])))
    assert [p.numel() for p in workload.model.parameters()] == [12]
