"""What sessions with real and with fake tensors share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from ..ground.errors import PoochError, ProfileError, first_line
from ..torchtools.out_of_memory import is_out_of_memory
from .recorder import ForwardRecorder

Mode = Literal["run", "offload", "auto"]


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """How to profile a step.

    Attributes:
        accumulate: whether gradients live throughout the step. Otherwise they are created in the backward pass.
        warmup: number of plain steps before anything is measured.
        repeats: number of plain steps that are timed.
        mode: "run" (plain steps), "offload" (all saved tensors leave the device) or "auto" (plain steps if they fit,
            which a first one tells of which nothing stays that does not fit).
        workload: name of the workload, recorded in the profile.
        batch_size: recorded in the profile.
        memory_limit_bytes: maximum number of device bytes that the process may use, or None for what the device has
            left.
    """

    accumulate: bool = False
    warmup: int = 1
    repeats: int = 1
    mode: Mode = "auto"
    workload: str = ""
    batch_size: int = 0
    memory_limit_bytes: int | None = None


FIRST_DIFFERS = (
    "the first forward pass ran other ops than the next one, as where it makes what later ones read: the profile is "
    "that of later ones"
)


@contextmanager
def user_errors_named() -> Iterator[None]:
    """Reports errors of the user's model in one line; Pooch's own and out-of-memory errors pass unchanged."""
    try:
        yield
    except PoochError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ProfileError(f"the step raised {type(error).__name__}: {first_line(error)}") from error


def is_same_forward(first: ForwardRecorder, recorded: ForwardRecorder) -> bool:
    """Whether two forward passes ran the same ops."""
    expected, actual = ([op.fingerprint for op in each.ops] for each in (first, recorded))
    return actual == expected and len(recorded.values) == len(first.values)


def check_same_forward(first: ForwardRecorder, recorded: ForwardRecorder) -> None:
    """Checks that two forward passes ran the same ops.

    Raises:
        ProfileError: the forward pass changes from run to run.
    """
    if not is_same_forward(first, recorded):
        expected, actual = ([op.fingerprint for op in each.ops] for each in (first, recorded))
        pairs = enumerate(zip(expected, actual, strict=False))
        where = next((i for i, (before, now) in pairs if before != now), len(expected))
        raise ProfileError(
            f"the forward pass changes from run to run (first at op {where}): profile a step that does the same each "
            "time"
        )
