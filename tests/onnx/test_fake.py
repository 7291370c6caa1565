"""A file is built without memory too: shapes that nodes read from constants are there all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
from onnx import helper

from pooch.api.profiling import profile_workload
from pooch.ir import Profile
from pooch.workloads import WorkloadFactory, load_workload
from tests.executor.support import LINK, quick_profile
from tests.onnx.support import Arrays, save_graph
from tests.profiler.conftest import decide_on_everything, one_thread

__all__ = ["decide_on_everything", "one_thread"]

node = helper.make_node


def floats(*shape: int) -> numpy.ndarray[Any, Any]:
    return numpy.random.default_rng(0).random(shape, dtype="float32")


def whole(*numbers: int) -> numpy.ndarray[Any, Any]:
    return numpy.array(numbers, dtype="int64")


# What reads a shape, axes or numbers from a constant, each between two products that save what it makes.
READERS: dict[str, tuple[list[Any], Arrays]] = {
    "Reshape": ([node("Reshape", ["a", "s"], ["b"])], {"s": whole(4, 8)}),
    "computed shape": (
        [
            node("Shape", ["a"], ["whole"]), node("Gather", ["whole", "first"], ["rows"]),
            node("Concat", ["rows", "rest"], ["s"], axis=0), node("Reshape", ["a", "s"], ["b"]),
        ],
        {"first": whole(0), "rest": whole(8)},
    ),
    "Unsqueeze": ([node("Unsqueeze", ["a", "s"], ["u"]), node("Squeeze", ["u", "s"], ["b"])], {"s": whole(1)}),
    "Expand": ([node("Expand", ["a", "s"], ["b"])], {"s": whole(4, 8)}),
    "Tile": ([node("Tile", ["a", "s"], ["b"])], {"s": whole(2, 1)}),
    "Slice": ([node("Slice", ["a", "s", "e", "along", "t"], ["b"])],
              {"s": whole(3), "e": whole(0), "along": whole(0), "t": whole(-1)}),
    "Pad": ([node("Pad", ["a", "s"], ["b"])], {"s": whole(1, 0, 1, 0)}),
    "Split": ([node("Split", ["a", "s"], ["b", "c"], axis=0)], {"s": whole(1, 3)}),
    "ReduceSum": ([node("ReduceSum", ["a", "s"], ["r"], keepdims=1), node("Mul", ["a", "r"], ["b"])], {"s": whole(1)}),
    "Clip": ([node("Clip", ["a", "s", "e"], ["b"])],
             {"s": numpy.array(0, "float32"), "e": numpy.array(6, "float32")}),
    "Dropout": ([node("Dropout", ["a", "s", "e"], ["b"])], {"s": numpy.array(0.5, "float32"), "e": numpy.array(True)}),
    "CumSum": ([node("CumSum", ["a", "s"], ["b"])], {"s": numpy.array(0, "int64")}),
    "TopK": ([node("TopK", ["a", "s"], ["b", "i"])], {"s": whole(8)}),
    "Trilu": ([node("Trilu", ["a", "s"], ["b"])], {"s": numpy.array(1, "int64")}),
}  # fmt: skip


def saved(path: Path, reader: str) -> Path:
    nodes, constants = READERS[reader]
    around = [node("MatMul", ["x", "w"], ["h"]), node("Relu", ["h"], ["a"]), *nodes, node("MatMul", ["b", "v"], ["y"])]
    weights = {"w": floats(8, 8), "v": floats(8, 3), **constants}
    return save_graph(path, around, {"x": floats(4, 8)}, weights, ["y"])


def facts(profile: Profile) -> list[tuple[int, ...]]:
    return [(value.size_bytes, value.producer, *value.shape) for value in profile.activations]


@pytest.mark.parametrize("reader", list(READERS))
def test_both_ways_of_profiling_find_the_same_activations(tmp_path: Path, reader: str) -> None:
    path = saved(tmp_path / "m.onnx", reader)
    workload = load_workload(str(path))
    run = quick_profile(workload.forward, workload.model, workload.optimizer)
    fake = profile_workload(WorkloadFactory(str(path)), mode="fake", link=LINK)
    assert facts(run)
    assert facts(fake) == facts(run)
    assert [op.fingerprint for op in fake.ops[: fake.forward_ops]] == [
        op.fingerprint for op in run.ops[: run.forward_ops]
    ]
