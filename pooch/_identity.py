"""Refuse to run beside another package that imports as `pooch`, the download helper on the package index.

If both are installed into one environment, `import pooch.something` could import either.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

# Modules that only the download helper has.
_THEIR_FILES = ("core.py", "downloaders.py", "processors.py", "hashes.py")
_REMEDY = (
    "both import as `pooch` and cannot share an environment: "
    "run `pip uninstall pooch pooch-planner`, then `pip install pooch-planner`"
)


def refuse_other_pooch(package_path: Iterable[str]) -> None:
    """Raise an error if the download helper `pooch` is installed into the same folder.

    Raises:
        ImportError: its files were found.
    """
    for folder in map(Path, package_path):
        strangers = [name for name in _THEIR_FILES if (folder / name).exists()]
        if strangers:
            raise ImportError(
                f"{folder} holds files of the download helper 'pooch' ({strangers[0]}) beside pooch-planner; {_REMEDY}"
            )
        if _is_recorded_beside(folder):
            raise ImportError(f"the download helper 'pooch' is installed into {folder} as well; {_REMEDY}")


def _is_recorded_beside(folder: Path) -> bool:
    """Whether a distribution named `pooch` is installed beside this folder."""
    return any(folder.parent.glob("pooch-[0-9]*.dist-info"))
