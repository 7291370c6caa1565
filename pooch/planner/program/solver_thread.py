"""HiGHS in a thread of its own, so that nobody has to wait for it longer than he wants.

Its simplex method looks at neither its time limit nor a request to stop while it struggles with one basis, which was
seen to take 5 s. A Ctrl-C is noticed only between calls besides.
"""

from __future__ import annotations

import atexit
import math
import threading
import time
from typing import Any

POLL_S = 0.05
_left: list[threading.Thread] = []


def call_highs(solver: Any, problem: Any, latest_s: float) -> float | None:
    """Run HiGHS; leave it to itself where it is not done in time. It then stops at the next opportunity.

    Args:
        solver: PuLP's. problem: with a model of HiGHS's, which is read after the call.
        latest_s: seconds to wait at most; its own time limit is the solver's.

    Returns:
        None where it is done; else the dual bound that it had told (-inf without one), and nothing of the model may
        be touched any more.

    Raises:
        KeyboardInterrupt: in the main thread, once HiGHS has stopped.
    """
    model = problem.solverModel
    raised: list[BaseException] = []
    bounds = [-math.inf]

    def run() -> None:
        try:
            solver.callSolver(problem)
            type(model).resetGlobalScheduler(False)  # its workers belong to this thread; left alone they abort at exit
        except BaseException as error:  # noqa: BLE001  (handed to the thread that waits)
            raised.append(error)

    model.HandleUserInterrupt = True
    model.cbMipInterrupt += lambda event: bounds.append(max(bounds[-1], event.data_out.mip_dual_bound))
    thread = threading.Thread(target=run, name="pooch-solver", daemon=True)
    latest_s += time.monotonic()
    thread.start()
    try:
        while thread.is_alive():
            thread.join(POLL_S)
            if thread.is_alive() and time.monotonic() > latest_s:
                model.cancelSolve()
                _left.append(thread)
                return bounds[-1]
    except KeyboardInterrupt:
        model.cancelSolve()
        thread.join()
        raise
    if raised:
        raise raised[0]
    return None


@atexit.register
def _wait_for_those_left() -> None:
    """A solver that still runs while the interpreter goes down takes it down with an abort."""
    for thread in _left:
        thread.join()
