"""What copies and hooks cost on this machine, kept in the user's cache directory from one run to the next.

Measuring takes some seconds of a core beside training, after which all is planned once more: a short run is over before
that, and has to go by what an earlier one has kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from ..api.wire import Wire
from ..ground.errors import FileFormatError, WireError
from ..ground.folders import cache_directory
from ..ground.reading import file_bytes, is_ours
from ..ground.version import VERSION
from ..ir import HookCosts, Link
from ..ir.files import replace_file
from ..profiler.hardware import describe_device

KEPT_S = 86_400.0  # a machine changes slowly, but what it does beside training changes
ANEW_VARIABLE = "POOCH_MEASURE_ANEW"
_COSTLY_VARIABLES = ("POOCH_NATIVE_WATCH", "POOCH_NATIVE_COPIES", "POOCH_PACKED_COPIES")
_MOST_BYTES = 4096

Found = tuple[Link, HookCosts | None]


@dataclass(frozen=True, slots=True)
class _Kept:
    """What the file holds.

    Attributes:
        at_s: When it was measured.
        link: What copies cost.
        hooks: What hooks cost.
    """

    at_s: float
    link: Link
    hooks: HookCosts


_FILE = Wire(_Kept, Link, HookCosts)


class KeptCosts:
    """The costs of one device with one tier, on disk. A file that others can write to is neither read nor written.

    Args:
        device: The device.
        tier: What the tier is.
    """

    def __init__(self, device: torch.device, tier: str) -> None:
        self._device, self._tier = device, tier

    def find(self) -> Found | None:
        """Return what was measured less than a day ago with the same software, or None."""
        with suppress(OSError, ValueError, WireError, RecursionError):
            path = self._path()
            if path is not None and is_ours(path.parent) and is_ours(path):
                kept = _FILE.made(json.loads(file_bytes(path, _MOST_BYTES, follow_links=False)))
                if isinstance(kept, _Kept) and 0 <= time.time() - kept.at_s < KEPT_S:
                    return kept.link, kept.hooks
        return None

    def keep(self, found: Found) -> None:
        """Keep what was measured, if all of it was. Nothing is kept where the disk is full, or others can write."""
        link, hooks = found
        if hooks is None:
            return
        with suppress(FileFormatError, OSError):
            path = self._path()
            if path is None:
                return
            path.parent.parent.mkdir(parents=True, exist_ok=True)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            if is_ours(path.parent):
                content = json.dumps(_FILE.plain(_Kept(time.time(), link, hooks))).encode()
                replace_file(path, content, follow_links=False)

    def _path(self) -> Path | None:
        """Return where they are, or None if they are to be measured in each run."""
        if os.environ.get(ANEW_VARIABLE):
            return None
        return cache_directory() / "costs" / f"{self._name}.json"

    @cached_property
    def _name(self) -> str:
        """Name of the file. The thread that trains asks first: others may have another number of PyTorch's threads."""
        here = describe_device(self._device)
        ways = [os.environ.get(variable, "") for variable in _COSTLY_VARIABLES]
        of = repr((VERSION, here.kind, here.name, sorted(here.software.items()), self._tier, ways))
        return hashlib.sha256(of.encode("utf-8", "backslashreplace")).hexdigest()[:32]
