"""A model that is compiled as a whole, under PyTorch's own `activation_memory_budget` and under Pooch.

    python -m benchmarks.compiled_budgets [--backend inductor] [--ratios 0.2 0.5 0.8] [--steps 12] [--output FOLDER]

At each ratio, the peak that PyTorch's own takes is measured, and Pooch gets it as its budget in bytes. The same for
selective checkpointing of the blocks, which saves matrix products. Each kind of training has a process of its own, as
models would share what is compiled, and their steps take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import pooch
from benchmarks.samples import spread
from benchmarks.tables import Row, markdown_table, tell, write_results
from pooch.ground.units import format_bytes
from pooch.torchtools.memory_meter import MemoryMeter

NAME, TITLE = "compiled-budgets-cpu", "A compiled model at the peak that PyTorch's own way takes"
WIDTH, HEADS, LENGTH, ROWS, TOKENS = 256, 4, 128, 8, 512
WARM_UP_STEPS = 6  # of which Pooch records one, and plans beside the others
DEVICE = torch.device("cpu")


class Block(nn.Module):
    """A block of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.projection, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        """Return rows."""
        parts = self.projection(self.norm(rows)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        rows = rows + self.out(mixed.transpose(1, 2).flatten(2))
        return rows + self.down(functional.gelu(self.up(self.second(rows))))  # type: ignore[no-any-return]


class Language(nn.Sequential):
    """Blocks between an embedding and a head."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__(nn.Embedding(TOKENS, WIDTH), *(Block() for _ in range(blocks)), nn.Linear(WIDTH, TOKENS))


def step_of(model: nn.Module) -> Callable[[], Tensor]:
    """Return a training step of a model, always on the same data."""
    tokens = torch.randint(TOKENS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))

    def step() -> Tensor:
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        model.zero_grad()
        return loss.detach()

    return step


SAVED = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
SELECTIVE = "selective checkpointing"


class Selective(nn.Module):
    """A block that saves its matrix products, and makes all else again."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, rows: Tensor) -> Tensor:
        """Return rows."""
        contexts = partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(self.block, rows, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]


def _policy(context: object, function: object, *arguments: object, **named: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if function in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def serve(kind: str, backend: str, value: float) -> None:
    """Train in one way: answer each line of the standard input by a step, and print what it took.

    Args:
        kind: "theirs" (at a share), "selective", "exact" or "rounding" (under a budget of Pooch's).
        backend: What compiles.
        value: The share, or the budget in bytes.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: nn.Module = Language()
    if kind == "selective":
        model = nn.Sequential(*(Selective(each) if isinstance(each, Block) else each for each in model))
    model.compile(backend=backend)
    auto = None
    if kind == "theirs":
        config.activation_memory_budget = value
    elif kind in ("exact", "rounding"):
        auto = pooch.auto(model, int(value), tell=tell, allow_recompute=kind)  # type: ignore[arg-type]
    step = step_of(model)
    for _ in range(WARM_UP_STEPS):
        step()
    if auto is not None:
        deadline_s = time.monotonic() + 60
        while auto.is_planning and time.monotonic() < deadline_s:
            step()
    peak_bytes = 0
    if auto is None:
        with MemoryMeter(DEVICE) as meter:
            step()
        peak_bytes = meter.peak_bytes
    _answer(peak_bytes=peak_bytes)
    for _ in sys.stdin:
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        loss = step()
        if auto is not None:
            peak_bytes = int((auto.status().peak_mib or 0) * 2**20)
        wall_ms, cpu_ms = 1000 * (time.perf_counter() - begin_s), 1000 * (time.process_time() - begin_cpu_s)
        mode = "" if auto is None else auto.status().mode
        _answer(wall_ms=wall_ms, cpu_ms=cpu_ms, peak_bytes=peak_bytes, loss=loss.item(), mode=mode)


def _answer(**what: Any) -> None:
    print("ANSWER " + json.dumps(what), flush=True)


class Trainer:
    """A process that trains in one way."""

    def __init__(self, kind: str, backend: str, value: float) -> None:
        command = [sys.executable, "-m", "benchmarks.compiled_budgets", "--serve", kind, backend, str(value)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.samples: list[dict[str, Any]] = []
        self.first_peak_bytes = int(self._read()["peak_bytes"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                return dict(json.loads(line.removeprefix("ANSWER ")))
        raise RuntimeError("the process that trains has ended")

    def step(self) -> dict[str, Any]:
        """Train one step, and return what it took."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        self.samples.append(self._read())
        return self.samples[-1]

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compared(backend: str, ratio: float | None, steps: int) -> dict[str, Any]:
    """Train under PyTorch's own budget, and under Pooch at the peak that it takes, in turns.

    Args:
        backend: What compiles.
        ratio: Of PyTorch's own budget, or None for selective checkpointing.
        steps: How many.
    """
    name = SELECTIVE if ratio is None else f"activation_memory_budget {ratio}"
    tell(f"{backend}, {name}")
    theirs = Trainer("selective", backend, 0) if ratio is None else Trainer("theirs", backend, ratio)
    budget_bytes = theirs.first_peak_bytes
    trainers = {
        "theirs": theirs,
        "plain": Trainer("theirs", backend, 1.0),
        "rounding": Trainer("rounding", backend, budget_bytes),
        "exact": Trainer("exact", backend, budget_bytes),
    }
    for _ in range(steps):
        for each in trainers.values():
            each.step()
    for each in trainers.values():
        each.end()
    return {
        "backend": backend,
        "what": name,
        "budget_bytes": budget_bytes,
        "samples": {kind: each.samples for kind, each in trainers.items()},
    }


def row(result: dict[str, Any]) -> Row:
    """Return a row of the table: medians of the steps, and of the ratios of the steps that were taken in one turn."""
    samples: dict[str, list[dict[str, Any]]] = result["samples"]

    def took(kind: str) -> str:
        return f"{statistics.median(each['wall_ms'] for each in samples[kind]):.0f}"

    def peak(kind: str) -> str:
        return format_bytes(max(each["peak_bytes"] for each in samples[kind]))

    def ratio(kind: str) -> str:
        pairs = zip(samples[kind], samples["theirs"], strict=True)
        found = spread(ours["wall_ms"] / theirs["wall_ms"] for ours, theirs in pairs)
        assert found is not None
        return found.between_extremes(".2f")

    losses = {tuple(each["loss"] for each in taken) for taken in samples.values()}
    return {
        "backend": result["backend"],
        "PyTorch's own": result["what"],
        "its peak": peak("theirs"),
        "plain, ms": took("plain"),
        "it, ms": took("theirs"),
        "Pooch, `rounding`, ms": took("rounding"),
        "peak": peak("rounding"),
        "Pooch / it": ratio("rounding"),
        "Pooch, `exact`, ms": took("exact"),
        "its highest peak": peak("exact"),
        "exact / it": ratio("exact"),
        "same losses": "yes" if len(losses) == 1 else "no",
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", default=["aot_eager", "inductor"])
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.2, 0.4, 0.6, 0.8, 0.9])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve[0], options.serve[1], float(options.serve[2]))
        return
    results = []
    for backend in options.backend:
        for ratio in [*options.ratios, None]:
            results.append(compared(backend, ratio, options.steps))
    rows = [row(each) for each in results]
    print(markdown_table(rows))
    write_results(NAME, TITLE, rows, results, options.output)


if __name__ == "__main__":
    main()
