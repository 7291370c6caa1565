"""Every differentiable operator of PyTorch's own database, trained plainly and under keep, swap and recompute.

    python -m benchmarks.operators [--names matmul,fft] [--dtypes float64] [--samples N] [--device cuda]
                                   [--output benchmarks/results]

Around each operator stands a small step: inputs pass through `x * 1` and results through `sin`, so that something is
saved before and after it. Loss and gradients have to be bitwise those of plain training. Samples for which plain
training raises, has nothing to train, or gives other bits when it is repeated, cannot be compared: they are counted
apart, by reason, and prove nothing. An entry of which no sample can be compared is "incomparable", one for which
PyTorch has no backward pass "refused"; the last table counts the values that a recompute plan has to keep, by reason.
Exit code 1 if anything fails.
"""

from __future__ import annotations

import argparse
import gc
import itertools
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
from pooch.analysis.dataflow import Dataflow
from pooch.errors import PoochError
from pooch.executor import apply_plan
from pooch.ir import Choice, Plan, Profile
from pooch.ir.files import replace_file
from pooch.torchtools import accelerators

REPEATS = 300  # of plain training, before a difference is taken for a failure of the plan
NO_DETERMINISTIC_KERNEL = "does not have a deterministic implementation"  # PyTorch's words
CHOICES: tuple[Choice, ...] = ("keep", "swap", "recompute")
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass
class Outcome:
    """What became of one entry and dtype.

    `status`: "pass" (every sample that can be compared was, under every choice), "fail", "incomparable" or "refused".
    `compared`: samples that were bitwise the same under every choice; `incomparable`: {why not: samples}.
    """

    name: str
    dtype: str
    status: str = "pass"
    reason: str = ""
    compared: int = 0
    incomparable: Counter[str] = field(default_factory=Counter)
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


class _Incomparable(Exception):
    """Plain training gives nothing to compare with; the text says why."""


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


def sweep_entry(op: Any, dtype_name: str, most_samples: int, device: str = "cpu") -> Outcome:
    """Try the samples of one entry on a device ("cpu", "cuda")."""
    outcome = Outcome(op.formatted_name, dtype_name)
    dtype = DTYPES[dtype_name]
    if dtype not in op.supported_backward_dtypes(device):
        outcome.status, outcome.reason = "refused", f"PyTorch has no backward for {dtype_name}"
        return outcome
    torch.manual_seed(0)
    for number, sample in enumerate(_samples(op, dtype, most_samples, device, outcome)):
        _try_sample(op, sample, outcome)
        if outcome.status == "fail":
            outcome.reason = f"sample {number}: {outcome.reason}"
            break
    if outcome.compared == 0 and outcome.status == "pass":
        outcome.status = "incomparable"
        outcome.reason = "; ".join(outcome.incomparable) or "it has no samples"
    return outcome


def _samples(op: Any, dtype: torch.dtype, most: int, device: str, outcome: Outcome) -> Iterator[Any]:
    """So many samples of the entry at most; where a device lacks what makes them, that is counted as one."""
    try:
        yield from itertools.islice(op.sample_inputs(device, dtype, requires_grad=True), most)
    except NotImplementedError as error:
        outcome.incomparable[f"its samples cannot be made: {_told(error)}"] += 1


def _try_sample(op: Any, sample: Any, outcome: Outcome) -> None:
    """Count the sample as compared, as incomparable, or let it fail the entry."""
    step = _Step(op.op, sample, sample.output_process_fn_grad)
    try:
        _compare(step, outcome)
    except _Incomparable as reason:
        outcome.incomparable[str(reason)] += 1
        return
    outcome.compared += outcome.status != "fail"


def _compare(step: _Step, outcome: Outcome) -> None:
    plain = _repeatable_plain(step)
    try:
        profile = _profiled(step)
    except PoochError as error:
        outcome.status, outcome.reason = "fail", f"profile: {error}"
        return
    dataflow = Dataflow(profile, "step")
    refusals = [dataflow.refusal(value.id) for value in dataflow.activations]
    outcome.kept.update(refusal for refusal in refusals if refusal)
    for choice in CHOICES:
        _try_choice(step, dataflow, choice, plain, outcome)


def _repeatable_plain(step: _Step) -> list[Tensor]:
    """What plain training gives.

    Raises:
        _Incomparable: nothing, or something else each time.
    """
    if not step.leaves:
        raise _Incomparable("nothing to train")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain, again = _train(step, None), _train(step, None)
    except _NothingToTrain as error:
        raise _Incomparable("nothing to train") from error
    except Exception as error:  # plain training itself may raise anything
        raise _Incomparable(f"plain training raises {_told(error)}") from error
    if _different(plain, again):
        raise _Incomparable("plain training is not repeatable")
    return plain


def _told(error: Exception) -> str:
    """Its kind; of what a device or a build lacks (a deterministic kernel, too), also which operator that is."""
    kind, text = type(error).__name__, (str(error).splitlines() or [""])[0]
    is_lack = isinstance(error, NotImplementedError) or NO_DETERMINISTIC_KERNEL in text
    return f"{kind}: {text[:150]}" if is_lack else kind


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
        raise _Incomparable(f"plain training is not repeatable: {unrepeatable}")
    if not _is_repeatable(step, plain):
        raise _Incomparable("plain training is not repeatable")
    outcome.status, outcome.reason = "fail", f"{choice}: {difference}"


