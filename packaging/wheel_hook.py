"""Puts the libraries of the folder POOCH_READY_MADE into the wheel, if it is set: see `ready_made.py`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Of GCC's C++ library, the newest symbols that each glibc of the manylinux policies comes with.
_CXX_OF_GLIBC = {28: 25, 31: 28, 34: 29, 35: 30, 39: 33}


class ReadyMade(BuildHookInterface):  # type: ignore[misc]
    """Adds the libraries, and names the oldest system that can load all of them in the wheel's name."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds."""
        folder = os.environ.get("POOCH_READY_MADE")
        if folder is None or version == "editable":
            return
        libraries = sorted(Path(folder).resolve().glob("*.so"))
        if not libraries:
            raise FileNotFoundError(f"POOCH_READY_MADE={folder} holds no library: run packaging/ready_made.py first")
        build_data["force_include"] |= {str(each): f"pooch_planner/ready_made/{each.name}" for each in libraries}
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform(libraries)}"


def platform(libraries: Iterable[Path]) -> str:
    """Return the platform's part of the tag, from the versions of symbols that the libraries ask for."""
    contents = b"".join(each.read_bytes() for each in libraries)
    glibc = max(map(int, re.findall(rb"GLIBC_2\.(\d+)\b", contents)))
    cxx = max(map(int, re.findall(rb"GLIBCXX_3\.4\.(\d+)\b", contents)))
    least = min(version for version, newest in _CXX_OF_GLIBC.items() if newest >= cxx and version >= glibc)
    return f"manylinux_2_{least}_{os.uname().machine}"
