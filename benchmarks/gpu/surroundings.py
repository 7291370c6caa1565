"""What this machine is, and what it lacks, as one JSON object on standard output."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EVERY_PART = ("torch", "numpy", "pydantic", "pulp", "highspy", "psutil")
OTHERS = (
    "xxhash",
    "tomli_w",
    "pytest",
    "hypothesis",
    "transformers",
    "monai",
    "expecttest",
    "click",
    "rich",
    "pandas",
    "matplotlib",
)


def missing_modules() -> list[str]:
    """Modules that the project uses and that cannot be imported here."""
    return [name for name in (*EVERY_PART, *OTHERS) if importlib.util.find_spec(name) is None]


def source_digest() -> str:
    """Tells one state of the package from another, also where there is no git."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "pooch").rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _output_of(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=ROOT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def look_around() -> dict[str, object]:
    """Everything that goes to the head of the report."""
    packages = ("torch", "numpy", "transformers", "monai", "pulp", "highspy", "pydantic")
    found: dict[str, object] = {
        "commit": os.environ.get("POOCH_COMMIT") or _output_of("git", "rev-parse", "HEAD") or "unknown",
        "changed files": len(_output_of("git", "status", "--porcelain", "--untracked-files=no").splitlines()),
        "source": source_digest(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu cores": os.cpu_count(),
        "versions": {name: _version(name) for name in packages},
        "missing": missing_modules(),
        "gpu": False,
    }
    if importlib.util.find_spec("torch") is not None:
        found |= _gpu()
    return found


def _gpu() -> dict[str, object]:
    import torch

    from pooch.torchtools import accelerators, cuda_only, watch

    watch.LIBRARY.get()  # built now, it takes none of the parts' time
    here = accelerators.all_accelerators()
    if not here:
        return {}
    return {
        "gpu": True,
        "device": accelerators.name_of(here[0]),
        "device memory": accelerators.total_bytes(here[0]),
        "devices": len(here),
        "driver": cuda_only.driver(here[0]).get("driver", ""),
        "cuda": cuda_only.versions(here[0]).get("cuda"),
        "cudnn": torch.backends.cudnn.version(),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(look_around()) + "\n")
