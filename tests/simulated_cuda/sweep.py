"""Compare every operator that PyTorch's own tests know on the simulated device with the CPU: one line of JSON for each.

    python -m tests.simulated_cuda --numbers python -m tests.simulated_cuda.sweep --output sweep.jsonl

Each operator runs in a process of its own, forked before CUDA is initialized: one that crashes takes no other with it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal import common_methods_invocations as invocations
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

from tests.simulated_cuda.mistakes import is_simulated, take_mistakes

SECONDS = 120
REFUSALS = ("the simulated CUDA device has no numbers", "operation not supported on the simulated device")
# Compared through what users call: their statistics have another form on the device by design.
UNLIKE = ("native_batch_norm", "_native_batch_norm_legit")
UNINITIALIZED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")


@dataclass
class Found:
    """What became of one operator: how many comparisons were right, and what was not, by kind."""

    op: str
    dtype: str
    right: int = 0
    random: int = 0  # differs from seed to seed on the CPU: the same seed must repeat it on the device
    refused: list[str] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)  # by PyTorch's CUDA build, on the device only
    wrong: list[str] = field(default_factory=list)


class Refused(Exception):
    """The device says that it cannot do this."""


def main() -> int:
    """Sweep the operators that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulated_cuda.sweep", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="file to append the lines to")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--samples", type=int, default=4, help="samples of each operator (4)")
    parser.add_argument("--only", nargs="*", help="names of operators; otherwise all")
    parser.add_argument("--part", default="0/1", help="which part of how many")
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    torch.set_num_threads(1)
    invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(
        *args, **kwargs
    )  # random operators are to be seen as such
    with arguments.output.open("a") as lines:
        for op in invocations.op_db[part::parts]:
            name = f"{op.name}.{op.variant_test_name}".rstrip(".")
            if not arguments.only or name in arguments.only or op.name in arguments.only:
                found = _in_child(op, name, getattr(torch, arguments.dtype), arguments.samples)
                lines.write(json.dumps(asdict(found)) + "\n")
                lines.flush()
    return 0


def _in_child(op: OpInfo, name: str, dtype: torch.dtype, samples: int) -> Found:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        signal.alarm(SECONDS)
        torch.cuda._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]  # only counted the devices so far
        try:
            found = sweep(op, name, dtype, samples)
        except NotImplementedError as error:  # no sample could be made
            found = Found(name, str(dtype), refused=[str(error)])
        except BaseException:  # noqa: BLE001  the sweep goes on with the next operator
            found = Found(name, str(dtype), wrong=["sweep: " + traceback.format_exc()[-1500:]])
        with os.fdopen(writing, "w") as pipe:
            pipe.write(json.dumps(asdict(found)))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return Found(**json.loads(text)) if text else Found(name, str(dtype), wrong=[f"the process ended with {status}"])


def sweep(op: OpInfo, name: str, dtype: torch.dtype, samples: int) -> Found:
    """Run one operator's samples on the CPU and on the device, and compare.

    Args:
        op: What PyTorch's tests know of the operator.
        name: What to call it.
        dtype: Of the samples.
        samples: How many of them at most.
    """
    found = Found(name, str(dtype))
    if dtype not in op.dtypesIfCUDA or dtype not in op.dtypes or op.name in (*UNINITIALIZED, *UNLIKE):
        return found
    differentiable = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    torch.manual_seed(0)
    chosen = itertools.islice(op.sample_inputs("cuda", dtype, requires_grad=differentiable), samples)
    for number, sample in enumerate(chosen):
        for variant, call in _variants(op, sample):
            _compare(found, f"{variant} {number}", call, sample)
    return found


