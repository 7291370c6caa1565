"""Jobs of a sweep in processes of their own, and the lines of what came of them."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def in_a_process(run: Callable[[Line, Connection], None], job: Line, limit_s: float) -> Line:
    """What a job in a process of its own answers, or why there is no answer.

    Args:
        run: does the job there, and sends the answer.
        job: what it is given.
        limit_s: after which the process is ended.
    """
    context = multiprocessing.get_context("forkserver")
    answer, to_answer = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(job, to_answer))
    process.start()
    to_answer.close()
    try:
        if not answer.poll(limit_s):
            return {"failure": f"no end after {limit_s} s"}
        found: Line = answer.recv()
    except EOFError:
        process.join()
        return {"failure": f"the process ended with exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join()
    return found


def stored(path: Path) -> dict[str, Line]:
    """Lines by their names; later ones replace earlier ones."""
    if not path.exists():
        return {}
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return {line["name"]: line for line in lines}
