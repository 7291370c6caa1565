"""Training with the optimizer's state on disk, written by hand, and `pooch.auto` at the same measured peak.

    python -m benchmarks.persistent_peers [--turns 3] [--steps 6]

The model is a small language model with AdamW, whose parameters, gradients and state take most of the memory. Each cell
is a process of its own; a turn is one of plain training, one of the method, and one of Pooch at the method's peak less
0.5%, so that ratios compare what ran within a minute. Peaks are live bytes, counted by the allocator, optimizers
included. Bits are those of all parameters after the same number of steps.

The libraries' own ways need a GPU: without one there is no memory beside RAM that they move to.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import pooch
from benchmarks.samples import spread
from benchmarks.tables import Row, markdown_table, tell, write_results
from pooch.executor.live_bytes import live_bytes_of

NAME, TITLE = "persistent-peers-cpu", "Parameters, gradients and state beside what one would write by hand"
WIDTH, BLOCKS, HEADS, VOCABULARY, BATCH, LENGTH = 320, 5, 5, 1000, 4, 48
WARM_STEPS = 8  # of every method, as Pooch plans meanwhile
BUDGET_SHARE = 0.995
MEANING = {
    "state on disk": "AdamW steps one parameter after the other, with its moments read from a file and written back",
    "checkpoint, state on disk": "the same, with `torch.utils.checkpoint` around each block",
    "in backward, state on disk": "the same, each parameter stepped in the backward pass as soon as its gradient is "
    "there, which is freed then; gradients can neither be clipped nor accumulated",
}
Found = dict[str, Any]


class Model(nn.Module):
    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        kind: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **kind) for _ in range(BLOCKS))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.is_checkpointed else block(hidden)
        return self.head(self.last(hidden))


class StateOnDisk:
    """AdamW with the moments of one parameter at a time in memory. Direct I/O: nothing stays in the page cache."""

    def __init__(self, parameters: list[nn.Parameter], folder: str) -> None:
        self.parameters = parameters
        self.optimizers = {each: torch.optim.AdamW([each], lr=1e-3) for each in parameters}
        self.places: dict[nn.Parameter, int] = {}
        descriptor, path = tempfile.mkstemp(dir=folder)
        os.close(descriptor)
        self.file = os.open(path, os.O_RDWR | os.O_DIRECT)
        Path(path).unlink()
        self.buffer = mmap.mmap(-1, max(map(_padded, parameters)))
        end = 0
        for parameter in parameters:
            self.places[parameter], end = end, end + 2 * _padded(parameter)

    def step(self) -> None:
        for parameter in self.parameters:
            self.step_one(parameter)

    def step_one(self, parameter: nn.Parameter) -> None:
        optimizer, size_bytes = self.optimizers[parameter], _padded(parameter)
        state = optimizer.state[parameter]
        if state:
            for number, name in enumerate(("exp_avg", "exp_avg_sq")):
                os.preadv(
                    self.file, [memoryview(self.buffer)[:size_bytes]], self.places[parameter] + number * size_bytes
                )
                state[name] = torch.frombuffer(self.buffer, dtype=parameter.dtype, count=parameter.numel()).clone()
                state[name] = state[name].view_as(parameter)
        optimizer.step()
        for number, name in enumerate(("exp_avg", "exp_avg_sq")):
            into = torch.frombuffer(self.buffer, dtype=parameter.dtype, count=parameter.numel())
            into.copy_(optimizer.state[parameter].pop(name).view(-1))
            os.pwrite(self.file, memoryview(self.buffer)[:size_bytes], self.places[parameter] + number * size_bytes)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def _padded(parameter: nn.Parameter) -> int:
    return -(-parameter.nbytes // 4096) * 4096


def in_backward(optimizer: StateOnDisk) -> None:
    """Step each parameter as soon as its gradient is there."""

    def stepped(parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        optimizer.step_one(parameter)
        parameter.grad = None

    for parameter in optimizer.parameters:
        parameter.register_post_accumulate_grad_hook(stepped)


@contextlib.contextmanager
def trained(method: str, budget_bytes: int) -> Iterator[tuple[Callable[[], None], Callable[[], None], nn.Module]]:
    """Yield what runs a step, what waits for Pooch to be ready, and the model."""
    torch.manual_seed(0)
    model = Model(method.startswith(("checkpoint", "in backward")))
    parameters = list(model.parameters())
    with contextlib.ExitStack() as ends:
        optimizer: Any
        auto: Any = None
        if method in ("plain", "pooch"):
            optimizer = torch.optim.AdamW(parameters, lr=1e-3)
            if method == "pooch":
                auto = ends.enter_context(pooch.auto(model, budget_bytes, optimizer, quiet=True))
        else:
            optimizer = StateOnDisk(parameters, tempfile.gettempdir())
        is_in_backward = method.startswith("in backward")
        if is_in_backward:
            in_backward(optimizer)
        torch.manual_seed(1)

        def step() -> None:
            tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
            functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            if not is_in_backward:
                optimizer.step()
                optimizer.zero_grad()

        def wait() -> None:
            while auto is not None and auto.is_planning:
                time.sleep(0.05)

        yield step, wait, model


def cell(method: str, budget_bytes: int, steps: int) -> Found:
    """Train in this process, and return times, the peak and what the parameters are afterwards."""
    torch.set_num_threads(1)
    live = live_bytes_of(torch.device("cpu"))
    with trained(method, budget_bytes) as (step, wait, model):
        for _ in range(WARM_STEPS):
            step()
            wait()
        times, thread_times = [], []
        live.reset_peak()
        peak_bytes = 0
        for _ in range(steps):
            begin_s, thread_s = time.perf_counter(), time.thread_time()
            step()
            times.append(1000 * (time.perf_counter() - begin_s))
            thread_times.append(1000 * (time.thread_time() - thread_s))
            peak_bytes = max(peak_bytes, live.peak())
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(parameter.detach().clone().numpy().tobytes())
    return {
        "method": method, "budget_bytes": budget_bytes, "peak_bytes": peak_bytes, "times_ms": times,
        "thread_times_ms": thread_times, "bits": digest.hexdigest(),
    }  # fmt: skip


def measured(method: str, budget_bytes: int, steps: int) -> Found:
    """Measure one cell in a child process."""
    tell(f"{method} {budget_bytes / 2**20:.1f} MiB" if budget_bytes else method)
    command = [sys.executable, "-m", "benchmarks.persistent_peers", "--cell", method]
    command += ["--budget", str(budget_bytes), "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def rows_of(turns: list[Found]) -> list[Row]:
    """One row for each method."""
    rows: list[Row] = []
    for method in dict.fromkeys(turn["method"] for turn in turns):
        mine = [turn for turn in turns if turn["method"] == method]
        first = mine[0]
        plain_bytes = first["plain"]["peak_bytes"]
        rows.append(
            {
                "method": method,
                "peak / plain": f"{first['peer']['peak_bytes'] / plain_bytes:.3f}",
                "time / plain": _ratio(mine, "peer", "plain"),
                "same bits": _bits(mine, "peer"),
                "Pooch: peak / plain": f"{max(turn['pooch']['peak_bytes'] for turn in mine) / plain_bytes:.3f}",
                "Pooch: time / plain": _ratio(mine, "pooch", "plain"),
                "Pooch: same bits": _bits(mine, "pooch"),
                "Pooch's time / the method's": _ratio(mine, "pooch", "peer"),
                "the same of the training thread's CPU time": _ratio(mine, "pooch", "peer", "thread_times_ms"),
            }
        )
    return rows


def _ratio(turns: list[Found], one: str, other: str, of: str = "times_ms") -> str:
    found = spread(statistics.median(turn[one][of]) / statistics.median(turn[other][of]) for turn in turns)
    assert found is not None
    return found.between_extremes(".2f")


def _bits(turns: list[Found], which: str) -> str:
    return "yes" if all(turn[which]["bits"] == turn["plain"]["bits"] for turn in turns) else "no"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each cell")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cell:
        sys.stdout.write(json.dumps(cell(arguments.cell, arguments.budget, arguments.steps)) + "\n")
        return
    turns: list[Found] = []
    peaks: dict[str, int] = {}
    for number in range(arguments.turns):
        for method in MEANING:
            plain, peer = measured("plain", 0, arguments.steps), measured(method, 0, arguments.steps)
            peaks.setdefault(method, int(BUDGET_SHARE * peer["peak_bytes"]))
            mine = measured("pooch", peaks[method], arguments.steps)
            turns.append(
                {"workload": method, "turn": number, "method": method, "plain": plain, "peer": peer, "pooch": mine}
            )
    rows = rows_of(turns)
    meanings = [{"method": method, "meaning": meaning} for method, meaning in MEANING.items()]
    sys.stdout.write(markdown_table(rows) + "\n")
    write_results(NAME, TITLE, rows, turns, arguments.output, {"What the methods are": meanings})


if __name__ == "__main__":
    main()
