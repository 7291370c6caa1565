"""Every differentiable operator of PyTorch's own database, trained plainly and under keep, swap and recompute.

    python -m benchmarks.operators [--names matmul,fft] [--dtypes float64] [--samples N] [--output benchmarks/results]

Around each operator stands a small step: inputs pass through `x * 1` and results through `sin`, so that something is
saved before and after it. Loss and gradients have to be bitwise those of plain training. An entry is "refused" where
plain training itself is not repeatable or raises, or where PyTorch has no backward pass for it; the last table counts
the values that a recompute plan has to keep, by reason. Exit code 1 if anything fails.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.handmade import tight_plan, tiny_profile
from pooch.errors import PoochError
from pooch.executor import apply_plan
from pooch.ir import Choice, Plan, Profile
from pooch.ir.dataflow import Dataflow
from pooch.ir.files import replace_file

REPEATS = 300  # of plain training, before a difference is taken for a failure of the plan
CHOICES: tuple[Choice, ...] = ("keep", "swap", "recompute")
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass
class Outcome:
    """What became of one entry and dtype. `status`: "pass", "refused" or "fail"."""

    name: str
    dtype: str
    status: str = "pass"
    reason: str = ""
    samples: int = 0
    swapped_bytes: int = 0
    replayed_ops: int = 0
    kept: Counter[str] = field(default_factory=Counter)


def entries() -> list[Any]:
    """The differentiable entries of the database."""
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if op.supports_autograd]


class _Step(nn.Module):
    """One sample of one operator, with its inputs as parameters."""

    def __init__(self, call: Callable[..., Any], sample: Any, after: Callable[..., Any] | None) -> None:
        super().__init__()
        self.call, self.sample, self.after = call, sample, after
        self.leaves = [t for t in _tensors((sample.input, sample.args, sample.kwargs)) if t.requires_grad]
        for number, leaf in enumerate(self.leaves):
            self.register_parameter(f"leaf{number}", nn.Parameter(leaf.detach().clone()))

    def forward(self) -> Tensor:
        made = iter([parameter * 1 for parameter in self.parameters()])
        swap = {id(leaf): next(made) for leaf in self.leaves}
        inputs, args, kwargs = _replaced((self.sample.input, self.sample.args, self.sample.kwargs), swap)
        result = self.call(inputs, *args, **kwargs)
        if self.after is not None:
            result = self.after(result)
        total: Tensor | None = None
        for tensor in _tensors(result):
            if not tensor.requires_grad or not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
            part = (dense.abs() if dense.is_complex() else dense).sin().sum()
            total = part if total is None else total + part.to(total.dtype)
        if total is None:
            raise _NothingToTrain
        return total


class _NothingToTrain(Exception):
    """The sample has no differentiable result."""


def _tensors(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, (list, tuple)):
        for item in nested:
            yield from _tensors(item)
    elif isinstance(nested, dict):
        for item in nested.values():
            yield from _tensors(item)


def _replaced(nested: Any, swap: dict[int, Tensor]) -> Any:
    if isinstance(nested, Tensor):
        return swap.get(id(nested), nested)
    if isinstance(nested, (list, tuple)):
        items = [_replaced(item, swap) for item in nested]
        return items if isinstance(nested, list) else tuple(items)
    if isinstance(nested, dict):
        return {key: _replaced(item, swap) for key, item in nested.items()}
    return nested


def sweep_entry(op: Any, dtype_name: str, most_samples: int) -> Outcome:
    """Try the samples of one entry."""
    outcome = Outcome(op.formatted_name, dtype_name)
    dtype = DTYPES[dtype_name]
    if dtype not in op.supported_backward_dtypes("cpu"):
        outcome.status, outcome.reason = "refused", f"PyTorch has no backward for {dtype_name}"
        return outcome
    torch.manual_seed(0)
    for number, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=True)):
        if number >= most_samples:
            break
        _try_sample(op, sample, outcome)
        if outcome.status == "fail":
            outcome.reason = f"sample {number}: {outcome.reason}"
            break
    if outcome.samples == 0 and outcome.status == "pass":
        outcome.status, outcome.reason = "refused", outcome.reason or "no sample can be trained"
    return outcome


def _try_sample(op: Any, sample: Any, outcome: Outcome) -> None:
    step = _Step(op.op, sample, sample.output_process_fn_grad)
    if not step.leaves:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain, again = _train(step, None), _train(step, None)
    except _NothingToTrain:
        return
    except Exception as error:  # noqa: BLE001  # plain training itself may raise anything
        outcome.reason = f"plain training raises {type(error).__name__}"
        return
    if _different(plain, again):
        outcome.reason = "plain training is not repeatable"
        return
    try:
        profile = _profiled(step)
    except PoochError as error:
        outcome.status, outcome.reason = "fail", f"profile: {error}"
        return
    dataflow = Dataflow(profile, "step")
    refusals = [dataflow.refusal(value.id) for value in dataflow.activations]
    outcome.kept.update(refusal for refusal in refusals if refusal)
    outcome.samples += 1
    for choice in CHOICES:
        _try_choice(step, dataflow, choice, plain, outcome)


def _profiled(step: _Step) -> Profile:
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tiny_profile(step, step)


def _try_choice(step: _Step, dataflow: Dataflow, choice: Choice, plain: list[Tensor], outcome: Outcome) -> None:
    if outcome.status == "fail":
        return
    chosen = [v.id for v in dataflow.activations if choice != "recompute" or dataflow.refusal(v.id) is None]
    try:
        plan = tight_plan(dataflow.profile, dict.fromkeys(chosen, choice))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            planned = _train(step, plan, outcome)
    except Exception as error:  # noqa: BLE001  # whatever comes is the finding
        outcome.status = "fail"
        outcome.reason = f"{choice}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}"
        return
    difference = _different(plain, planned)
    if not difference:
        return
    unrepeatable = _unrepeatable_op(dataflow.profile)
    if unrepeatable is not None and difference == "the loss differs":
        # Seen one time in a hundred, or in a thousand, in plain training: a loss is computed once, without any replay.
        outcome.reason = f"plain training is not repeatable: {unrepeatable}"
    elif not _is_repeatable(step, plain):
        outcome.reason = "plain training is not repeatable"
    else:
        outcome.status, outcome.reason = "fail", f"{choice}: {difference}"


def _unrepeatable_op(profile: Profile) -> str | None:
    """The op of the step that is known to give other bits now and then, and why it is never replayed."""
    known = (op for op in profile.ops if op.refusal is not None and "not bitwise repeatable" in op.refusal)
    return next((f"{op.name}: {op.refusal}" for op in known), None)


def _is_repeatable(step: _Step, plain: list[Tensor]) -> bool:
    """Whether plain training gives the same again and again, with other memory in between."""
    kept: list[Tensor] = []
    for number in range(REPEATS):
        kept.append(torch.full((1 + 37 * number % 97,), 1.0))
        if _different(plain, _train(step, None)):
            return False
    return True


def _train(step: _Step, plan: Plan | None, outcome: Outcome | None = None) -> list[Tensor]:
    torch.manual_seed(1)
    step.zero_grad()
    if plan is None:
        loss = step()
        loss.backward()
    else:
        with apply_plan(plan, step, on_mismatch="error") as run:
            with run.step():
                loss = step()
            loss.backward()
        if outcome is not None:
            outcome.swapped_bytes += run.stats.swapped_in_bytes
            outcome.replayed_ops += run.stats.recomputed_ops
    gradients = [p.grad.clone() if p.grad is not None else torch.zeros(0) for p in step.parameters()]
    return [loss.detach().clone(), *gradients, torch.get_rng_state()]


def _different(plain: list[Tensor], planned: list[Tensor]) -> str:
    for number, (one, other) in enumerate(zip(plain, planned, strict=True)):
        if not _is_same(one, other):
            return "the loss differs" if number == 0 else f"gradient {number - 1} differs"
    return ""


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    raw = [t.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8) for t in (one, other)]
    return bool(torch.equal(*raw))


def table(outcomes: list[Outcome]) -> str:
    """Counts first, then each entry of which not every sample passed, then why recomputing was refused."""
    counts = Counter((o.dtype, o.status) for o in outcomes)
    lines = ["| dtype | pass | of these replayed | refused | fail |", "|---|---|---|---|---|"]
    for dtype in dict.fromkeys(o.dtype for o in outcomes):
        replayed = sum(o.dtype == dtype and o.status == "pass" and o.replayed_ops > 0 for o in outcomes)
        numbers = [counts[dtype, status] for status in ("pass", "refused", "fail")]
        lines.append(f"| {dtype} | {numbers[0]} | {replayed} | {numbers[1]} | {numbers[2]} |")
    lines += ["", "| entry | dtype | status | reason |", "|---|---|---|---|"]
    lines += [f"| {o.name} | {o.dtype} | {o.status} | {o.reason} |" for o in outcomes if o.status != "pass" or o.reason]
    kept = sum((o.kept for o in outcomes), Counter[str]())
    lines += ["", "| values that a recompute plan keeps, because | number |", "|---|---|"]
    lines += [f"| {reason} | {number} |" for reason, number in kept.most_common()]
    return "\n".join(lines) + "\n"


def write(outcomes: list[Outcome], text: str, told: str, folder: Path) -> None:
    """The table for people, and every outcome for programs."""
    folder.mkdir(parents=True, exist_ok=True)
    head = (
        "# Every differentiable operator of PyTorch's database under keep, swap and recompute\n\n"
        f"{told}. Loss, gradients and random state are compared bitwise with plain training.\n\n"
    )
    replace_file(folder / "operators-cpu.md", (head + text).encode())
    document = {"about": told, "outcomes": [vars(outcome) for outcome in outcomes]}
    replace_file(folder / "operators-cpu.json", json.dumps(document, indent=1).encode())


def sweep(names: list[str], dtypes: list[str], most_samples: int, progress: bool = False) -> list[Outcome]:
    """All entries whose name is among `names` (all of them if it is empty)."""
    chosen = [op for op in entries() if not names or op.name in names]
    outcomes: list[Outcome] = []
    for number, op in enumerate(chosen):
        for dtype in dtypes:
            outcomes.append(sweep_entry(op, dtype, most_samples))
            if progress and outcomes[-1].status == "fail":
                print(f"{number}/{len(chosen)} {outcomes[-1].name} {dtype}: {outcomes[-1].reason}", flush=True)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--names", default="", help="entries, separated by commas (default: all)")
    parser.add_argument("--dtypes", default="float64,float32")
    parser.add_argument("--samples", type=int, default=1000, help="most samples of an entry")
    parser.add_argument("--output", type=Path, help="folder for operators-cpu.md and .json (default: printed alone)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start = time.monotonic()
    entries()
    gc.collect()
    gc.freeze()  # what was imported is nobody's garbage; looking through it again and again takes most of the time
    names = [name for name in arguments.names.split(",") if name]
    outcomes = sweep(names, arguments.dtypes.split(","), arguments.samples, progress=True)
    told = f"{len(outcomes)} entries in {time.monotonic() - start:.0f} s, torch {torch.__version__}"
    text = table(outcomes)
    print(f"{text}\n{told}\n")
    if arguments.output:
        write(outcomes, text, told, arguments.output)
    return int(any(outcome.status == "fail" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
