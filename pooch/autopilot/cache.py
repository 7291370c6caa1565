"""Profiles and plans on disk, so that the next run of the same training begins with them."""

from __future__ import annotations

import hashlib
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


class PlanCache:
    """A directory of profiles and plans. What belongs to another model, budget, device or version is not found.

    Args:
        directory: The directory, made if it does not exist.
        models: The governed models.
        device: Their device.
        budget: The budget, as it was given.

    Raises:
        UsageError: If the directory cannot be made.
    """

    def __init__(
        self, directory: str | Path, models: list[torch.nn.Module], device: torch.device, budget: object
    ) -> None:
        here = describe_device(device)
        signatures = [model_signature(model) for model in models]
        self._identity = repr((signatures, str(budget), here.kind, here.name, sorted(here.software.items())))
        self._directory = Path(directory)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"plans cannot be kept in {directory} ({error.strerror}): give another cache") from error

    def _folder(self, key: StepKey) -> Path:
        text = repr((self._identity, key.family, key.sizes))
        return self._directory / hashlib.sha256(text.encode()).hexdigest()[:32]

    def find(self, key: StepKey) -> Cached | None:
        """Return what is kept for a kind of step. Files that cannot be read count as missing."""
        folder = self._folder(key)
        if not folder.exists():
            return None
        plan, derived = folder / "plan.json", folder / "derived"
        try:
            profile = Profile.load(folder / "profile.json")
            return Cached(profile, Plan.load(plan) if plan.exists() else None, not derived.exists())
        except (FileFormatError, OSError):
            return None

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
