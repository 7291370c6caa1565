"""Whether two profiles are of the same sequence of operators, apart from sizes and times."""

from __future__ import annotations

import re
from dataclasses import fields

from ...ir.profile import Op, Profile, Value

_SHAPE = re.compile(r"\[([\d,]*)\]")  # in a fingerprint: "aten.mm.default(float32[16,64])"
_SMALLER_THAN = re.compile(r"smaller than (\d+) bytes")

_FRAME = ("model_signature", "sizes", "forward_ops", "model_begin", "model_end")
_OP = ("name", "phase", "module", "reads", "writes", "refusal", "random")
_OF_THE_STEP = ("size_bytes", "allocated_bytes", "shape", "fixed", "packs")
_VALUE = tuple(f.name for f in fields(Value) if f.name not in _OF_THE_STEP)


def difference(left: Profile, right: Profile) -> str | None:
    """What is not the same in two profiles of one model: the first thing found, in one line, or None."""
    for name in _FRAME:
        if getattr(left, name) != getattr(right, name):
            return f"{name} is {getattr(left, name)} in one and {getattr(right, name)} in the other"
    if left.device.kind != right.device.kind or left.device.name != right.device.name:
        return f"one is of {left.device.name}, the other of {right.device.name}"
    for kind in ("ops", "values"):
        counts = len(getattr(left, kind)), len(getattr(right, kind))
        if counts[0] != counts[1]:
            return f"one has {counts[0]} {kind}, the other {counts[1]}"
    for one, other in zip(left.ops, right.ops, strict=True):
        found = _op_difference(one, other)
        if found:
            return f"op {one.index} ({one.name}): {found}"
    for first, second in zip(left.values, right.values, strict=True):
        found = _value_difference(first, second)
        if found:
            return f"value {first.id} ({first.label}): {found}"
    if left.anchors != right.anchors:
        return "their backward passes first read the values in different slots"
    return None


def _op_difference(left: Op, right: Op) -> str | None:
    for name in _OP:
        if getattr(left, name) != getattr(right, name):
            return f"its {name} is {getattr(left, name)!r} in one and {getattr(right, name)!r} in the other"
    ranks = [[len(shape) for shape in result_shapes(op)] for op in (left, right)]
    if ranks[0] != ranks[1] or _SHAPE.sub("", left.fingerprint) != _SHAPE.sub("", right.fingerprint):
        return f"its results are {left.fingerprint} in one and {right.fingerprint} in the other"
    return None


def _value_difference(left: Value, right: Value) -> str | None:
    for name in _VALUE:
        if getattr(left, name) != getattr(right, name):
            return f"its {name} is {getattr(left, name)!r} in one and {getattr(right, name)!r} in the other"
    if len(left.shape) != len(right.shape):
        return f"its shape is {left.shape} in one and {right.shape} in the other"
    fixed = [None if is_too_small(value) else value.fixed for value in (left, right)]
    if fixed[0] != fixed[1]:
        return f"it is fixed in one ({left.fixed}), and not or otherwise in the other ({right.fixed})"
    return None


def is_too_small(value: Value) -> bool:
    """Whether nothing but its size keeps a value from being an activation."""
    return value.fixed is not None and _SMALLER_THAN.fullmatch(value.fixed) is not None


def smallest_activation_bytes(profile: Profile) -> int:
    """The size below which the profiler made no activations, or 0 if no value of the profile was that small."""
    matches = (_SMALLER_THAN.fullmatch(value.fixed or "") for value in profile.values)
    return max((int(match[1]) for match in matches if match), default=0)


def result_shapes(op: Op) -> list[tuple[int, ...]]:
    """The shapes of an op's results, as its fingerprint tells them."""
    return [tuple(int(n) for n in text.split(",") if n) for text in _SHAPE.findall(op.fingerprint)]


def with_shapes(fingerprint: str, shapes: list[tuple[int, ...]]) -> str:
    """A fingerprint with other shapes of the results."""
    texts = iter(f"[{','.join(map(str, shape))}]" for shape in shapes)
    return _SHAPE.sub(lambda _: next(texts), fingerprint)
