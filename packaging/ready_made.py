"""Builds the native parts for the PyTorch and Python that run this, to be put into a wheel.

    PYTHONPATH=. python packaging/ready_made.py build/ready_made     # in an environment of each version of PyTorch
    POOCH_READY_MADE=build/ready_made pip wheel --no-deps .          # the wheel with all of them

A wheel without the variable has none, and fits every platform.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path


def build(folder: Path) -> list[Path]:
    """Build all parts, and return those that were not there yet under the names that they have in a wheel."""
    from pooch.ground.native import ready_name
    from pooch.packing import kernels
    from pooch.torchtools import copier, watch
    from pooch.torchtools.cpu_allocator import building
    from pooch.torchtools.cuda_allocator import allocator

    folder.mkdir(parents=True, exist_ok=True)
    made = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["POOCH_CACHE_DIRECTORY"] = cache
        watch.built_library(again=True)
        copier.built_library(again=True)
        building.built_library(again=True)
        building.built_observer(again=True)
        allocator.built_library()
        kernels.kernels()
        for library in sorted((Path(cache) / "native").glob("*.so")):
            ready = folder / ready_name(library.name)
            if not ready.exists():
                shutil.copyfile(library, ready)
                made.append(ready)
    return made


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for ready in build(parser.parse_args().folder):
        sys.stdout.write(f"{ready.stat().st_size / 2**10:8.1f} KiB  {ready.name}\n")


if __name__ == "__main__":
    main()