def _unrepeatable_op(profile: Profile) -> str | None:
    """The op of the step that is known to give other bits now and then, and why it is never replayed."""
    known = (op for op in profile.ops if op.refusal is not None and "not bitwise repeatable" in op.refusal)
    return next((f"{op.name}: {op.refusal}" for op in known), None)


def _is_repeatable(step: _Step, plain: list[Tensor]) -> bool:
    """Whether plain training gives the same again and again, with other memory in between."""
    kept: list[Tensor] = []
    for number in range(REPEATS):
        kept.append(torch.full((1 + 37 * number % 97,), 1.0, device=step.leaves[0].device))
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
    drawn = b"".join(accelerators.random_state(device) for device in {torch.device("cpu"), loss.device})
    return [loss.detach().clone(), *gradients, torch.frombuffer(bytearray(drawn), dtype=torch.uint8)]


def _different(plain: list[Tensor], planned: list[Tensor]) -> str:
    for number, (one, other) in enumerate(zip(plain, planned, strict=True)):
        if not _is_same(one, other):
            last = "the random state differs" if number == len(plain) - 1 else f"gradient {number - 1} differs"
            return last if number else "the loss differs"
    return ""


def _is_same(one: Tensor, other: Tensor) -> bool:
    one, other = one.cpu(), other.cpu()
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    raw = [t.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8) for t in (one, other)]
    return bool(torch.equal(*raw))


STATUSES = ("pass", "incomparable", "refused", "fail")


def table(outcomes: list[Outcome]) -> str:
    """Counts of entries and samples, then each entry of which not every sample was compared, then why recomputing was
    refused.
    """
    columns = "dtype", "pass", "of these replayed", *STATUSES[1:], "samples compared", "samples incomparable"
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for dtype in dict.fromkeys(outcome.dtype for outcome in outcomes):
        lines.append(_counts(dtype, [outcome for outcome in outcomes if outcome.dtype == dtype]))
    lines += ["", "| entry | dtype | status | samples compared | incomparable | reason |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {o.name} | {o.dtype} | {o.status} | {o.compared} | {o.incomparable.total()} | {_reasons(o)} |"
        for o in outcomes
        if o.status != "pass" or o.incomparable
    ]
    kept = sum((o.kept for o in outcomes), Counter[str]())
    lines += ["", "| values that a recompute plan keeps, because | number |", "|---|---|"]
    lines += [f"| {reason} | {number} |" for reason, number in kept.most_common()]
    return "\n".join(lines) + "\n"


def _counts(dtype: str, outcomes: list[Outcome]) -> str:
    """One line of the first table."""
    entries_with = Counter(o.status for o in outcomes)
    replayed = sum(o.status == "pass" and o.replayed_ops > 0 for o in outcomes)
    passed, *others = (entries_with[status] for status in STATUSES)
    samples = sum(o.compared for o in outcomes), sum(o.incomparable.total() for o in outcomes)
    return "| " + " | ".join(map(str, (dtype, passed, replayed, *others, *samples))) + " |"


def _reasons(outcome: Outcome) -> str:
    told = [f"{reason} ({number})" for reason, number in outcome.incomparable.items()]
    return "; ".join([outcome.reason, *told] if outcome.status in ("fail", "refused") else told or [outcome.reason])


def page(text: str, told: str) -> str:
    """The table with its head. `told`: what was swept, without a full stop."""
    return (
        "# Every differentiable operator of PyTorch's database under keep, swap and recompute\n\n"
        f"{told}. Loss, gradients and random state are compared bitwise with plain training.\n\n{text}"
    )


def write(outcomes: list[Outcome], text: str, told: str, folder: Path, device: str = "cpu") -> None:
    """The table for people, and every outcome for programs: `operators-DEVICE.md` and `.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / f"operators-{device}.md", page(text, told).encode())
    document = {"about": told, "outcomes": [vars(outcome) for outcome in outcomes]}
    replace_file(folder / f"operators-{device}.json", json.dumps(document, indent=1).encode())


def sweep(
    names: list[str], dtypes: list[str], most_samples: int, progress: bool = False, device: str = "cpu"
) -> list[Outcome]:
    """All entries whose name is among `names` (all of them if it is empty)."""
    chosen = [op for op in entries() if not names or op.name in names]
    outcomes: list[Outcome] = []
    for number, op in enumerate(chosen):
        for dtype in dtypes:
            outcomes.append(sweep_entry(op, dtype, most_samples, device))
            if progress and outcomes[-1].status == "fail":
                print(f"{number}/{len(chosen)} {outcomes[-1].name} {dtype}: {outcomes[-1].reason}", flush=True)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--names", default="", help="entries, separated by commas (default: all)")
    parser.add_argument("--dtypes", default="float64,float32")
    parser.add_argument("--samples", type=int, default=1000, help="most samples of an entry")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, help="folder for operators-DEVICE.md and .json (default: printed alone)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.device != "cpu":
        torch.use_deterministic_algorithms(True)  # what has no such kernel raises, and cannot be compared
    start = time.monotonic()
    entries()
    gc.collect()
    gc.freeze()  # what was imported is nobody's garbage; looking through it again and again takes most of the time
    names = [name for name in arguments.names.split(",") if name]
    outcomes = sweep(names, arguments.dtypes.split(","), arguments.samples, progress=True, device=arguments.device)
    told = f"{len(outcomes)} entries in {time.monotonic() - start:.0f} s, torch {torch.__version__}"
    text = table(outcomes)
    print(f"{text}\n{told}\n")
    if arguments.output:
        write(outcomes, text, told, arguments.output, arguments.device)
    return int(any(outcome.status == "fail" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
