from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pooch.autopilot.kept_costs import ANEW_VARIABLE
from pooch.executor.floor import Floor
from pooch.ground.live_objects import freeze_known
from pooch.torchtools import watch
from pooch.torchtools.cuda_only import forget_blas_workspaces
from tests.chosen_device import chosen_device
from tests.executor.copiers import use_copier
from tests.executor.native_mutations import SOURCES_VARIABLE
from tests.simulated_cuda.mistakes import is_simulated, take_mistakes
from tests.sweeps import SECONDS_VARIABLE, commit_number, rotated, skip_if_late

# A shell starts what runs in its background with interrupts ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

SLOW_LIMIT_S = 1200
MOST_LOOKED_THROUGH = 100_000  # objects: a collection takes some hundredths of a second
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
os.environ.setdefault(ANEW_VARIABLE, "1")  # what a test sees does not depend on which ones ran before


def listed_in(file: str) -> frozenset[str]:
    """The tests, and files of tests, that a file beside this one lists."""
    lines = (Path(__file__).parent / file).read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


LISTS = {"sweep": listed_in("sweeps.txt"), "seconds": listed_in("seconds.txt")}


def pytest_configure() -> None:
    """Build what watches steps before any test, so that none tells of it. A mutated one is built by its own fixture."""
    if SOURCES_VARIABLE not in os.environ:
        watch.LIBRARY.get()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test` and `make test-fast` leave out. A slow test may take longer before it counts as hanging."""
    for item in items:
        name = item.nodeid.partition("[")[0]
        for mark, listed in LISTS.items():
            if name in listed or name.partition("::")[0] in listed:
                item.add_marker(mark)
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT_S))
    if os.environ.get(SECONDS_VARIABLE):
        items[:] = rotated(items, commit_number())


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out the sweeps that the time does not suffice for."""
    if item.get_closest_marker("sweep"):
        skip_if_late()


def pytest_runtest_teardown() -> None:
    """A test that failed must not hold its tensors, which would take a part of the budgets of those after it."""
    for name in ("last_traceback", "last_value", "last_exc"):
        vars(sys).pop(name, None)
    if torch.backends.cuda.is_built() and torch.cuda.is_initialized():
        forget_blas_workspaces()  # there is one for each stream that a test has multiplied on


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> None:
    """What was imported is nobody's garbage: with all tests and frameworks there, looking through it again in every
    collection, of which each profile makes some, takes a third of the time.
    """
    if len(gc.get_objects()) > MOST_LOOKED_THROUGH:  # at first, and where much was imported since
        gc.collect()
        freeze_known()


@pytest.fixture(autouse=True)
def _graphs_let_go(request: pytest.FixtureRequest) -> Iterator[None]:
    """What tests have compiled holds their models, which would take a part of the budgets of those after them."""
    yield
    if "compiled" in request.node.path.name:
        torch._dynamo.reset()
        gc.collect()


# Where what leaves beneath a plan is tested too. Elsewhere a plan is looked at by itself.
WITH_FLOOR = {"test_floor.py", "test_watching_the_budget.py", "test_guarding.py", "test_path.py", "hostile"}


@pytest.fixture(autouse=True)
def plans_by_themselves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests of the process hold must not have values of a plan leave, except where that is tested."""
    if WITH_FLOOR.isdisjoint(request.path.parts):
        monkeypatch.setattr(Floor, "_counted", lambda _: None)


@pytest.fixture(params=["through Python", "Python"])
def copied_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What copies to spill files where system calls are replaced: a thread of C++ and one of Python do the same."""
    use_copier(request.param, monkeypatch)
    return str(request.param)


@pytest.fixture
def copied_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of Python copies to spill files: the test puts something in the place of its own functions."""
    use_copier("Python", monkeypatch)


@pytest.fixture(autouse=True)
def no_mistakes_on_the_device() -> Iterator[None]:
    """Where the tests run on the simulated CUDA device: whatever it found wrong fails the test that did it."""
    yield
    if is_simulated():
        assert take_mistakes() == []


@pytest.fixture(autouse=True)
def on_the_chosen_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """With POOCH_TEST_DEVICE=cuda, tests that are not about one kind of device make their tensors there."""
    chosen = chosen_device()
    if chosen.type == "cpu" or request.node.get_closest_marker("gpu"):
        yield
        return
    if request.node.get_closest_marker("cpu"):
        pytest.skip("about the CPU's own tier, or how it is measured")
    torch.set_default_device(chosen)
    yield
    torch.set_default_device("cpu")


@pytest.fixture(autouse=True)
def deterministic_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """What runs on a GPU runs on kernels that give the same bits each time, unless a test is marked `any_kernels`."""
    is_about_a_gpu = request.node.get_closest_marker("gpu") is not None or chosen_device().type == "cuda"
    takes_any = request.node.get_closest_marker("any_kernels") is not None
    if not is_about_a_gpu or takes_any or not torch.cuda.is_available():
        yield
        return
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def without_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another budget is held on the device already."""
    monkeypatch.setattr(Floor, "_counted", lambda _: None)
