"""Planning beside training: one thread that waits for child processes, so that no step waits for a plan."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..api.children import run_child
from ..api.options import PlanOptions
from ..errors import InfeasibleBudget, PoochError
from ..ir import Plan, Profile


@dataclass(frozen=True, slots=True)
class Planned:
    """The answer to a job.

    Attributes:
        profile: The profile, with the link and the hook costs of this machine.
        plan: Its plan, or None.
        minimum_bytes: The smallest budget, if there is no plan for that reason.
        refusal: Why there is no plan, in one line, or "".
    """

    profile: Profile
    plan: Plan | None
    minimum_bytes: int = 0
    refusal: str = ""


class PlanningWorker:
    """Makes plans in a child process, one after the other. Its thread ends with the process."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Planned], Callable[[Planned], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._link: Profile | None = None  # the first answer, whose link and hook costs serve for all

    def plan(self, profile: Profile, budget_bytes: int, options: PlanOptions, done: Callable[[Planned], None]) -> None:
        """Plan a profile, and call `done` with the answer, in the worker's thread."""
        self._jobs.put((lambda: self._planned(profile, budget_bytes, options), done))
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="pooch-planning", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread after the job that it is doing."""
        self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, done = job
            done(work())

    def _planned(self, profile: Profile, budget_bytes: int, options: PlanOptions) -> Planned:
        with TemporaryDirectory(prefix="pooch-") as name:
            folder = Path(name)
            profile.save(folder / "profile.json")
            job: dict[str, Any] = {"folder": name, "budget_bytes": budget_bytes, "options": asdict(options)}
            if self._link is not None:
                self._link.save(folder / "link.json")
            try:
                done = run_child(f"{__package__}.planning_child", job, lambda *_: None)
            except InfeasibleBudget as error:
                return Planned(profile, None, error.minimum_bytes, str(error))
            except PoochError as error:
                return Planned(profile, None, refusal=str(error))
            if done is None:
                return Planned(profile, None, refusal="the planning process ended without a plan")
            made = Planned(Profile.load(folder / "profile.json"), Plan.load(folder / "plan.json"))
            self._link = self._link or made.profile
            return made
