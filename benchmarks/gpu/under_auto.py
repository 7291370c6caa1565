"""`pooch.auto` beside what users have at hand: a GPT-2 with dropout and AdamW, trained in every way for the same steps.

"auto:activations" is a model most of whose memory is activations; "auto:state" one most of whose memory is parameters,
gradients and the optimizer's state. `pooch.auto` trains at the measured peak of each other way, and at shares of the
plain one. Peaks are PyTorch's own (`max_memory_allocated`), over whole steps, the optimizer's included. A plan that is
being made beside training is waited for between steps, outside of what is timed, so that few steps suffice.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import pooch
from benchmarks.gpu.job import Job, Verdict
from benchmarks.gpu.repeatable import on_device, use_deterministic_kernels
from pooch.ground.units import format_bytes, format_ms
from pooch.torchtools import accelerators
from pooch.torchtools.cpu_allocator import counting_allocator

VOCABULARY, SMALL_VOCABULARY = 50257, 500
TIMED_STEPS = 5  # the last ones
OTHERS_STEPS = 7  # of the ways of others: they do the same in each
WAITED_S = 12.0  # for plans, in one training
AT = "pooch.auto, the peak of "
SAVE_ON_CPU, FSDP2 = "save_on_cpu", "FSDP2 on the host"
LEAST_S = 25.0  # what a training takes
STOPS_S = 8.0  # before the part's end, with the steps that were made until then


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and how it is trained.

    Attributes:
        layers, width, heads: of GPT-2.
        batch_size, length: of the batches of tokens.
        steps: how many.
        ways: in which order it is trained, after plain training, what takes longest last: by a way of others, or by
            `pooch.auto` under a share of the plain peak, or `AT + way` at the peak of one of the others.
    """

    layers: int
    width: int
    heads: int
    batch_size: int
    length: int
    steps: int
    ways: tuple[str | float, ...]


