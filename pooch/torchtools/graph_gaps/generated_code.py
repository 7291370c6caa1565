"""Puts the operators of gaps into the Python code that Inductor writes around its kernels.

The operators are no nodes of the graph that Inductor compiles: they would change what is fused, and with it the last
bits. So its kernels are those of the graph without gaps, byte by byte. In the forward code, a result leaves after the
last line that names its memory. In the backward code, an input comes back before the first line that names it.

Nor does memory wait in such code for a later result of the same size, as Inductor has it wait where that does not raise
the peak of the graph: it would be one without gaps.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch

from ...ground.errors import UsageError
from .insertion import LEAVING, RETURNING

_LEAVE = "torch.ops.pooch_graph.leave.default"
_COME_BACK = "torch.ops.pooch_graph.come_back.default"
_CHECKS = ("assert_size_stride", "assert_alignment")  # which tensors without memory pass
UNKNOWN_BACKWARD = (
    "Inductor has written a backward graph in a form that Pooch does not know, so what has left in the forward graph "
    "could not come back: compile with backend='aot_eager', or train without a budget"
)


class UnknownCode(Exception):
    """The code is not of the form that is known."""


def rewrite_code() -> None:
    """Have code that Inductor writes from here on get gaps, where its graph is marked. May be repeated."""
    from torch._inductor.graph import GraphLowering

    if not hasattr(GraphLowering.codegen, _MARK):
        GraphLowering.codegen = _rewriting(GraphLowering.codegen)  # type: ignore[method-assign]


_MARK = "is_of_pooch"


def _rewriting(codegen: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(codegen)
    def with_gaps(self: Any) -> Any:
        meta = getattr(self.module, "meta", {})
        leaving, returning = meta.get(LEAVING), meta.get(RETURNING)
        if not (leaving or returning):
            return codegen(self)
        with torch._inductor.config.patch(allow_buffer_reuse=False):
            code, kernels = codegen(self)
        if leaving:
            try:
                code.value = with_leaving(code.value, leaving)
            except UnknownCode:
                return code, kernels  # all stays, and what comes back is what never left
        if returning:
            try:
                code.value = with_returning(code.value, returning)
            except UnknownCode:
                raise UsageError(UNKNOWN_BACKWARD) from None
        return code, kernels

    setattr(with_gaps, _MARK, True)
    return with_gaps


def with_leaving(code: str, positions: tuple[int, ...]) -> str:
    """Return the code of a forward graph in which results leave.

    Args:
        code: The code.
        positions: Of the results that leave.

    Raises:
        UnknownCode: The code has another form.
    """
    call = _call_of(code)
    returned = call.body[-1]
    if not isinstance(returned, ast.Return) or not isinstance(returned.value, ast.Tuple):
        raise UnknownCode
    results, lines = returned.value.elts, _lines_of(call)
    given = _arguments(call)
    memory = _Memory(lines, given)
    staying = [each for position, each in enumerate(results) if position not in positions]
    held = [memory.of(each) for each in [*staying, *given]]
    added: dict[int, list[str]] = {}
    last_leave: dict[ast.stmt, list[tuple[int, set[str]]]] = {}
    for position in positions:
        names = memory.of(results[position])
        if not names or any(names & each for each in held):
            continue
        last = memory.last_line(names)
        last_leave.setdefault(last, []).append((position, names))
    for last, leaving in last_leave.items():
        texts = [f"{MARKED}{position} = {_LEAVE}({ast.unparse(results[position])})" for position, _ in leaving]
        gone = sorted(memory.bound(set().union(*(names for _, names in leaving))))
        added[int(last.end_lineno or 0)] = _indented(last, *texts, f"del {', '.join(gone)}")
        for position, _ in leaving:
            results[position] = ast.Name(f"{MARKED}{position}")
    added.setdefault(returned.lineno - 1, []).extend(_indented(returned, ast.unparse(returned)))
    rest = code.splitlines()
    del rest[returned.lineno - 1 : returned.end_lineno]
    return _with_lines(rest, added)


MARKED = "pooch_left_"


def with_returning(code: str, devices: dict[str, str]) -> str:
    """Return the code of a backward graph in which inputs come back.

    Args:
        code: The code.
        devices: On which they were, by their names.

    Raises:
        UnknownCode: The code has another form.
    """
    call = _call_of(code)
    given = {name.id for name in _arguments(call)}
    lines = [line for line in _lines_of(call) if not _is_check(line)]
    added: dict[int, list[str]] = {}
    for name in sorted(given & set(devices)):
        first = next((line for line in lines if name in _names(line)), None)
        if first is not None:
            text = f"{name} = {_COME_BACK}({name}, torch.device({devices[name]!r}))"
            added.setdefault(first.lineno - 1, []).extend(_indented(first, text))
    return _with_lines(code.splitlines(), added)


def _call_of(code: str) -> ast.FunctionDef:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef) and node.name == "call" and len(node.body) > 1:
            return node
    raise UnknownCode


def _arguments(call: ast.FunctionDef) -> list[ast.Name]:
    """Return the names of what the code is given, which its first line takes from a list."""
    for line in call.body:
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Name) and line.value.id == "args":
            target = line.targets[0]
            names = target.elts if isinstance(target, ast.Tuple) else []
            return [each for each in names if isinstance(each, ast.Name)]
    raise UnknownCode


def _lines_of(call: ast.FunctionDef) -> list[ast.stmt]:
    """Return the lines behind the arguments and before the results. On an accelerator they are in one context."""
    contexts = [line for line in call.body if isinstance(line, ast.With)]
    lines = contexts[0].body if len(contexts) == 1 else call.body
    return [line for line in lines if not isinstance(line, ast.Return) and "args" not in _names(line)]


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _is_check(line: ast.stmt) -> bool:
    called = line.value.func if isinstance(line, ast.Expr) and isinstance(line.value, ast.Call) else None
    return isinstance(called, ast.Name) and called.id in _CHECKS


class _Memory:
    """Which variables of some lines share memory, as far as it can be told. Where it cannot, they count as sharing it.

    Args:
        lines: The lines.
        given: Variables that there are before them.
    """

    def __init__(self, lines: list[ast.stmt], given: list[ast.Name]) -> None:
        self._lines = lines
        assigned = [each for line in lines for each in _assigned(line)]
        self._variables = {name for name, _ in assigned} | {each.id for each in given}
        self._sharing: dict[str, set[str]] = {}
        for name, value in assigned:
            self._join({name, *self._shared(value)})

    def _shared(self, value: ast.expr) -> set[str]:
        """Return the variables the memory of which a value may share."""
        return set() if isinstance(value, ast.Call) and _is_fresh(value.func) else _names(value) & self._variables

    def _join(self, names: set[str]) -> None:
        joined = set().union(names, *(self._sharing.get(name, set()) for name in names))
        for name in joined:
            self._sharing[name] = joined

    def of(self, result: ast.expr) -> set[str]:
        """Return the variables that share the memory of a result."""
        return set().union(*(self._sharing.get(name, {name}) for name in self._shared(result)))

    def last_line(self, names: set[str]) -> ast.stmt:
        """Return the last line that names one of some variables."""
        return [line for line in self._lines if names & _names(line)][-1]

    def bound(self, names: set[str]) -> set[str]:
        """Return which of some variables are not deleted by any line."""
        deleted = set().union(*(_names(line) for line in self._lines if isinstance(line, ast.Delete)))
        return names - deleted


def _assigned(line: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Yield the variables that a line assigns, and what it assigns to each."""
    if isinstance(line, ast.Assign):
        for target in line.targets:
            for name in _names(target):
                yield name, line.value
    elif not isinstance(line, (ast.Expr, ast.Delete, ast.Pass)):
        raise UnknownCode


def _is_fresh(function: ast.expr) -> bool:
    """Whether a function returns memory of its own."""
    text = ast.unparse(function)
    if text.startswith("empty_strided") or text == "extern_kernels.convolution":
        return True
    if not text.startswith("torch.ops."):
        return False
    operator: Any = torch.ops
    for part in text.split(".")[2:]:
        operator = getattr(operator, part, None)
    schema = getattr(operator, "_schema", None)
    return schema is not None and all(each.alias_info is None for each in schema.returns)


def _indented(line: ast.stmt, *texts: str) -> list[str]:
    return [" " * line.col_offset + text for text in texts]


def _with_lines(lines: list[str], added: dict[int, list[str]]) -> str:
    """Return code with lines added, by how many there are before them."""
    for place in sorted(added, reverse=True):
        lines[place:place] = added[place]
    return "\n".join(lines) + "\n"
