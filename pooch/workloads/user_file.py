"""`file.py:function`: workloads of the user's files."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import isfunction
from pathlib import Path
from types import ModuleType
from typing import Any

from ..ground.errors import UnknownWorkload, WorkloadError, first_line
from ..ground.wording import why_no_file

EXAMPLE = (
    'def make(batch_size=8, device="cpu"): model, data = ..., ...; optimizer = ...; '
    "return pooch.Workload(model, lambda: model(data).mean(), optimizer)"
)


def load_function(path_text: str, function_name: str) -> Callable[..., Any]:
    """Import the file and return the function.

    Raises:
        UnknownWorkload: the file is missing, or has no such function.
        WorkloadError: it cannot be imported.
    """
    path = Path(path_text)
    if not path.is_file():
        raise UnknownWorkload(f"the workload file {path_text!r} {why_no_file(path)}: check the path")
    module = _import_file(path)
    function = getattr(module, function_name, None)
    if function is None:
        raise UnknownWorkload(_has_no(function_name, path_text, _defined_in(module)))
    if not callable(function):
        raise WorkloadError(
            f"{function_name!r} in {path_text} is not a function: name one that returns a pooch.Workload"
        )
    found: Callable[..., Any] = function
    return found


def _defined_in(module: ModuleType) -> list[str]:
    """The functions that the file defines itself."""
    return [name for name, item in vars(module).items() if isfunction(item) and item.__module__ == module.__name__]


def _has_no(name: str, path_text: str, functions: list[str]) -> str:
    close = difflib.get_close_matches(name, functions, n=1)
    if close:
        return f"{path_text} has no function {name!r}: did you mean {close[0]}?"
    has = f"it defines {', '.join(functions[:8])}" if functions else "it defines none"
    return f"{path_text} has no function {name!r}: {has}; a workload is a function such as {EXAMPLE}"


def _import_file(path: Path) -> ModuleType:
    name = f"pooch_workload_{path.stem}"
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or specification.loader is None:
        raise WorkloadError(f"the workload file {str(path)!r} is not a Python file: give file.py:function")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # dataclasses and pickle look modules up by name
    try:
        with _directory_on_path(path.resolve().parent):
            specification.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's file may raise anything
        del sys.modules[name]
        raised = f"{type(error).__name__}: {first_line(error)}"
        raise WorkloadError(f"importing {path} raised {raised}: fix the file") from error
    return module


@contextmanager
def _directory_on_path(directory: Path) -> Iterator[None]:
    """Let the file import modules from its folder, as it can when it is run."""
    sys.path.insert(0, str(directory))
    try:
        yield
    finally:
        if str(directory) in sys.path:
            sys.path.remove(str(directory))
