"""Every differentiable operator of PyTorch's database under plans on the simulated device: kept, swapped, recomputed.

    python -m tests.simulated_cuda --numbers python -m tests.simulated_cuda.planned_operators [--markdown FILE]

What `python -m benchmarks.operators` does on the CPU, with all tensors on the device; an entry during which the device
found a mistake fails. `--names`, `--dtypes` and `--samples` choose. Exit code 1 if anything fails.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from benchmarks import operators
from pooch.ground.live_objects import freeze_known
from pooch.ir.files import replace_file
from tests.simulated_cuda.mistakes import take_mistakes

REFUSED = "is not simulated"


def main() -> int:
    """Sweep the entries that were asked for, in processes beside one another."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulated_cuda.planned_operators", description=__doc__)
    parser.add_argument("--names", default="", help="entries, separated by commas (default: all)")
    parser.add_argument("--dtypes", default="float64,float32")
    parser.add_argument("--samples", type=int, default=1, help="most samples of an entry (1)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--markdown", type=Path, help="file to write the table to (default: printed alone)")
    arguments = parser.parse_args()
    start = time.monotonic()
    names = [name for name in arguments.names.split(",") if name]
    indices = [index for index, op in enumerate(operators.entries()) if not names or op.name in names]
    jobs = [(index, dtype, arguments.samples) for dtype in arguments.dtypes.split(",") for index in indices]
    outcomes: list[operators.Outcome] = []
    with ProcessPoolExecutor(arguments.processes, multiprocessing.get_context("spawn"), begin) as pool:
        for number, outcome in enumerate(pool.map(swept, *zip(*jobs, strict=True))):
            outcomes.append(outcome)
            if outcome.status == "fail":
                sys.stdout.write(f"{number}/{len(jobs)} {outcome.name} {outcome.dtype}: {outcome.reason}\n")
                sys.stdout.flush()
    told = (
        f"On the simulated CUDA device: {len(outcomes)} entries, the first samples of each ({arguments.samples}), in "
        f"{time.monotonic() - start:.0f} s, torch {torch.__version__}"
    )
    page = operators.page(operators.table(outcomes), told)
    sys.stdout.write(page)
    if arguments.markdown:
        replace_file(arguments.markdown, page.encode())
    return int(any(outcome.status == "fail" for outcome in outcomes))


def begin() -> None:
    """What each process does first; what was imported is nobody's garbage, and looking through it takes long."""
    torch.set_num_threads(1)
    operators.entries()
    gc.collect()
    freeze_known()


def swept(index: int, dtype: str, most_samples: int) -> operators.Outcome:
    """Sweep one entry; what the device found wrong meanwhile is a failure.

    Args:
        index: of the entry among the differentiable ones.
        dtype: "float64" or "float32".
        most_samples: how many of its samples are tried.
    """
    take_mistakes()
    outcome = operators.sweep_entry(operators.entries()[index], dtype, most_samples, "cuda")
    torch.cuda.synchronize()
    mistakes = [mistake for mistake in take_mistakes() if not mistake.endswith(REFUSED)]
    if mistakes:
        outcome.status, outcome.reason = "fail", f"the device found: {mistakes[0]}"
    return outcome


if __name__ == "__main__":
    sys.exit(main())
