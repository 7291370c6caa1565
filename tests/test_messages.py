"""Lines for the user: on standard error unless the program shows them otherwise, never twice, and silent on request."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pooch.ground import messages
from pooch.ground.wording import error_text

TEXT = "the budget is 60.00 MiB"


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    root, own = logging.getLogger(), messages.LOGGER
    kept = list(root.handlers), list(own.handlers), own.level, own.propagate, own.disabled
    yield
    root.handlers[:], own.handlers[:] = kept[:2]
    own.level, own.propagate, own.disabled = kept[2:]
    logging.disable(logging.NOTSET)


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    captured = capsys.readouterr()
    return [line for line in (captured.err + captured.out).splitlines() if TEXT in line]


def test_by_default_a_line_stands_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    messages.tell(f"{TEXT}\x1b[31m")
    messages.warn(TEXT)
    assert capsys.readouterr().err == f"pooch: {TEXT}\\x1b[31m\npooch: {TEXT}\n"


def test_standard_error_is_what_it_is_at_that_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        messages.tell(TEXT)
        assert stream.getvalue() == f"pooch: {TEXT}\n"
    stream.close()
    messages.tell(TEXT)  # nobody can read it, and training goes on


@pytest.mark.parametrize("stream", ["stderr", "stdout"])
def test_basic_config_shows_it_once_in_its_own_way(stream: str, capsys: pytest.CaptureFixture[str]) -> None:
    logging.basicConfig(stream=getattr(sys, stream), format="%(levelname)s of %(name)s: %(message)s", force=True)
    messages.tell(TEXT)
    assert shown(capsys) == [f"INFO of pooch: {TEXT}"]


def test_a_handler_that_keeps_an_older_standard_error_shows_it_once(capfd: pytest.CaptureFixture[str]) -> None:
    with os.fdopen(2, "w", closefd=False) as stream:
        logging.basicConfig(stream=stream, force=True)
        messages.tell(TEXT)
    assert capfd.readouterr().err.count(TEXT) == 1


def test_a_log_file_gets_it_as_well(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    logging.basicConfig(filename=tmp_path / "log", force=True)
    messages.tell(TEXT)
    logging.getLogger().handlers[0].close()
    assert shown(capsys) == [f"pooch: {TEXT}"]
    assert (tmp_path / "log").read_text() == f"INFO:pooch:{TEXT}\n"


def test_a_root_handler_for_errors_alone_hides_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    logging.basicConfig(stream=sys.stderr, force=True)
    logging.getLogger().handlers[0].setLevel(logging.ERROR)
    messages.warn(TEXT)
    assert shown(capsys) == [f"pooch: {TEXT}"]


@pytest.mark.parametrize("is_null", [True, False])
def test_a_handler_on_the_logger_takes_over(is_null: bool, capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    messages.LOGGER.addHandler(logging.NullHandler() if is_null else logging.StreamHandler(stream))
    messages.tell(TEXT)
    assert shown(capsys) == []
    assert stream.getvalue() == ("" if is_null else f"{TEXT}\n")


def test_levels_silence_it_but_not_what_a_command_has_to_say(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("pooch").setLevel(logging.WARNING)
    messages.tell(TEXT)
    assert shown(capsys) == []
    messages.warn(TEXT)
    assert shown(capsys) == [f"pooch: {TEXT}"]
    logging.disable(logging.CRITICAL)
    messages.warn(TEXT)
    assert shown(capsys) == []
    messages.report(TEXT, speaker="pooch (rank 1)")
    assert shown(capsys) == [f"pooch (rank 1): {TEXT}"]


def test_a_second_copy_of_the_package_does_not_make_both_silent(capsys: pytest.CaptureFixture[str]) -> None:
    messages._set_up()
    messages.report(TEXT, speaker="pooch (rank 0)")
    assert shown(capsys) == [f"pooch (rank 0): {TEXT}"]


def test_of_a_long_message_of_a_library_both_ends_are_told() -> None:
    told = error_text(
        RuntimeError(f"Load failed: {'Model::Model(onnx::ModelProto&&) ' * 20}\n version 14, at most 13.\n")
    )
    assert len(told) == 300
    assert told.startswith("Load failed: ")
    assert told.endswith("version 14, at most 13")
    assert error_text(RuntimeError("no such file.")) == "no such file"
    assert error_text(RuntimeError(""), "no message") == "no message"
