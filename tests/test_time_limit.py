"""The suite's own net: what hangs is ended, and told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LISTS, SLOW_LIMIT_S

ROOT = Path(__file__).parents[1]
HANGING = """
import threading

def test_that_waits_for_a_thread_which_waits_for_it():
    thread = threading.Thread(target=threading.Event().wait, name="stuck-copy", daemon=True)
    thread.start()
    thread.join()

def test_after_it():
    pass
"""


def test_a_test_that_hangs_fails_alone_and_shows_its_threads(tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    command += ["-p", "no:cacheprovider", "-o", "timeout=1", str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert "1 failed, 1 passed" in finished.stdout, finished.stdout + finished.stderr
    assert "Stack of stuck-copy" in finished.stdout


def test_every_test_has_a_limit(request: pytest.FixtureRequest) -> None:
    assert 60 <= float(request.config.getini("timeout")) <= SLOW_LIMIT_S


@pytest.mark.slow
def test_a_slow_test_has_a_longer_one(request: pytest.FixtureRequest) -> None:
    marker = request.node.get_closest_marker("timeout")
    assert marker is not None
    assert marker.args == (SLOW_LIMIT_S,)


@pytest.mark.parametrize("mark", LISTS)
def test_every_line_of_a_list_names_a_test(mark: str) -> None:
    """What is renamed would come back into `make test` or `make test-fast` unnoticed."""
    for line in LISTS[mark]:
        name, _, function = line.partition("::")
        text = (ROOT / name).read_text()
        assert not function or f"def {function}(" in text, line