CASES = {
    "auto:activations": Case(
        *(12, 768, 12, 16, 1024, 12),
        ("checkpointing", AT + "checkpointing", 0.6, SAVE_ON_CPU, AT + SAVE_ON_CPU),
    ),
    "auto:state": Case(*(36, 1280, 20, 4, 1024, 10), (0.35, "checkpointing", FSDP2, AT + FSDP2, AT + "checkpointing")),
}
SMALL = {"layers": 3, "width": 64, "heads": 2, "batch_size": 4, "length": 64, "steps": 6}


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training showed.

    Attributes:
        peaks_bytes: of each step.
        steps_ms: of each step.
        losses: of each step.
        sums: two sums over the bits of each parameter at the end; none where it had fewer steps than plain training.
        summary: what `pooch.auto` says of it.
        lines: what it has said in the meantime.
    """

    peaks_bytes: tuple[int, ...]
    steps_ms: tuple[float, ...]
    losses: tuple[float, ...]
    sums: tuple[tuple[int, int], ...]
    summary: str = ""
    lines: tuple[str, ...] = ()

    @property
    def later_peak_bytes(self) -> int:
        return max(self.peaks_bytes[1:])

    @property
    def step_ms(self) -> float:
        return statistics.median(self.steps_ms[-TIMED_STEPS:])

    def has_bits_of(self, plain: Trained) -> bool:
        same_losses = self.losses == plain.losses[: len(self.losses)]
        return same_losses and (not self.sums or self.sums == plain.sums)


def run(job: Job) -> Verdict:
    """Train in every way; broken are different bits, and a later step than the first over its budget."""
    case = CASES[job.name]
    shaky = use_deterministic_kernels(lambda: _one_step(job))
    if shaky:
        job.add("notes", f"no deterministic kernel: {shaky}")
    if job.small:
        case = Case(**SMALL, ways=("checkpointing", AT + "checkpointing"))
    plain = _row(job, case, "plain", 0, None)
    assert plain is not None, job.data
    peaks: dict[str, int] = {}
    problems: list[str] = []
    for way in case.ways:
        is_others = isinstance(way, str) and not way.startswith(AT)
        name = way if isinstance(way, str) else f"pooch.auto, {way:.0%} of the plain peak"
        budget_bytes = 0 if is_others else _budget_bytes(way, plain, peaks)
        if job.left_s < LEAST_S or budget_bytes is None:
            problems.append(f"not run: {name}")
            continue
        found = _row(job, case, name, budget_bytes, plain)
        if is_others:
            peaks |= {name: found.later_peak_bytes} if found is not None else {}
        else:
            problems += _broken(name, found, plain, budget_bytes)
    broken = [problem for problem in problems if not problem.startswith("not run")]
    if broken:
        return Verdict("failed", "; ".join(broken))
    return Verdict("not run" if problems else "passed", "; ".join(problems) or f"{len(case.ways)} trainings")


def _budget_bytes(way: str | float, plain: Trained, peaks: dict[str, int]) -> int | None:
    """Under which budget to train; None where that way of others was not run."""
    return peaks.get(way.removeprefix(AT)) if isinstance(way, str) else int(way * plain.later_peak_bytes)


def _broken(name: str, found: Trained | None, plain: Trained, budget_bytes: int) -> list[str]:
    if found is None:
        return [f"{name}: died"]
    if not found.has_bits_of(plain):
        return [f"{name}: other bits"]
    over_bytes = found.later_peak_bytes - budget_bytes
    return [f"{name}: {over_bytes} bytes over the budget"] if over_bytes > 0 else []


def _row(job: Job, case: Case, way: str, budget_bytes: int, plain: Trained | None) -> Trained | None:
    """Train in one way, and write down what is found; None where that fails."""
    job.tell(f"{way} {format_bytes(budget_bytes) if budget_bytes else ''}")
    started_s = time.monotonic()
    row: dict[str, object] = {"model": job.name.partition(":")[2], "way": way}
    row |= {"budget": format_bytes(budget_bytes)} if budget_bytes else {}
    try:
        found = _train(job, case, way, budget_bytes)
    except Exception as error:  # noqa: BLE001, one way that fails is a row, and no end of the others
        job.add("auto", row | {"same bits": f"failed: {type(error).__name__}: {str(error)[:200]}"})
        return None
    finally:
        gc.collect()
        accelerators.empty_cache(on_device(job.device))
    compared = {
        "steps": len(found.steps_ms),
        "first step's peak": format_bytes(found.peaks_bytes[0]),
        "later peak": format_bytes(found.later_peak_bytes),
        "step": format_ms(found.step_ms),
        "over plain": f"{found.step_ms / (plain or found).step_ms:.3f}",
        "first step": format_ms(found.steps_ms[0]),
        "same bits": "yes" if found.has_bits_of(plain or found) else "NO",
    }
    job.add("auto", row | compared)
    for line in (*found.lines, *found.summary.splitlines()):
        job.add("notes", f"{way}: {line}")
    raw = {"way": way, "budget": budget_bytes, "peaks_bytes": found.peaks_bytes, "steps_ms": found.steps_ms}
    job.data.setdefault("raw", []).append(raw)
    job.tell(f"{way}: {time.monotonic() - started_s:.0f} s")
    return found


def _train(job: Job, case: Case, way: str, budget_bytes: int) -> Trained:
    device = on_device(job.device)
    torch.manual_seed(0)
    with device:
        model = _model(case, _vocabulary(job))
    is_other = not budget_bytes and way != "plain"
    peak = _Peak(device)
    peaks_bytes, steps_ms, losses = [], [], []
    lines: list[str] = []
    with ExitStack() as stack:
        if way == "checkpointing":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        elif way == FSDP2:
            stack.enter_context(_on_the_host(model))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        auto = pooch.auto(model, budget_bytes, optimizer, tell=lines.append) if budget_bytes else None
        around: Callable[[], Any] = nullcontext
        if way == SAVE_ON_CPU:
            around = lambda: torch.autograd.graph.save_on_cpu(pin_memory=True)  # noqa: E731
        peak.taken()
        wait_until_s = time.monotonic() + WAITED_S
        for _ in range(min(OTHERS_STEPS, case.steps) if is_other else case.steps):
            while auto is not None and auto.is_planning and time.monotonic() < wait_until_s:
                time.sleep(0.02)
            start_s = time.perf_counter()
            tokens = torch.randint(0, _vocabulary(job), (case.batch_size, case.length)).to(device)
            optimizer.zero_grad()
            with around():
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            del loss, tokens
            accelerators.synchronize(device)
            steps_ms.append((time.perf_counter() - start_s) * 1000)
            peaks_bytes.append(peak.taken())
            job.tell(f"step {len(steps_ms)}: {format_ms(steps_ms[-1])}, {format_bytes(peaks_bytes[-1])}")
            if job.left_s < STOPS_S and len(steps_ms) > 1:
                break
        summary = ""
        if auto is not None:
            summary = str(auto.summary())
            auto.remove()
        sums = () if is_other or len(steps_ms) < case.steps else tuple(map(_sums, model.parameters()))
    return Trained(tuple(peaks_bytes), tuple(steps_ms), tuple(losses), sums, summary, tuple(lines))


def _one_step(job: Job) -> None:
    small = Case(**SMALL, ways=())
    model = _model(small, SMALL_VOCABULARY).to(on_device(job.device))
    tokens = torch.randint(0, SMALL_VOCABULARY, (4, small.length)).to(on_device(job.device))
    model(input_ids=tokens, labels=tokens).loss.backward()


def _vocabulary(job: Job) -> int:
    return SMALL_VOCABULARY if job.small else VOCABULARY


def _model(case: Case, vocabulary: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": case.layers, "n_embd": case.width, "n_head": case.heads, "n_positions": case.length}
    return GPT2LMHeadModel(GPT2Config(**sizes, vocab_size=vocabulary, use_cache=False)).train()


class _Peak:
    """The most bytes of tensors since it was last asked for; on a CPU, of those that were made since."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocator: Any = None
        if not accelerators.has_streams(device):
            self._allocator = counting_allocator()
            if isinstance(self._allocator, str) or not self._allocator.install("the rehearsal"):
                raise SystemExit(f"the counting allocator is needed here: {self._allocator}")
        self.taken()

    def taken(self) -> int:
        if self._allocator is not None:
            peak_bytes = int(self._allocator.peak_bytes())
            self._allocator.reset_peak()
            return peak_bytes
        peak_bytes = torch.accelerator.max_memory_allocated(self._device)  # the program's counter: Pooch resets its own
        torch.accelerator.reset_peak_memory_stats(self._device)
        return peak_bytes


def _sums(parameter: torch.Tensor) -> tuple[int, int]:
    """Two sums over the bits of a parameter, of which one knows where they are."""
    words = parameter.detach().reshape(-1).view(torch.int32).long()
    places = torch.arange(len(words), device=words.device) % 8191 + 1
    return int(words.sum()), int((words * places).sum())


@contextmanager
def _on_the_host(model: Any) -> Iterator[None]:
    """FSDP2 on one rank: parameters, gradients and state on the host, where the optimizer computes."""
    from torch import distributed
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    with TemporaryDirectory() as folder:
        meeting = f"file://{Path(folder) / 'store'}"
        distributed.init_process_group("cpu:gloo,cuda:nccl", init_method=meeting, rank=0, world_size=1)
        try:
            for block in model.transformer.h:
                fully_shard(block, offload_policy=CPUOffloadPolicy())
            fully_shard(model, offload_policy=CPUOffloadPolicy())
            yield
        finally:
            distributed.destroy_process_group()
