"""Runs hostile cases plainly and in every way that Pooch has, and says what became of each."""

from __future__ import annotations

import gc
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pooch.errors import PoochError
from pooch.ir import Profile
from tests.hostile.case import Case
from tests.hostile.governors import (
    DEAR,
    FREE,
    Applied,
    Automatic,
    Decide,
    alternate,
    planned,
    profiled,
    recompute_all,
    swap_all,
)
from tests.hostile.training import Trained, first_difference, forget_frames, train

WAYS = ("recompute", "swap", "alternate", "auto", "auto copying")
RIGHT = ("same", "refused", "same error", "nothing happened")
_DECISIONS = {"recompute": recompute_all, "swap": swap_all, "alternate": alternate}


@dataclass(frozen=True)
class Outcome:
    """What became of a case under one way.

    Attributes:
        kind: "same": all bits are those of plain training. "nothing happened": so they are, but nothing was swapped
            nor replayed. "refused": an error of Pooch, in one line, when profiling, planning or applying. "same
            error": plain training raises too. "stopped": an error of Pooch in a step. "DIFFERENT": other bits without
            an error. "no error": plain training raises, this did not. "foreign error": another error, where plain
            training raises none. "crash": the process ended.
        detail: What differs, or the error.
        replayed_ops: Number of ops replayed in all steps.
        moved_bytes: Bytes swapped in all steps.
    """

    kind: str
    detail: str = ""
    replayed_ops: int = 0
    moved_bytes: int = 0

    @property
    def moved_something(self) -> bool:
        """Whether anything was swapped or replayed."""
        return self.replayed_ops + self.moved_bytes > 0

    def is_right(self, case: Case) -> bool:
        """Whether a case may end like this."""
        return self.kind in RIGHT or (case.may_stop and self.kind == "stopped")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class NotReproducible(Exception):
    """Plain training does not repeat itself, so nothing can be compared with it."""


class Judge:
    """Compares a case under each way with its plain training.

    Args:
        case: The case.
        is_patient: Whether plain training runs a second time at once, and not only when something differs from it.

    Raises:
        NotReproducible: If plain training gives other bits, or another error, when it is repeated.
    """

    def __init__(self, case: Case, *, is_patient: bool = True) -> None:
        self.case = case
        gc.collect()  # what an earlier case left in cycles is none of this one's
        self.plain = train(case.build)
        if is_patient:
            self.check_reproducible()
            if case.raises != (self.plain.error is not None):
                raise NotReproducible(f"{case.name} raises {self.plain.error!r}")
        self._profile: Profile | PoochError | Exception | None = None

    def check_reproducible(self, times: int = 1) -> None:
        """Train plainly again, with other memory in between, and compare."""
        between: list[torch.Tensor] = []
        for number in range(times):
            between.append(torch.ones(1 + 37 * number % 97))
            again = train(self.case.build)
            difference = first_difference(self.plain.found, again.found) or _other_error(self.plain, again)
            if difference:
                raise NotReproducible(f"{self.case.name}: {difference}")

    def outcome(self, way: str) -> Outcome:
        """Run the case in one way."""
        if way.startswith("auto"):
            cost = FREE if way == "auto copying" else DEAR
            return self.automatic(Automatic(cost, recounts=self.case.is_alone))
        return self.applied(_DECISIONS[way])

    def automatic(self, governor: Automatic) -> Outcome:
        """Run the case under `pooch.auto`."""
        return self._judged(governor, may_refuse=False)

    def applied(self, decide: Decide) -> Outcome:
        """Run the case under a plan."""
        try:
            plan = planned(self._profiled(), decide)
        except PoochError as error:
            return self._refusal(error)
        except Exception as error:  # noqa: BLE001  # whatever comes is the finding
            return self._foreign(error)
        return self._judged(Applied(plan), may_refuse=True)

    def _profiled(self) -> Profile:
        if self._profile is None:
            try:
                self._profile = profiled(self.case.build)
            except Exception as error:  # noqa: BLE001  # raised again for each way
                forget_frames(error)
                self._profile = error
        if isinstance(self._profile, Exception):
            raise self._profile.with_traceback(None)
        return self._profile

    def _refusal(self, error: PoochError) -> Outcome:
        if "\n" in str(error):
            return Outcome("foreign error", f"a message of several lines: {error!r}")
        return Outcome("same error" if self.case.raises else "refused", told(error))

    def _foreign(self, error: Exception) -> Outcome:
        return Outcome("same error" if self.case.raises else "foreign error", told(error))

    def _judged(self, governor: Applied | Automatic, *, may_refuse: bool) -> Outcome:
        try:
            trained = train(self.case.build, governor)
        except PoochError as error:
            return self._refusal(error) if may_refuse else Outcome("stopped", told(error))
        except Exception as error:  # noqa: BLE001
            return self._foreign(error)
        kind, detail = self._kind(trained)
        outcome = Outcome(kind, detail, governor.replayed_ops, governor.moved_bytes)
        if kind == "same" and not outcome.moved_something:
            return Outcome("nothing happened", f"{governor.steps_off_path} steps left their path")
        return outcome

    def _kind(self, trained: Trained) -> tuple[str, str]:
        plain, error = self.plain, trained.error
        if plain.error is not None:
            return ("same error", told(error)) if error is not None else ("no error", told(plain.error))
        if error is not None:
            return ("stopped" if isinstance(error, PoochError) else "foreign error"), told(error)
        difference = first_difference(plain.found, trained.found)
        return ("DIFFERENT", difference) if difference else ("same", "")


def _other_error(one: Trained, other: Trained) -> str:
    kinds = type(one.error), type(other.error)
    return "" if kinds[0] is kinds[1] else f"{kinds[0].__name__} and {kinds[1].__name__}"


def told(error: BaseException | None) -> str:
    """Return the kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
