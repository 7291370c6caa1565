"""Compiled graphs in a recorded backward pass: a slot begins where a graph reads what it has saved."""

from __future__ import annotations

from pooch.ir.plan import GRAPH
from pooch.profiler.slots import COME_BACK, with_graph_parts
from pooch.torchtools.memory_trace import Span

NODE = "CompiledFunctionBackward"
END = Span("end", 100, 101)


def operator(name: str, start_ns: int, end_ns: int, node: str = NODE) -> Span:
    return Span(name, start_ns, end_ns, node)


def unpack(start_ns: int, node: str = NODE) -> Span:
    return Span("unpack", start_ns, start_ns + 1, node)


def parts(operators: list[Span], unpacks: list[Span], event_times: list[int]) -> list[tuple[str, int, int]]:
    return [(each.name, each.start_ns, each.end_ns) for each in with_graph_parts(operators, unpacks, event_times, END)]


def test_what_kernels_allocate_after_a_read_is_in_a_slot_that_begins_with_the_read() -> None:
    found = parts([operator("mm", 10, 12), operator("mm", 40, 45)], [unpack(20)], [11, 25, 42])
    assert found == [("mm", 10, 20), (GRAPH, 20, 40), ("mm", 40, 100)]


def test_reads_between_which_nothing_happens_share_a_part_and_others_have_one_each() -> None:
    found = parts([operator("mm", 60, 62)], [unpack(20), unpack(22), unpack(30)], [25, 35])
    assert found == [(GRAPH, 20, 30), (GRAPH, 30, 60), ("mm", 60, 100)]


def test_a_read_just_before_an_operator_belongs_to_the_operator() -> None:
    assert parts([operator("mm", 30, 35)], [unpack(20)], [32]) == [("mm", 30, 100)]


def test_the_operator_that_reads_within_a_graph_is_no_op_of_the_step() -> None:
    back = operator(COME_BACK, 19, 22)
    assert parts([back, operator("mm", 40, 45)], [unpack(20)], [25, 42]) == [(GRAPH, 20, 40), ("mm", 40, 100)]


def test_what_is_not_compiled_is_as_it_was() -> None:
    other = "MmBackward0"
    assert parts([operator("mm", 40, 45, other)], [unpack(20, other)], [25, 42]) == [("mm", 40, 45)]
