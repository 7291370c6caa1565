"""The package index knows another `pooch`, a download helper. Both import as `pooch`, so one would shadow the other.

Where its files lie in this package's folder, or its metadata says it is installed beside this one, a later
`import pooch.something` could load either; that is told at once instead of failing somewhere odd.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

# Modules of the download helper that this project does not have.
_THEIR_FILES = ("core.py", "downloaders.py", "processors.py", "hashes.py")
_REMEDY = (
    "both import as `pooch` and cannot share an environment: "
    "run `pip uninstall pooch pooch-planner`, then `pip install pooch-planner`"
)


def refuse_other_pooch(package_path: Iterable[str]) -> None:
    """Raise where the download helper `pooch` is in the way.

    Raises:
        ImportError: its files were found, with the remedy.
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
    """Whether a distribution named `pooch` says that it was installed next to this folder."""
    return any(folder.parent.glob("pooch-[0-9]*.dist-info"))
