"""`file.py:function`: workloads of the user's files."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import WorkloadError, first_line


def load_function(path_text: str, function_name: str) -> Callable[..., Any]:
    """Import the file and return the function.

    Raises:
        WorkloadError: the file is missing, cannot be imported, or has no such function.
    """
    path = Path(path_text)
    if not path.is_file():
        raise WorkloadError(f"the workload file {path_text!r} does not exist: check the path")
    module = _import_file(path)
    function = getattr(module, function_name, None)
    if function is None:
        names = [name for name, item in vars(module).items() if callable(item) and not name.startswith("_")]
        has = ", ".join(names[:8]) or "no functions"
        raise WorkloadError(f"{path_text} has no function {function_name!r}: it has {has}")
    if not callable(function):
        raise WorkloadError(
            f"{function_name!r} in {path_text} is not a function: name one that returns a pooch.Workload"
        )
    found: Callable[..., Any] = function
    return found


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
