"""Packages to carry to a machine that has torch, numpy and transformers but no network: `make gpu-wheels`.

    python -m benchmarks.gpu.wheels [--into .whl] [--python 3.12]

Downloads wheels of the versions in `constraints.txt` into an ignored folder. `python -m benchmarks.gpu` unpacks that
folder by itself where it finds it. Needs pip and a network, and nothing of the project.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ".whl"

# What the project imports and the GPU machine's image lacks (it has click, rich, pandas, matplotlib, psutil, pytest,
# hypothesis). typing_extensions is there too, but pydantic is particular about its age.
PACKAGES = (
    "PuLP",
    "highspy",
    "pydantic",
    "pydantic_core",
    "annotated-types",
    "typing-inspection",
    "typing_extensions",
    "monai",
    "expecttest",
    "tomli_w",
    "xxhash",
    "pytest-xdist",
    "execnet",
)
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def pinned(constraints: str, packages: tuple[str, ...] = PACKAGES) -> list[str]:
    """NAME==VERSION of each package, as the constraints have it."""
    versions = dict(re.findall(r"^([\w.-]+)==(\S+)$", constraints, re.MULTILINE))
    by_key = {_key(name): f"{name}=={version}" for name, version in versions.items()}
    missing = [name for name in packages if _key(name) not in by_key]
    if missing:
        raise SystemExit(f"constraints.txt has no version of {', '.join(missing)}: add it there")
    return [by_key[_key(name)] for name in packages]


def _key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def download_command(requirements: list[str], folder: Path, python: str) -> list[str]:
    """pip's command line: exactly these wheels, for another machine."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    target = ["--python-version", python, "--implementation", "cp", *platforms]
    options = ["--quiet", "--no-deps", "--only-binary=:all:", *target, "--dest", str(folder)]
    return [sys.executable, "-m", "pip", "download", *options, *requirements]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=ROOT / FOLDER)
    parser.add_argument("--python", default="3.12", help="version of Python over there")
    arguments = parser.parse_args()
    requirements = pinned((ROOT / "constraints.txt").read_text())
    arguments.into.mkdir(parents=True, exist_ok=True)
    for old in arguments.into.glob("*.whl"):
        old.unlink()  # two versions of one package would stop the whole installation
    code = subprocess.call(download_command(requirements, arguments.into, arguments.python))
    if code != 0:
        return code
    sizes = {wheel.name: wheel.stat().st_size for wheel in sorted(arguments.into.glob("*.whl"))}
    for name, size in sizes.items():
        print(f"{size / 2**20:7.2f} MiB  {name}")
    print(f"{sum(sizes.values()) / 2**20:7.2f} MiB  in {arguments.into}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
