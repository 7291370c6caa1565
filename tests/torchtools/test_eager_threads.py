"""Nothing is compiled in one thread for a while, and other threads notice nothing of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from pooch.torchtools.eager_threads import eager_in_this_thread

pytestmark = pytest.mark.cpu

RUNS: list[int] = []


def noting(graph: torch.fx.GraphModule, _: object) -> Any:
    """A backend that notes in which threads graphs run."""

    def run(*args: Any) -> Any:
        RUNS.append(threading.get_ident())
        return graph.forward(*args)

    return run


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    RUNS.clear()
    yield
    torch._dynamo.reset()


def doubled(value: torch.Tensor) -> torch.Tensor:
    return value * 2


def test_a_compiled_function_runs_as_written_there_and_compiled_elsewhere() -> None:
    compiled = torch.compile(doubled, backend=noting)
    compiled(torch.ones(3))
    with eager_in_this_thread():
        with eager_in_this_thread():
            compiled(torch.ones(3))
        compiled(torch.ones(3))
        assert len(RUNS) == 1
        with ThreadPoolExecutor(1) as others:
            others.submit(compiled, torch.ones(3)).result()
        assert len(RUNS) == 2
    compiled(torch.ones(3))
    assert [each == threading.get_ident() for each in RUNS] == [True, False, True]


def test_one_that_is_compiled_as_a_whole_may_run_as_written() -> None:
    compiled = torch.compile(doubled, backend=noting, fullgraph=True)
    with eager_in_this_thread():
        assert compiled(torch.ones(3)).tolist() == [2, 2, 2]
    assert not RUNS


def test_whichever_thread_leaves_last_all_compile_afterwards() -> None:
    first, second = eager_in_this_thread(), eager_in_this_thread()
    compiled = torch.compile(doubled, backend=noting)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as another:
        one.submit(first.__enter__).result()
        another.submit(second.__enter__).result()
        one.submit(first.__exit__, None, None, None).result()
        another.submit(second.__exit__, None, None, None).result()
        for each in one, another:
            each.submit(compiled, torch.ones(3)).result()
    compiled(torch.ones(3))
    assert len(set(RUNS)) == 3


@pytest.mark.parametrize("stance", ["force_eager", "eager_then_compile"])
def test_the_stance_of_the_program_is_kept(stance: Any) -> None:
    compiled = torch.compile(doubled, backend=noting)
    with torch.compiler.set_stance(stance):
        with eager_in_this_thread():
            compiled(torch.ones(3))
        compiled(torch.ones(3))
        assert not RUNS
        compiled(torch.ones(3))
        assert len(RUNS) == (stance != "force_eager")
    compiled(torch.ones(3))
    assert len(RUNS) == (1 if stance == "force_eager" else 2)
