"""Runs a script or a module in this process, as `python` would."""

from __future__ import annotations

import io
import os
import pkgutil
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

from ..ground.errors import UsageError


def script_runner(script: str, arguments: Sequence[str]) -> Callable[[], None]:
    """Return what runs `python SCRIPT ARGUMENTS...` in this process. It raises what the script raises.

    Args:
        script: The path of a file, or of a directory or ZIP archive with a `__main__.py`.
        arguments: What follows in `sys.argv`.

    Raises:
        UsageError: There is no such file, or it cannot be read.
    """
    path = Path(script)
    if script == "-":
        raise UsageError("a script is not read from standard input: give the path of a file, or -m MODULE")
    if not path.exists():
        raise UsageError(f"there is no script {script}: give the path of a Python file, or -m MODULE")
    is_package = pkgutil.get_importer(str(path.resolve())) is not None
    if is_package and path.is_dir() and not any(path.glob("__main__.py*")):
        raise UsageError(f"the directory {script} has no __main__.py: give the path of a Python file, or -m MODULE")

    full = os.path.abspath(script)  # noqa: PTH100 - `python` does not resolve links here

    def run() -> None:
        if is_package:
            with _as_main([script, *arguments], full):
                runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
            return
        with _as_main([script, *arguments], str(path.resolve().parent)) as module:
            vars(module).update(__file__=full, __cached__=None, __loader__=SourceFileLoader("__main__", full))
            exec(_code_of(full), vars(module))

    return run


def module_runner(name: str, arguments: Sequence[str]) -> Callable[[], None]:
    """Return what runs `python -m NAME ARGUMENTS...` in this process. It raises what the module raises.

    Args:
        name: The name of a module, or of a package with a `__main__`.
        arguments: What follows in `sys.argv`.
    """

    def run() -> None:
        with _as_main(["-m", *arguments], str(Path.cwd())):
            runpy._run_module_as_main(name)  # type: ignore[attr-defined]

    return run


@contextmanager
def _as_main(argv: list[str], folder: str) -> Iterator[ModuleType]:
    """Give the program an empty module `__main__`, its arguments, and the folder from which it imports first."""
    module = ModuleType("__main__")
    vars(module).update(__builtins__=sys.modules["builtins"], __annotations__={}, __package__=None, __spec__=None)
    sys.modules["__main__"] = module
    sys.argv[:] = argv
    if not sys.flags.safe_path:
        sys.path[0] = folder  # in place of that of the `pooch` command
    try:
        yield module
    except SystemExit:
        raise
    except BaseException as error:
        _show_without_callers(error)
        raise


def _code_of(path: str) -> CodeType:
    with io.open_code(path) as file:
        code: CodeType | None = pkgutil.read_code(file)  # a .pyc file
    if code is None:
        with io.open_code(path) as file:
            return compile(file.read(), path, "exec", dont_inherit=True)
    return code


def _show_without_callers(error: BaseException) -> None:
    """Have the traceback of an error that nobody catches begin in the program, like that of `python`.

    The error itself goes on to the top, where Python sets the exit code, and tells signals from errors.
    """
    begin = error.__traceback__
    while begin is not None and begin.tb_frame.f_code.co_filename == __file__:
        begin = begin.tb_next
    show = sys.excepthook  # the program may have one of its own

    def shown(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        if value is error:
            value, traceback = value.with_traceback(begin), begin
        show(kind, value, traceback)

    sys.excepthook = shown
