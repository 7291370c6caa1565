"""Every error that Pooch raises on purpose.

Each message is one line that names the problem and the remedy; fields hold the numbers for programs. The command line
turns errors into exit codes (`exit_code`) and shows a traceback only with `--debug`.
"""

from __future__ import annotations

from .visible import visible

_LONGEST = 1200  # characters of a message; names and texts in a file may be endless
_END = 300  # of these are at its end, where the remedy is
_PUBLIC = f"{__package__.partition('.')[0]}.errors"  # where users import them from, and what tracebacks name


class PoochError(Exception):
    """Base of all errors raised on purpose.

    Args:
        message: the message. Names in it may come from files that somebody else has made, so it is brought into one
            line of a length that can be read, without characters that a terminal would obey.
        rest: whatever else a subclass holds.
    """

    exit_code = 1
    __module__ = _PUBLIC

    def __init_subclass__(cls) -> None:
        if cls.__module__ == __name__:
            cls.__module__ = _PUBLIC

    def __init__(self, message: object = "", *rest: object) -> None:
        super().__init__(_in_one_line(str(message)), *rest)


def _in_one_line(text: str) -> str:
    line = visible(" ".join(text.splitlines()))
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - _END]} ... {line[-_END:]}"


class UsageError(PoochError, ValueError):
    """An invalid argument, such as a budget that does not parse or an unknown policy."""

    exit_code = 2


class ProfileError(PoochError):
    """The step could not be profiled."""


class RankError(PoochError):
    """Another rank of a distributed training has failed, or has not come. The message names it."""


class WorkloadError(PoochError):
    """The workload is unknown, cannot be loaded, or does not return a valid `Workload`."""


class UnknownWorkload(WorkloadError, UsageError):
    """No workload has that name, or its file or function does not exist."""

    exit_code = 2


class InfeasibleBudget(PoochError):
    """No plan fits into the budget.

    Attributes:
        budget_bytes: the budget.
        minimum_bytes: the smallest budget for which a plan was found.
        policy: name of the policy.
    """

    exit_code = 3

    def __init__(self, budget_bytes: int, minimum_bytes: int, policy: str = "ilp") -> None:
        from .units import format_bytes

        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes
        self.policy = policy
        super().__init__(
            f"no plan of policy {policy!r} fits into {format_bytes(budget_bytes)}; the smallest feasible "
            f"budget found is {format_bytes(minimum_bytes)} ({minimum_bytes} bytes): ask for at least that"
        )

    def __reduce__(self) -> tuple[type[InfeasibleBudget], tuple[int, int, str]]:
        return (type(self), (self.budget_bytes, self.minimum_bytes, self.policy))


class InfeasibleTier(PoochError):
    """What has to leave the device does not fit into the swap tier.

    Attributes:
        tier_bytes: what the tier may take.
        minimum_bytes: the least that it would have to take.
    """

    exit_code = 3

    def __init__(self, tier_bytes: int, minimum_bytes: int, limited_by: str = "host budget") -> None:
        from .units import format_bytes

        self.tier_bytes = tier_bytes
        self.minimum_bytes = minimum_bytes
        self.limited_by = limited_by
        super().__init__(
            f"parameters, gradients and the optimizer's state have to leave the device, and the swap tier may take "
            f"{format_bytes(tier_bytes)}: they need {format_bytes(minimum_bytes)} ({minimum_bytes} bytes) there; raise "
            f"the {limited_by} to that"
        )

    def __reduce__(self) -> tuple[type[InfeasibleTier], tuple[int, int, str]]:
        return (type(self), (self.tier_bytes, self.minimum_bytes, self.limited_by))


class ReplayDiffers(PoochError, RuntimeError):
    """What was computed again is not what was there, and no copy is left of that.

    It is raised before a gradient is computed from the difference. The recipe is not used again in the run, so the
    step can be repeated.
    """


class InvalidSchedule(PoochError):
    """A schedule that cannot be executed correctly; a defect of Pooch or of a plan that was changed by hand."""


class InvalidLayout(PoochError):
    """Blocks in an arena overlap or lie outside of it; a defect of Pooch, or of a layout that was changed by hand."""


class PlanMismatch(PoochError):
    """The plan was made for another model, or the step left the profiled path under `on_mismatch="error"`."""


class TierError(PoochError):
    """The swap tier (spill file, pinned host memory) cannot be used.

    Attributes:
        kind: what is wrong with it, in a word or two. Each kind is told once.
    """

    def __init__(self, text: str = "", kind: str = "other") -> None:
        self.kind = kind
        super().__init__(text)


class ProcessEnded(PoochError):
    """A child process could not be started, or ended before its answer. The message says what it said last."""


class WireError(PoochError):
    """Something cannot pass between processes: the data of one is not what another may be told."""


class FileFormatError(PoochError):
    """A file is unreadable, truncated, of another kind, or written by a newer version."""


class MissingFile(FileFormatError, UsageError):
    """A file that was given does not exist."""

    exit_code = 2


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
