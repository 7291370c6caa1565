"""All checks in turn, in a limited time."""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ...ground.errors import PoochError, first_line
from ...ground.progress import Progress, silent
from ...torchtools.accelerators import has_streams
from ...torchtools.training_state import seeded
from . import basics, software, tier, training
from .finding import Check, Finding, Patient

if TYPE_CHECKING:
    import torch

LIMIT_S = 170.0  # of the three minutes that are promised, less what starting takes
_SEED = 0
_GRACE_S = 5.0  # after which a check that goes on is interrupted

BEFORE = (
    Check("software", software.describe_software),
    Check("memory", software.look_at_memory),
    Check("compiler", software.try_compiler),
    Check("native parts", software.build_native_parts, 30.0),
    Check("clocks", basics.compare_clocks),
    Check("memory counters", basics.try_counters),
    Check("random numbers", basics.try_random_numbers),
)
ON_A_CPU = (Check("spill directory", tier.try_directory),)
WITH_STREAMS = (Check("page-locked memory", tier.try_locking),)
_TIER = ("spill directory", "page-locked memory")
AFTER = (
    Check("copies", tier.try_copying, needs=_TIER),
    Check("link", tier.measure_rates, 10.0, needs=_TIER),
    Check("operators", basics.try_operators, 10.0),
    Check("hooks", basics.measure_hooks, 15.0, needs=_TIER),
    Check("training", training.examine_training, 20.0, needs=_TIER),
)


@dataclass(frozen=True, slots=True)
class Examination:
    """What all checks found.

    Attributes:
        device: where models were trained.
        findings: in the order of the checks.
        elapsed_s: what it took.
        warnings: what was warned of meanwhile, each text once. Warnings are not shown: where one matters, a check says
            so.
    """

    device: str
    findings: tuple[Finding, ...]
    elapsed_s: float
    warnings: tuple[str, ...] = ()

    @property
    def faults(self) -> tuple[Finding, ...]:
        """What is wrong, and what was not run: nothing is known of that."""
        return tuple(each for each in self.findings if each.status in ("failed", "not run"))

    @property
    def causes(self) -> tuple[Finding, ...]:
        """What is wrong; where nothing is, what was not run."""
        return tuple(each for each in self.faults if each.status == "failed") or self.faults

    def as_record(self) -> dict[str, Any]:
        """As plain data."""
        return {**asdict(self), "faults": [each.check for each in self.faults]}


def checks_for(device: torch.device) -> tuple[Check, ...]:
    """The checks that apply to a device."""
    return (*BEFORE, *(WITH_STREAMS if has_streams(device) else ON_A_CPU), *AFTER)


def examine(
    device: torch.device,
    *,
    limit_s: float = LIMIT_S,
    progress: Progress = silent,
    checks: Sequence[Check] | None = None,
) -> Examination:
    """Examine this machine.

    Args:
        device: Where models are trained.
        limit_s: Most seconds that it takes. Checks for which no time is left are reported as not run.
        progress: Called with what is being done.
        checks: Those to run. None: all that apply to the device.
    """
    begin_s = time.monotonic()
    patient = Patient(device, progress, begin_s + limit_s)
    findings: list[Finding] = []
    # The program's own random numbers go on as if nothing had been.
    with seeded(_SEED), _interrupted_after(limit_s + _GRACE_S), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for check in checks_for(device) if checks is None else checks:
            progress(check.name)
            found = _found(check, patient)
            patient.failed |= {each.check for each in found if each.status == "failed"}
            findings += found
    told = dict.fromkeys(str(each.message).partition("\n")[0] for each in caught)
    return Examination(str(device), tuple(findings), time.monotonic() - begin_s, tuple(told))


class _TooLong(BaseException):
    """The time is over in the middle of a check. Nothing that a check calls takes it for an error of its own."""


@contextmanager
def _interrupted_after(limit_s: float) -> Iterator[None]:
    """Interrupt what is still waited for, such as a file system that does not answer. In the main thread alone."""
    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield  # somebody else's timer is left alone
        return

    def interrupt(number: int, frame: object) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _found(check: Check, patient: Patient) -> list[Finding]:
    """The findings of a check. One that breaks down is a finding as well."""
    missing = [name for name in check.needs if name in patient.failed]
    if missing:
        return [Finding(check.name, "not run", f"it needs what failed above: {', '.join(missing)}")]
    if patient.left_s < check.least_s:
        return [Finding(check.name, "not run", "no time was left")]
    found: list[Finding] = []
    try:
        found.extend(check.run(patient))
    except _TooLong:
        text = "it did not end in time: look at what it waits for, or try again on an idle machine"
        found.append(Finding(check.name, "failed", text))
    except Exception as error:  # noqa: BLE001 - whatever it is, the other checks go on
        what = str(error) if isinstance(error, PoochError) else f"{type(error).__name__}: {first_line(error)}"
        found.append(Finding(check.name, "failed", what))
    return found
