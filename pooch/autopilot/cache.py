"""Profiles and plans on disk, so that the next run of the same training begins with them.

Each kind of step has a folder: its profile, its plan, and a note of what they are for, with their digests. The note is
written last. So files that two processes have written at the same time, that were cut off by a full disk, or that were
moved from another folder are not taken for what was kept together. A folder that anybody else can write to, or a link
in its place, is neither read nor written.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..ground.errors import FileFormatError, UsageError
from ..ground.reading import file_bytes, is_ours
from ..ir import Plan, Profile
from ..ir.files import document_of, replace_file
from ..profiler.hardware import describe_device
from ..torchtools.tensors import model_signature
from .signature import StepKey

PROFILE, PLAN, NOTE = "profile.json", "plan.json", "kept.json"
_MOST_NOTE_BYTES = 4096


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
        budget: float | str,
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

    def _name(self, key: StepKey) -> str:
        """What a kind of step is kept under: nothing of its text is part of a path."""
        text = repr((self._identity, key.family, key.sizes))
        return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()

    def _folder(self, name: str) -> Path:
        return self._directory / name[:32]

    def find(self, key: StepKey) -> Cached | None:
        """Return what is kept for a kind of step. Files that cannot be read or trusted count as missing.

        So does a plan that swaps more than there is room for now.

        Args:
            key: The kind of step.
        """
        name = self._name(key)
        try:
            cached = _read(self._folder(name), name)
        except (FileFormatError, OSError, ValueError, RecursionError):
            return None
        if cached is None:
            return None
        needed_bytes = 0 if cached.plan is None else cached.plan.schedule.host_bytes
        return cached if self._host_bytes is None or needed_bytes <= self._host_bytes else None

    def keep(self, key: StepKey, cached: Cached) -> None:
        """Keep what is known of a kind of step. Nothing is kept where the disk is full, or others can write.

        Args:
            key: The kind of step.
            cached: What is known of it.
        """
        name = self._name(key)
        folder = self._folder(name)
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            if not is_ours(folder):
                return
            note = {
                "of": name,
                "profile": _written(cached.profile, folder / PROFILE),
                "plan": None if cached.plan is None else _written(cached.plan, folder / PLAN),
                "is_recorded": cached.is_recorded,
            }
            replace_file(folder / NOTE, json.dumps(note).encode(), follow_links=False)
        except (FileFormatError, OSError):
            return


def _written(document: Profile | Plan, path: Path) -> str:
    """Write a document and return its digest."""
    content = document.as_bytes()
    replace_file(path, content, follow_links=False)
    return _digest(content)


def _read(folder: Path, name: str) -> Cached | None:
    """What is kept in a folder, if all of it was kept together under this name."""
    if not is_ours(folder):
        return None
    note = json.loads(file_bytes(folder / NOTE, _MOST_NOTE_BYTES, follow_links=False))
    if not isinstance(note, dict) or note.get("of") != name:
        return None
    profile = _content(folder / PROFILE, note.get("profile"))
    plan = None if note.get("plan") is None else _content(folder / PLAN, note["plan"])
    if profile is None or (plan is None and note.get("plan") is not None):
        return None
    return Cached(
        document_of(profile, folder / PROFILE, Profile),
        None if plan is None else document_of(plan, folder / PLAN, Plan),
        note.get("is_recorded") is True,
    )


def _content(path: Path, digest: object) -> bytes | None:
    """What a file holds, if it is what was noted. It is read once, so that nothing can change in between."""
    content = file_bytes(path, follow_links=False)
    return content if _digest(content) == digest else None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _numbers_of_ranks(root: Path) -> set[int]:
    """For which numbers of ranks there are plans in a directory."""
    names = (re.fullmatch(r"(\d+)-ranks", path.parents[2].name) for path in root.glob("*-ranks/rank-*/*/profile.json"))
    found = {int(name[1]) for name in names if name}
    return found | ({1} if any(root.glob("*/profile.json")) else set())


def _in_words(ranks: int) -> str:
    return "this process" if ranks == 1 else f"these {ranks} ranks"
