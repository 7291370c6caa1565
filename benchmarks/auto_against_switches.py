"""`pooch.auto` beside what frameworks offer against memory: 100 steps each, the first step's cost included.

    python -m benchmarks.auto_against_switches [--steps 100]

A GPT-2 of transformers with random weights is trained plainly; with `gradient_checkpointing_enable()`; with all saved
tensors offloaded, as TRL's `activation_offloading` does (on a CPU they go to a file, as in mode "offload" of `pooch
profile`); and with `pooch.auto` under the measured peak of each of these two. Peaks are those of the counting allocator
over whole steps, the optimizer's included. Each training runs in a process of its own. Times are the wall clock's and
the process's CPU time, from before the first step to after the last.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.tables import Row, tell, write_results
from pooch.ground.units import format_bytes

NAME, TITLE = "auto-against-switches", "`pooch.auto` beside the switches of frameworks"
_BATCH, _LENGTH, _WORDS = 4, 128, 2000


def train(way: str, budget_bytes: int, steps: int) -> dict[str, Any]:
    """Train in this process.

    Args:
        way: "plain", "checkpointing", "offloading" or "auto".
        budget_bytes: The budget for "auto".
        steps: Number of steps.
    """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import pooch
    from benchmarks.offloading import saved_tensors_offloaded
    from pooch.torchtools.cpu_allocator import counting_allocator
    from pooch.torchtools.memory_trace import live_bytes

    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    allocator = counting_allocator()
    if isinstance(allocator, str) or not allocator.install("the benchmark"):
        raise SystemExit(f"the counting allocator is needed here: {allocator}")
    torch.manual_seed(0)
    sizes = {"n_layer": 6, "n_embd": 256, "n_head": 4, "vocab_size": _WORDS, "n_positions": 256}
    model = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False))
    model.train()
    if way == "checkpointing":
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters())
    earlier_bytes = live_bytes(torch.device("cpu")) - allocator.live_bytes()
    auto = pooch.auto(model, budget_bytes, tell=lambda _: None) if way == "auto" else None
    allocator.reset_peak()
    losses, peak_bytes, walls, begin_cpu_s = [], 0, [time.perf_counter()], time.process_time()
    for _ in range(steps):
        tokens = torch.randint(0, _WORDS, (_BATCH, _LENGTH))
        with saved_tensors_offloaded(model) if way == "offloading" else nullcontext():
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        peak_bytes = max(peak_bytes, allocator.peak_bytes())
        optimizer.step()
        optimizer.zero_grad()
        peak_bytes = max(peak_bytes, allocator.peak_bytes())
        losses.append(loss.item())
        walls.append(time.perf_counter())
    cpu_s, summary = time.process_time() - begin_cpu_s, None
    if auto is not None:
        summary = str(auto.summary())
        peak_bytes = max(auto.summary().peak_bytes - max(0, earlier_bytes), auto.summary().between_peak_bytes)
        auto.remove()
    return {
        "way": way,
        "budget_bytes": budget_bytes,
        "peak_bytes": max(0, earlier_bytes) + peak_bytes,
        "wall_s": walls[-1] - walls[0],
        "step_ms": [(after - before) * 1000 for before, after in pairwise(walls)],
        "cpu_s": cpu_s,
        "losses": losses,
        "summary": summary,
    }


def in_child(way: str, budget_bytes: int, steps: int) -> dict[str, Any]:
    """Train in a child process."""
    tell(f"{way}{f' under {format_bytes(budget_bytes)}' if budget_bytes else ''}")
    command = [sys.executable, "-m", "benchmarks.auto_against_switches", "--way", way, "--steps", str(steps)]
    done = subprocess.run([*command, "--budget", str(budget_bytes)], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows(found: list[dict[str, Any]]) -> list[Row]:
    """One row for each training."""
    plain = found[0]
    return [
        {
            "training": each["way"],
            "budget": format_bytes(each["budget_bytes"]) if each["budget_bytes"] else "",
            "measured peak": format_bytes(each["peak_bytes"]),
            "wall time over plain": f"{each['wall_s'] / plain['wall_s']:.3f}",
            "CPU time over plain": f"{each['cpu_s'] / plain['cpu_s']:.3f}",
            "wall time of the last half": f"{_last_half(each) / _last_half(plain):.3f}",
            "first step": f"{each['step_ms'][0]:.0f} ms",
            "same losses as plain": "yes" if each["losses"] == plain["losses"] else "no",
        }
        for each in found
    ]


def _last_half(training: dict[str, Any]) -> float:
    times_ms: list[float] = training["step_ms"]
    return sum(times_ms[len(times_ms) // 2 :])


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("-o", "--folder", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    if arguments.way:
        sys.stdout.write(json.dumps(train(arguments.way, arguments.budget, arguments.steps)) + "\n")
        return
    found = [in_child(way, 0, arguments.steps) for way in ("plain", "checkpointing", "offloading")]
    found += [in_child("auto", each["peak_bytes"], arguments.steps) for each in found[1:3]]
    write_results(NAME, TITLE, rows(found), found, arguments.folder)


if __name__ == "__main__":
    main()