def _variants(op: OpInfo, sample: SampleInput) -> Iterator[tuple[str, Callable[[SampleInput], Any]]]:
    yield "function", lambda s: op(s.input, *s.args, **s.kwargs)
    yield "strided", lambda s: op(*_strided((s.input, *s.args)), **_strided(s.kwargs))
    if op.inplace_variant is not None and not sample.broadcasts_input:
        yield "in place", lambda s: op.inplace_variant(pytree.tree_map(_cloned, s.input), *s.args, **s.kwargs)
    if op.supports_out:
        yield "out=", lambda s: _into_strided(op, s)


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _strided(values: Any) -> Any:
    """The same numbers, every other element of a larger tensor: still of the same gradient."""

    def strided(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.dim() == 0:
            return value
        return torch.stack([value, value + 1 if value.dtype != torch.bool else ~value], dim=-1)[..., 0]

    return pytree.tree_map(strided, values)


def _into_strided(op: OpInfo, sample: SampleInput) -> Any:
    """Write the results into outputs with gaps, and give what lies in the gaps too."""
    with torch.no_grad():
        plain = op(sample.input, *sample.args, **sample.kwargs)
        around = pytree.tree_map(
            lambda result: torch.zeros((*result.shape, 2), dtype=result.dtype, device=result.device), plain
        )
        op(sample.input, *sample.args, **sample.kwargs, out=pytree.tree_map(lambda wide: wide[..., 0], around))
    return around


def _compare(found: Found, what: str, call: Callable[[SampleInput], Any], sample: SampleInput) -> None:
    expected, other = _outcome(call, sample, "cpu", 1), _outcome(call, sample, "cpu", 2)
    if isinstance(expected, Exception):
        return  # not for this sample, or not in this variant
    try:
        got = _outcome(call, sample, "cuda", 1)
        torch.cuda.synchronize()
        if isinstance(got, Exception):
            raise got
        if _differ(expected, other):
            again = _outcome(call, sample, "cuda", 1)
            if problem := _differ(got, again):
                found.wrong.append(f"{what}: the same seed gives other numbers: {problem}")
            found.random += 1
        elif (problem := _differ(expected, got)) and _differ(_outcome(call, _widened(sample), "cpu", 1), got):
            found.wrong.append(f"{what}: {problem}")
        else:
            found.right += 1
    except Exception as error:  # noqa: BLE001  whatever it is, it is told
        text = f"{what}: {type(error).__name__}: {error}"[:600]
        (found.refused if any(refusal in text for refusal in REFUSALS) else found.raised).append(text)
    for mistake in take_mistakes() if is_simulated() else ():
        (found.refused if mistake.endswith("is not simulated") else found.wrong).append(f"{what}: {mistake}")


def _outcome(call: Callable[[SampleInput], Any], sample: SampleInput, device: str, seed: int) -> Any:
    torch.manual_seed(seed)
    try:
        here = _on(sample, device)
        leaves = [leaf for leaf in pytree.tree_leaves((here.input, here.args, here.kwargs)) if _wants_gradient(leaf)]
        results = [result for result in pytree.tree_leaves(call(here)) if isinstance(result, torch.Tensor)]
        differentiated = [result for result in results if result.requires_grad]
        gradients = (
            torch.autograd.grad(differentiated, leaves, [_weights(one) for one in differentiated], allow_unused=True)
            if leaves and differentiated
            else ()
        )
        return [
            one if one is None else one.detach().to("cpu", copy=True).resolve_conj() for one in (*results, *gradients)
        ]
    except Exception as error:  # noqa: BLE001  compared as an outcome
        return error


def _widened(sample: SampleInput) -> SampleInput:
    """The sample with numbers of 32 bits in place of 16, which some processors add up in 16 bits."""

    def widened(value: Any) -> Any:
        is_narrow = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
        return value.detach().float().requires_grad_(value.requires_grad) if is_narrow else value

    return sample.transform(widened)


def _on(sample: SampleInput, device: str) -> SampleInput:
    """The sample, with what lies on the device there or on the CPU; what lies on the CPU stays there."""

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().clone().to(device if value.is_cuda else "cpu").requires_grad_(value.requires_grad)
        is_device = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
        return torch.device(device) if is_device else value

    return sample.transform(moved)


def _wants_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _weights(result: torch.Tensor) -> torch.Tensor:
    """A gradient that no symmetry hides behind; the same on every device."""
    numbers = torch.arange(1, result.numel() + 1, dtype=torch.float32) % 7 + 0.5
    dense = numbers.reshape(result.shape).to(result.dtype).to(result.device)
    return dense.to_sparse() if result.layout is torch.sparse_coo else dense


def _differ(first: Any, second: Any) -> str:
    if isinstance(first, Exception) or isinstance(second, Exception):
        return "" if isinstance(first, Exception) and isinstance(second, Exception) else f"{second}"
    try:
        narrow = any(one is not None and one.dtype in (torch.bfloat16, torch.float16) for one in (*first, *second))
        tolerance = {"rtol": 0.05, "atol": 0.05} if narrow else {"rtol": 1e-3, "atol": 1e-4}
        torch.testing.assert_close(second, first, **tolerance, equal_nan=True, check_layout=False, check_dtype=False)
    except AssertionError as error:
        return " ".join(str(error).split())[:300]
    return ""


if __name__ == "__main__":
    sys.exit(main())
