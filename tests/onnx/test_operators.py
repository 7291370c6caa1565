"""Every operator against onnxruntime: outputs alike, in the file's own opset; and each is covered by a case."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from onnx import helper, numpy_helper

from pooch.onnx import operators as _operators  # noqa: F401 - fills the registry
from pooch.onnx.building import build_model
from pooch.onnx.dimensions import input_shapes
from pooch.onnx.reading import opset_of, read_model
from pooch.onnx.registry import OPERATORS
from tests.onnx.support import OPSET, run_onnxruntime, save_graph

FLOAT = numpy.float32
GENERATOR = numpy.random.default_rng(3)


def floats(*shape: int, low: float = -2.0, high: float = 2.0) -> numpy.ndarray[Any, Any]:
    return GENERATOR.uniform(low, high, shape).astype(FLOAT)


def ints(*values: Any) -> numpy.ndarray[Any, Any]:
    return numpy.array(values, dtype=numpy.int64)


def scalar(value: Any, dtype: Any = FLOAT) -> numpy.ndarray[Any, Any]:
    return numpy.array(value, dtype=dtype)


@dataclass(frozen=True)
class Case:
    """One node: its inputs in order (None: left out); those after the first are stored unless they are data."""

    kind: str
    inputs: tuple[Any, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    data: int = 1  # inputs that come at run time
    outputs: int = 1
    opset: int = OPSET
    label: str = ""
    then: tuple[tuple[int | None, str], ...] = ()  # nodes that read its sequence, each with a position in it

    def __str__(self) -> str:
        return f"{self.kind}{'-' if self.label else ''}{self.label}" + (
            f"-opset{self.opset}" if self.opset != OPSET else ""
        )


X, Y = floats(2, 3, 4), floats(2, 3, 4)
POSITIVE, SMALL, ABOVE_ONE = floats(2, 5, low=0.1), floats(2, 5, low=-0.9, high=0.9), floats(2, 5, low=1.1, high=3.0)
IMAGE, LINE, VOLUME = floats(2, 4, 9, 8), floats(2, 4, 11), floats(1, 2, 6, 5, 7)
TRUE, FALSE = X > 0, Y > 0
WHOLE = GENERATOR.integers(1, 9, (2, 5)).astype(numpy.int64)
SEQUENCE = floats(5, 2, 3)
UNPOOLED = (numpy.arange(24).reshape(2, 3, 2, 2) * 4 + 1).astype(numpy.int64)  # a place in each window of 2 x 2
RANDOM = {"RandomNormalLike", "RandomUniformLike", "Bernoulli"}
CLEAR_OF_RUNTIME = {"CumProd"}  # onnxruntime does not have it yet


def one(kind: str, x: Any = X, **attributes: Any) -> Case:
    return Case(kind, (x,), attributes, label="".join(f"{k}={v}" for k, v in attributes.items()))


def two(kind: str, left: Any = X, right: Any = Y, **attributes: Any) -> Case:
    return Case(kind, (left, right), attributes, data=2)


def recurrent(kind: str, gates: int, direction: str = "forward", states: int = 0, **attributes: Any) -> Case:
    count = 2 if direction == "bidirectional" else 1
    weights = floats(count, gates * 4, 3), floats(count, gates * 4, 4), floats(count, 2 * gates * 4)
    start = tuple(floats(count, 2, 4) for _ in range(states))
    outputs = 3 if kind == "LSTM" else 2
    given = {"hidden_size": 4, "direction": direction, **attributes}
    inputs = (SEQUENCE, *weights) + ((None, *start) if start else ())
    return Case(kind, inputs, given, outputs=outputs, label=f"{direction}{states}")


CASES = [
    *(one(k) for k in ("Abs", "Atan", "Ceil", "Cos", "Erf", "Exp", "Floor", "HardSwish", "Identity", "IsNaN", "Mish")),
    *(one(k) for k in ("Neg", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Softplus", "Softsign", "Tan", "Tanh")),
    *(one(k) for k in ("Cosh", "Sinh", "Asinh", "Celu", "Elu", "Selu", "LeakyRelu", "Gelu", "HardSigmoid")),
    one("ThresholdedRelu"),
    *(one(k, SMALL) for k in ("Acos", "Asin", "Atanh")), one("Acosh", ABOVE_ONE), one("Not", TRUE),
    *(one(k, POSITIVE) for k in ("Log", "Reciprocal", "Sqrt")), one("BitwiseNot", WHOLE),
    one("Gelu", approximate="tanh"), one("Elu", alpha=0.5), one("LeakyRelu", alpha=0.3),
    Case("Swish", (X,), {"alpha": 1.5}, opset=24), Case("Swish", (X,), opset=24, label="silu"),
    *(two(k) for k in ("Add", "Sub", "Mul", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")),
    *(two(k) for k in ("Max", "Min", "Sum", "Mean")), *(two(k, TRUE, FALSE) for k in ("And", "Or", "Xor")),
    *(two(k, WHOLE, WHOLE[::-1].copy()) for k in ("BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Mod")),
    two("Pow", floats(2, 5, low=0.5), SMALL), Case("Pow", (X, scalar(2.0)), label="number"), two("Mod", X, Y, fmod=1),
    Case("Add", (X, scalar(0.25)), label="number"), Case("Div", (WHOLE, scalar(2, numpy.int64)), label="number"),
    Case("Where", (TRUE, X, Y), data=3), Case("Where", (TRUE, scalar(0.0), Y), data=1, label="number"),
    Case("Clip", (X, scalar(-0.5), scalar(1.0))), Case("Clip", (X, None, scalar(1.0)), label="above"),
    Case("Clip", (X,), {"min": -0.5, "max": 0.5}, opset=10),
    Case("Clip", (X, scalar(-0.5), scalar(1.0)), data=3, label="data"),
    Case("Clip", (X, scalar(-0.5), scalar(1.0)), data=2, label="lowest"),
    one("Shrink", lambd=0.7, bias=0.2), one("Shrink"), one("Det", floats(2, 3, 3)),
    Case("IsInf", (numpy.where(X > 1, numpy.inf, -numpy.inf).astype(FLOAT),), {"detect_negative": 0}),
    Case("PRelu", (IMAGE, floats(4, 1, 1))), Case("PRelu", (IMAGE, floats(1, 1, 8)), label="last"),
    Case("Dropout", (X,)), Case("Dropout", (X,), {"ratio": 0.3}, opset=10),
    # shapes
    one("Cast", to=1), one("Cast", to=7), Case("Cast", (WHOLE,), {"to": 1}, label="int"), two("CastLike", WHOLE, X),
    one("Shape"), one("Shape", start=1, end=3), one("Size"), one("Flatten", axis=2), one("Flatten", axis=-1),
    Case("Constant", (), {"value_floats": [1.0, 2.0]}), Case("Constant", (), {"value_int": 3}, label="int"),
    Case("ConstantOfShape", (ints(2, 3),), {"value": numpy_helper.from_array(numpy.array([5], dtype=FLOAT))}, data=0),
    Case("Range", (scalar(2, numpy.int64), scalar(9, numpy.int64), scalar(3, numpy.int64)), data=0),
    one("EyeLike", floats(3, 4), k=1), Case("Reshape", (X, ints(0, -1))),
    Case("Reshape", (X, ints(4, 6)), label="plain"),
    Case("Squeeze", (floats(2, 1, 3, 1), ints(1, -1))), Case("Squeeze", (floats(2, 1, 3),), {"axes": [1]}, opset=11),
    Case("Squeeze", (floats(2, 1, 3, 1),), label="all"), Case("Unsqueeze", (X, ints(0, -1))),
    Case("Unsqueeze", (X,), {"axes": [1, 3]}, opset=11), one("Transpose", perm=[2, 0, 1]), one("Transpose"),
    Case("Expand", (floats(3, 1), ints(2, 1, 4))), Case("Tile", (X, ints(1, 2, 3))), two("Concat", axis=1),
    two("Concat", axis=-1), Case("Split", (floats(6, 2), ints(1, 2, 3)), outputs=3),
    Case("Split", (floats(7, 2),), {"num_outputs": 3}, outputs=3, label="equal"),
    Case("Split", (floats(6, 2),), {"split": [2, 4]}, outputs=2, opset=11),
    Case("Slice", (X, ints(1), ints(9), ints(2))),
    Case("Slice", (X, ints(-1, 0), ints(-99, 3), ints(2, 1), ints(-2, 2)), label="backwards"),
    Case("Slice", (X,), {"starts": [0, 1], "ends": [1, -1], "axes": [0, 2]}, opset=9),
    Case("Slice", (X, ints(3), ints(1), ints(2)), label="empty"),
    Case("Pad", (IMAGE, ints(0, 0, 1, 2, 0, 0, 3, 1), scalar(1.5))),
    Case("Pad", (IMAGE, ints(2, 1), None, ints(3)), label="axes"),
    *(Case("Pad", (IMAGE, ints(0, 0, 1, 2, 0, 0, 3, 1)), {"mode": m}, label=m) for m in ("reflect", "edge", "wrap")),
    Case("Pad", (X,), {"pads": [0, 1, 0, 1, 0, 2], "value": 2.0}, opset=10),
    Case("Trilu", (floats(2, 4, 4), scalar(1, numpy.int64))), one("Trilu", floats(4, 4), upper=0),
    *(one("DepthToSpace", floats(1, 8, 2, 3), blocksize=2, mode=m) for m in ("DCR", "CRD")),
    one("SpaceToDepth", floats(1, 2, 4, 6), blocksize=2),
    # sequences: see also the graphs below
    Case("SplitToSequence", (floats(6, 2), ints(1, 2, 3)), {"axis": 0}, then=((1, "SequenceAt"),)),
    Case("SplitToSequence", (floats(7, 2), scalar(3, numpy.int64)), then=((-1, "SequenceAt"),), label="size"),
    Case("SplitToSequence", (X,), {"axis": 1, "keepdims": 0}, then=((2, "SequenceAt"),), label="ones"),
    Case("SplitToSequence", (X,), {"axis": 1}, then=((None, "ConcatFromSequence"),), label="kept"),
    Case("SequenceConstruct", (X, Y), data=2, then=((0, "SequenceAt"),)),
    Case("SequenceConstruct", (X, Y), then=((None, "ConcatFromSequence"),), label="constant"),
    Case("SequenceConstruct", (X, Y), data=2, then=((None, "SequenceLength"),), label="length"),
    Case("SequenceConstruct", (X, Y), data=2, then=((1, "SequenceErase"), (-1, "SequenceAt")), label="erase"),
    Case("SequenceConstruct", (X, Y), data=2, then=((1, "SequenceInsert"), (0, "SequenceAt")), label="insert"),
    Case("SequenceEmpty", (), data=0, then=((None, "SequenceInsert"), (0, "SequenceAt"))),
    Case("OneHot", (ints(0, 2, -1), scalar(4, numpy.int64), floats(2)), {"axis": 0}),
    # indexing
    Case("Gather", (ints([1, -1], [0, 3]), floats(4, 5)), label="table"),  # its table is stored: see `stored_first`
    Case("Gather", (X, ints(2, 0)), {"axis": 2}),
    Case("Gather", (X, scalar(-1, numpy.int64)), {"axis": 1}, label="one"),
    Case("GatherElements", (X, GENERATOR.integers(-3, 3, (2, 2, 4))), {"axis": 1}),
    Case("GatherND", (X, ints([0, 1], [1, 2]))),
    Case("GatherND", (X, ints([1], [0])), {"batch_dims": 1}, label="batch"),
    Case("ScatterND", (X, ints([0, 1], [1, 2]), floats(2, 4))),
    Case("ScatterND", (X, ints([0, 1], [0, 1]), floats(2, 4)), {"reduction": "add"}, label="add"),
    *(
        Case("ScatterElements", (X, GENERATOR.permuted(numpy.arange(3))[None, :2, None].repeat(2, 0), floats(2, 2, 1)),
             {"axis": 1, "reduction": r}, label=r)
        for r in ("none", "add", "mul", "max")
    ),
    Case("Scatter", (X, GENERATOR.integers(0, 1, (2, 1, 4)), floats(2, 1, 4)), {"axis": 1}, opset=9),
    Case("TopK", (X, ints(2)), {"axis": 1}, outputs=2), Case("TopK", (X, ints(2)), {"largest": 0}, outputs=2),
    Case("TopK", (numpy.round(X), ints(3)), outputs=2, label="ties"), Case("CumSum", (X, scalar(1, numpy.int64))),
    Case("ReverseSequence", (SEQUENCE, ints(5, 3))),
    Case("ReverseSequence", (SEQUENCE, ints(2, 0, 1, 1, 2)), {"time_axis": 1, "batch_axis": 0}, label="batch"),
    Case("CumSum", (X, scalar(-1, numpy.int64)), {"exclusive": 1, "reverse": 1}, label="backwards"),
    Case("NonZero", (scalar([1, 0, 2], numpy.int64),), data=0),
    # reductions
    *(
        Case(f"Reduce{k}", (POSITIVE, ints(1)), {"keepdims": keep}, label=f"keep{keep}")
        for k in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")
        for keep in (0, 1)
    ),
    one("ReduceMean"), Case("ReduceSum", (X,), {"axes": [0, 2]}, opset=11),
    Case("ReduceSum", (X, ints()), {"noop_with_empty_axes": 1}, label="nothing"),
    one("ArgMax", axis=1), one("ArgMin", axis=-1, keepdims=0), one("Softmax"), one("Softmax", axis=1),
    one("LogSoftmax"),
    Case("Softmax", (X,), opset=11), Case("LogSoftmax", (X,), {"axis": 2}, opset=11),
    # products
    two("MatMul", X, floats(2, 4, 5)), Case("MatMul", (X, floats(4, 5)), label="weight"),
    Case("Gemm", (floats(3, 4), floats(5, 4), floats(5)), {"transB": 1}),
    Case("Gemm", (floats(4, 3), floats(4, 5), floats(3, 1)), {"transA": 1, "alpha": 0.5, "beta": 2.0}, label="scaled"),
    Case("Gemm", (floats(3, 4), floats(4, 5)), label="bare"),
    two("Einsum", X, floats(2, 4, 5), equation="bij,bjk->bik"),
    # windows
    Case("Conv", (IMAGE, floats(6, 4, 3, 3), floats(6)), {"pads": [1, 1, 1, 1], "strides": [2, 1]}),
    Case("Conv", (IMAGE, floats(6, 4, 3, 2)), {"pads": [1, 0, 2, 1]}, label="unequal"),
    Case("Conv", (IMAGE, floats(4, 2, 3, 3)), {"group": 2, "dilations": [2, 1]}, label="groups"),
    *(Case("Conv", (IMAGE, floats(4, 4, 3, 2)), {"auto_pad": p, "strides": [2, 2]}, label=p)
      for p in ("SAME_UPPER", "SAME_LOWER", "VALID")),
    Case("Conv", (LINE, floats(3, 4, 3)), label="line"), Case("Conv", (VOLUME, floats(3, 2, 3, 3, 3)), label="volume"),
    Case("ConvTranspose", (IMAGE, floats(4, 3, 3, 3), floats(3)), {"strides": [2, 2], "output_padding": [1, 0]}),
    Case("ConvTranspose", (IMAGE, floats(4, 3, 3, 3)), {"pads": [0, 1, 1, 1]}, label="unequal"),
    Case("ConvTranspose", (VOLUME, floats(2, 2, 2, 2, 2)), {"strides": [2, 2, 2], "group": 2}, label="volume"),
    one("MaxPool", IMAGE, kernel_shape=[3, 2], strides=[2, 2], pads=[1, 1, 1, 1]),
    one("MaxPool", IMAGE, kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1), one("MaxPool", LINE, kernel_shape=[2]),
    one("MaxPool", IMAGE, kernel_shape=[2, 2], pads=[0, 1, 1, 0]), one("MaxPool", VOLUME, kernel_shape=[2, 2, 2]),
    one("AveragePool", IMAGE, kernel_shape=[3, 2], pads=[1, 1, 1, 1]),
    one("AveragePool", IMAGE, kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1),
    one("AveragePool", IMAGE, kernel_shape=[2, 2], pads=[0, 1, 1, 0]),
    one("AveragePool", IMAGE, kernel_shape=[2, 2], pads=[0, 1, 1, 0], count_include_pad=1),
    one("GlobalAveragePool", VOLUME), one("GlobalMaxPool", IMAGE), one("GlobalLpPool", IMAGE, p=3),
    Case("MaxPool", (IMAGE,), {"kernel_shape": [2, 2], "strides": [2, 2]}, outputs=2, label="indices"),
    Case("MaxPool", (VOLUME,), {"kernel_shape": [2, 2, 2], "pads": [1] * 6}, outputs=2, label="padded"),
    Case("MaxUnpool", (floats(2, 3, 2, 2), UNPOOLED), {"kernel_shape": [2, 2], "strides": [2, 2]}, data=2),
    one("LpPool", IMAGE, kernel_shape=[2, 3], p=3), one("LpPool", IMAGE, kernel_shape=[3, 3], pads=[1, 0, 1, 2]),
    # sampling and signals
    *(
        Case("GridSample", (IMAGE, floats(2, 5, 6, 2, low=-1.2, high=1.2)),
             {"mode": m, "padding_mode": p, "align_corners": a}, data=2, label=f"{m}{p}{a}")
        for m, p, a in (("linear", "zeros", 0), ("nearest", "border", 0), ("cubic", "reflection", 1))
    ),
    Case("GridSample", (IMAGE, floats(2, 5, 6, 2)), {"mode": "bilinear"}, data=2, opset=16),
    Case("AffineGrid", (floats(2, 2, 3), ints(2, 3, 4, 5))),
    Case("AffineGrid", (floats(2, 3, 4), ints(2, 3, 4, 5, 6)), {"align_corners": 1}, label="volume"),
    Case("Col2Im", (floats(2, 8, 12), ints(4, 5), ints(2, 2))),
    Case("Col2Im", (floats(2, 8, 9), ints(5, 5), ints(2, 2)), {"strides": [2, 2], "pads": [1] * 4}, label="padded"),
    Case("DFT", (floats(2, 8, 3, 1), None, scalar(1, numpy.int64)), {"onesided": 1}),
    Case("DFT", (floats(2, 8, 3, 2), scalar(6, numpy.int64), scalar(-2, numpy.int64)), {"inverse": 1},
         label="inverse"),
    Case("DFT", (floats(2, 8, 2),), {"axis": 1}, opset=17),
    Case("STFT", (floats(2, 32, 1), scalar(4, numpy.int64), floats(8))),
    Case("STFT", (floats(2, 32, 1), scalar(4, numpy.int64), None, scalar(8, numpy.int64)), {"onesided": 0},
         label="both"),
    *(Case(k, (scalar(9, numpy.int64),), {"periodic": p}, data=0, label=str(p))
      for k in ("HannWindow", "HammingWindow", "BlackmanWindow") for p in (0, 1)),
    # norms
    Case("BatchNormalization", (IMAGE, floats(4), floats(4), floats(4), floats(4, low=0.5)), {"epsilon": 1e-3}),
    Case("InstanceNormalization", (IMAGE, floats(4), floats(4))),
    Case("LayerNormalization", (X, floats(4), floats(4))),
    Case("LayerNormalization", (X, floats(3, 4)), {"axis": 1}, label="two"),
    Case("LayerNormalization", (X, floats(4)), {"axis": 1}, label="broadcast"),
    Case("LayerNormalization", (X, floats(3, 4), floats(4)), {"axis": 1}, outputs=3, label="moments"),
    Case("RMSNormalization", (X, floats(4)), opset=23),
    Case("RMSNormalization", (X, floats(4)), {"axis": 1}, opset=23, label="two"),
    Case("GroupNormalization", (IMAGE, floats(4), floats(4)), {"num_groups": 2}, opset=21),
    one("LRN", IMAGE, size=3, alpha=0.01, beta=0.6, bias=1.5), one("LpNormalization", X, p=1),
    one("LpNormalization", X, p=2, axis=1), one("LpNormalization", numpy.zeros_like(X), p=2),
    one("MeanVarianceNormalization", IMAGE),
    # recurrent layers
    *(recurrent("LSTM", 4, d, s) for d in ("forward", "reverse", "bidirectional") for s in (0, 2)),
    *(recurrent("GRU", 3, d, s, linear_before_reset=1)
      for d in ("forward", "reverse", "bidirectional") for s in (0, 1)),
    *(recurrent("RNN", 1, d, s) for d in ("forward", "bidirectional") for s in (0, 1)),
    recurrent("RNN", 1, "reverse", 0, activations=["Relu"]),
    # attention
    Case("Attention", (floats(2, 4, 5, 8), floats(2, 2, 6, 8), floats(2, 2, 6, 8)), data=3, opset=23, label="grouped"),
    Case("Attention", (floats(2, 5, 8), floats(2, 5, 8), floats(2, 5, 8)),
         {"q_num_heads": 2, "kv_num_heads": 2, "is_causal": 1, "scale": 0.3}, data=3, opset=23, label="flat"),
    Case("Attention", (floats(1, 2, 3, 4), floats(1, 2, 3, 4), floats(1, 2, 3, 4), floats(3, 3)), data=3,
         opset=23, label="mask"),
    *(
        Case("RotaryEmbedding", (floats(2, 3, 5, 8), floats(9, 4), floats(9, 4), ints(*[[0, 3, 2, 1, 8]] * 2)),
             {"interleaved": i}, opset=23, label=f"interleaved{i}") for i in (0, 1)
    ),
    Case("RotaryEmbedding", (floats(2, 5, 24), floats(2, 5, 2), floats(2, 5, 2)),
         {"num_heads": 3, "rotary_embedding_dim": 4}, opset=23, label="flat"),
    # losses
    Case("SoftmaxCrossEntropyLoss", (floats(3, 5), ints(1, 4, 0)), outputs=2),
    Case("SoftmaxCrossEntropyLoss", (floats(3, 5), ints(1, 4, 0), floats(5, low=0.2)), {"ignore_index": 4},
         label="weights"),
    Case("NegativeLogLikelihoodLoss", (floats(3, 5, 2), ints([1, 4], [0, 2], [3, 3])), {"reduction": "sum"}),
    # resizing
    Case("Resize", (IMAGE, None, scalar([1, 1, 2, 3])),
         {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}, label="nearest"),
    *(
        Case("Resize", (IMAGE, None, None, ints(2, 4, 14, 5)),
             {"mode": m, "coordinate_transformation_mode": c}, label=m + c)
        for m, c in (("linear", "half_pixel"), ("linear", "align_corners"), ("cubic", "half_pixel"))
    ),
    Case("Resize", (VOLUME, None, scalar([1, 1, 2, 2, 2])), {"mode": "linear"}, label="volume"),
    *(
        Case("Resize", (IMAGE, None, scalar([1, 1, 1.6, 0.7])),
             {"mode": m, "coordinate_transformation_mode": c}, label=f"{m}-{c}-share")
        for m in ("nearest", "linear", "cubic")
        for c in ("half_pixel", "asymmetric", "align_corners", "half_pixel_symmetric")
    ),
    *(
        Case("Resize", (IMAGE, None, scalar([1, 1, 1.7, 0.6])), {"nearest_mode": n}, label=n)
        for n in ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")
    ),
    *(
        Case("Resize", (IMAGE, None, None, ints(2, 4, 5, 1)), {"mode": m, "antialias": a, "exclude_outside": e,
             "coordinate_transformation_mode": "pytorch_half_pixel"}, label=f"{m}-smooth{a}-inside{e}")
        for m in ("linear", "cubic") for a, e in ((0, 0), (1, 0), (1, 1)) if m == "cubic" or a or not e
    ),
    Case("Resize", (IMAGE, None, None, ints(2, 4, 5, 4)), {"mode": "linear", "antialias": 1, "exclude_outside": 1},
         label="as-PyTorch-smooths"),
    Case("Resize", (IMAGE, None, None, ints(5, 12)), {"mode": "linear", "axes": [2, 3]}, label="axes"),
    Case("Resize", (IMAGE, None, scalar([1, 2, 2, 2])), label="channels"),
    Case("Resize", (IMAGE, None, scalar([1, 1, 3, 2])), {"mode": "cubic", "cubic_coeff_a": -0.5}, label="coefficient"),
    Case("Resize", (LINE, None, scalar([1, 1, 3])), {"mode": "linear", "coordinate_transformation_mode": "asymmetric"},
         label="line"),
    Case("Upsample", (IMAGE, scalar([1, 1, 2, 2])), {"mode": "nearest"}, opset=9),
    Case("Upsample", (IMAGE, scalar([1, 1, 2, 2])), {"mode": "linear"}, opset=9, label="linear"),
]  # fmt: skip


def build(case: Case, path: Path) -> tuple[Any, dict[str, Any]]:
    names = ["" if each is None else f"i{position}" for position, each in enumerate(case.inputs)]
    arrays = dict(zip(names, case.inputs, strict=True))
    given = {name: arrays[name] for name in names[: case.data] if name}
    stored = {name: array for name, array in arrays.items() if name and name not in given}
    order = [names[1], names[0]] if (case.kind, case.label) == ("Gather", "table") else names
    outputs = [f"o{number}" for number in range(case.outputs)]
    nodes = [helper.make_node(case.kind, order, outputs, **case.attributes)]
    for number, (position, kind) in enumerate(case.then):
        reads, makes = [outputs[0]], [f"then{number}"]
        if kind == "SequenceInsert":
            reads.append("new")
            given["new"] = X
        if position is not None:
            reads.append(f"at{number}")
            stored[f"at{number}"] = scalar(position, numpy.int64)
        more = {"axis": 1} if kind == "ConcatFromSequence" else {}
        nodes.append(helper.make_node(kind, reads, makes, **more))
        outputs = makes
    if (case.data == 0 and not given) or OPERATORS[
        nodes[-1].op_type
    ].contents == frozenset():  # known while building: let data depend on it
        nodes += [helper.make_node("Cast", outputs, ["cast"], to=1), helper.make_node("Add", ["cast", "z"], ["sum"])]
        given["z"], outputs = scalar([0.5]), ["sum"]
    save_graph(path, nodes, given, stored, outputs, case.opset)
    proto = read_model(path)
    shapes = input_shapes(proto.graph, None, {})
    model = build_model(proto.graph, opset_of(proto, path), shapes, set(), "exported", path)
    return model, given


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_operator_computes_what_onnxruntime_does(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "one.onnx"
    model, given = build(case, path)
    results = model(*[torch.tensor(array) for array in given.values()])
    found = results if isinstance(results, tuple) else (results,)
    expected = run_onnxruntime(path, given)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


def test_every_operator_has_a_case() -> None:
    covered = {case.kind for case in CASES} | {kind for case in CASES for _, kind in case.then}
    assert covered | RANDOM | CLEAR_OF_RUNTIME == set(OPERATORS)


def test_the_documentation_lists_them_all() -> None:
    text = (Path(__file__).parents[2] / "docs" / "onnx.md").read_text().partition("## Operators")[2]
    assert text.replace(".", " ").replace(",", " ").split() == sorted(OPERATORS)
