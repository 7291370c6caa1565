"""The `pooch` command, and the only place that turns errors into exit codes.

0: success. 1: an error, described in one line. 2: wrong usage. 3: no plan fits into the budget.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

import click

from ..ground.errors import PoochError, first_line
from .output import forget_printed, has_printed_json, print_json, say

SUCCESS, FAILED, WRONG_USAGE = 0, 1, 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; only `--debug` shows tracebacks."""
    from .commands import cli

    given = list(sys.argv[1:] if arguments is None else arguments)
    own = given[: given.index("exec")] if "exec" in given[:2] else given  # what follows may be meant for a script
    debug, as_json = "--debug" in own, "--json" in own
    forget_printed()
    try:
        program = cli.main(
            [*(each for each in own if each != "--debug"), *given[len(own) :]], prog_name="pooch", standalone_mode=False
        )
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - every error gets an exit code
        if debug:
            traceback.print_exc()
        return _reported(error, as_json)
    if callable(program):  # a user's, whose errors are not the command's
        program()
    return SUCCESS


def _reported(error: BaseException, as_json: bool) -> int:
    """Print the error in one line on stderr and, for `--json`, as a document on stdout. Return the exit code."""
    if isinstance(error, BrokenPipeError):  # the reader of the output closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SUCCESS
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        say(error.format_message(), err=True)
        return WRONG_USAGE
    text, code = _text_and_code(error)
    line = " ".join(text.split())
    if as_json and not has_printed_json():  # a document with what was measured says by itself what is wrong
        print_json({"error": line, "exit_code": code, "smallest_budget_bytes": getattr(error, "minimum_bytes", None)})
    say(f"pooch: {line}", err=True)
    return code


def _text_and_code(error: BaseException) -> tuple[str, int]:
    if isinstance(error, PoochError):
        return str(error), error.exit_code
    if isinstance(error, click.UsageError):
        where = error.ctx.command_path if error.ctx else "pooch"
        return f"{error.format_message()}{_remedy(error)} See `{where} --help`.", WRONG_USAGE
    if isinstance(error, click.ClickException):
        return error.format_message(), error.exit_code
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if _is_out_of_memory(error):
        remedy = "train under a plan (`pooch optimize`), or with a smaller --batch-size"
        return f"out of memory ({first_line(error)}): {remedy}", FAILED
    kind = type(error).__name__
    return f"unexpected {kind}: {error}; add --debug for the traceback, and please report it", FAILED


def _remedy(error: click.UsageError) -> str:
    """What click does not say of two mistakes of those who begin: no budget, or one before the command."""
    if isinstance(error, click.MissingParameter) and error.param is not None and error.param.name == "budget":
        return " Give bytes or a share, such as `--budget 16GiB` or `--budget 60%`."
    if isinstance(error, click.NoSuchOption) and error.ctx is not None and error.ctx.parent is None:
        return f" If it belongs to a command, write it after the command, as in `pooch exec {error.option_name} ...`."
    return ""


def _is_out_of_memory(error: BaseException) -> bool:
    if "torch" not in sys.modules:  # other errors of this kind are PyTorch's, and importing it takes long
        return isinstance(error, MemoryError)
    from ..torchtools.out_of_memory import is_out_of_memory

    return is_out_of_memory(error)
