"""Profiles and plans on disk, so that the next run of the same training begins with them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import FileFormatError, UsageError
from ..ir import Plan, Profile
from ..profiler.hardware import describe_device
from ..torchtools.tensors import model_signature
from .signature import StepKey


@dataclass(frozen=True, slots=True)
class Cached:
    """What is kept of one kind of step.

    Attributes:
        profile: Its profile.
        plan: Its plan, or None if it fits in-core.
        is_recorded: Whether the profile was recorded, rather than derived from other shapes.
    """

    profile: Profile
    plan: Plan | None
    is_recorded: bool


@dataclass(frozen=True, slots=True)
class Seat:
    """Which of the ranks that train together a process is. Their number decides the shapes that each of them has.

    Attributes:
        rank: Its number among them.
        ranks: How many they are.
    """

    rank: int = 0
    ranks: int = 1

    @property
    def folder(self) -> Path:
        """Where its plans are, within the directory: a process that is alone needs no folder."""
        return Path(f"{self.ranks}-ranks", f"rank-{self.rank}") if self.ranks > 1 else Path()


@dataclass(frozen=True, slots=True)
class Purpose:
    """What plans are made for. Those for anything else are not found.

    Attributes:
        identity: What tells plans apart, other than ranks and shapes.
        host_bytes: The most that this process may take of the swap tier. None: no limit.
        seat: Which of several ranks the process is.
    """

    identity: str
    host_bytes: int | None = None
    seat: Seat = Seat()

    @classmethod
    def of(
        cls,
        models: Iterable[torch.nn.Module],
        device: torch.device,
        budget: int | str,
        host_bytes: int | None = None,
        seat: Seat = Seat(),
    ) -> Purpose:
        """Return the purpose of plans for models, which it does not hold.

        Args:
            models: The governed models.
            device: Their device.
            budget: The budget, as it was given.
            host_bytes: The most that this process may take of the swap tier. None: no limit.
            seat: Which of several ranks the process is.
        """
        here = describe_device(device)
        signatures = [model_signature(model) for model in models]
        identity = repr((signatures, str(budget), here.kind, here.name, sorted(here.software.items())))
        return cls(identity, host_bytes, seat)


class PlanCache:
    """A directory of profiles and plans. What belongs to another model, budget, device or version is not found.

    Args:
        directory: The directory, made if it does not exist.
        purpose: What the plans are made for.

    Raises:
        UsageError: If the directory cannot be made.
    """

    def __init__(self, directory: str | Path, purpose: Purpose) -> None:
        self._identity, self._host_bytes, self._seat = purpose.identity, purpose.host_bytes, purpose.seat
        self._root = Path(directory)
        self._directory = self._root / purpose.seat.folder
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"plans cannot be kept in {directory} ({error.strerror}): give another cache") from error

    def told_of_others(self) -> str:
        """Return one line if the directory has plans for other numbers of ranks alone, or else nothing."""
        mine = self._seat.ranks
        if mine in (found := _numbers_of_ranks(self._root)) or not found:
            return ""
        theirs = " and ".join("1 process" if number == 1 else f"{number} ranks" for number in sorted(found))
        return f"the plans in {self._root} are for {theirs}: new ones are made for {_in_words(mine)}"

    def _folder(self, key: StepKey) -> Path:
        text = repr((self._identity, key.family, key.sizes))
        return self._directory / hashlib.sha256(text.encode()).hexdigest()[:32]

    def find(self, key: StepKey) -> Cached | None:
        """Return what is kept for a kind of step. Files that cannot be read count as missing.

        So does a plan that swaps more than there is room for now.
        """
        folder = self._folder(key)
        if not folder.exists():
            return None
        plan, derived = folder / "plan.json", folder / "derived"
        try:
            profile = Profile.load(folder / "profile.json")
            cached = Cached(profile, Plan.load(plan) if plan.exists() else None, not derived.exists())
        except (FileFormatError, OSError):
            return None
        needed_bytes = 0 if cached.plan is None else cached.plan.schedule.host_bytes
        return cached if self._host_bytes is None or needed_bytes <= self._host_bytes else None

    def keep(self, key: StepKey, cached: Cached) -> None:
        """Keep what is known of a kind of step. Nothing is kept where the disk is full."""
        folder = self._folder(key)
        try:
            folder.mkdir(exist_ok=True)
            cached.profile.save(folder / "profile.json")
            if cached.plan is not None:
                cached.plan.save(folder / "plan.json")
            if not cached.is_recorded:
                (folder / "derived").touch()
        except (FileFormatError, OSError):
            return


def _numbers_of_ranks(root: Path) -> set[int]:
    """For which numbers of ranks there are plans in a directory."""
    names = (re.fullmatch(r"(\d+)-ranks", path.parents[2].name) for path in root.glob("*-ranks/rank-*/*/profile.json"))
    found = {int(name[1]) for name in names if name}
    return found | ({1} if any(root.glob("*/profile.json")) else set())


def _in_words(ranks: int) -> str:
    return "this process" if ranks == 1 else f"these {ranks} ranks"
