"""Peaks and collectives of training in several ranks over gloo, with and without `pooch.auto`.

    python -m benchmarks.ranks [--share 0.6] [--ranks 2] [--only NAME ...] [--output DIRECTORY]

Each case trains twice in the same processes: plainly, then under a share of the plain peak of each rank. Ranks have
data and shapes of their own. Peaks are those of a forward and backward pass, as the counting allocator sees them, the
highest from the third step on for plain training and of all steps under Pooch. Collectives are counted by the sequence
number of the process group, from before the model is wrapped to the end of the last step. Plans are searched for 2 s:
times are not what is measured here.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pooch
from benchmarks.tables import Row, tell, write_results
from pooch.autopilot import autopilot
from pooch.executor.live_bytes import live_bytes_of
from pooch.ground.units import format_bytes

NAME, TITLE = "ranks", "Several ranks, with and without Pooch"
STEPS, WAIT_AFTER, LONGEST_WAIT_S = 10, 5, 200.0
_WIDTH, _ROWS, _BLOCKS = 64, 2048, 6
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Case:
    """A way to train. Options are those of DDP, or of `fully_shard`."""

    name: str
    ranks: int
    sharded: bool = False
    accumulated: bool = False
    options: tuple[tuple[str, bool], ...] = ()


CASES = (
    _Case("DDP", 2),
    _Case("DDP, gradients as bucket views", 2, options=(("gradient_as_bucket_view", True),)),
    _Case("DDP, unused parameters", 2, options=(("find_unused_parameters", True),)),
    _Case("DDP, static graph", 2, options=(("static_graph", True),)),
    _Case("DDP, accumulation under no_sync", 2, accumulated=True),
    _Case("FSDP2", 2, sharded=True),
    _Case("FSDP2, parameters kept gathered", 2, sharded=True, options=(("reshard_after_forward", False),)),
    _Case("FSDP2, accumulation without synchronisation", 2, sharded=True, accumulated=True),
    _Case("DDP", 4),
    _Case("FSDP2", 4, sharded=True),
)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        wide = 4 * _WIDTH
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, wide), nn.GELU(), nn.Linear(wide, _WIDTH))
            for _ in range(_BLOCKS)
        )

    def forward(self, rows: Tensor) -> Tensor:
        for block in self.blocks:
            rows = rows + block(rows)
        return rows


def _made(case: _Case) -> Any:
    torch.manual_seed(0)
    net = _Net()
    if not case.sharded:
        return DistributedDataParallel(net, **dict(case.options))  # type: ignore[arg-type]
    for block in net.blocks:
        fully_shard(block, **dict(case.options))  # type: ignore[call-overload]
    return fully_shard(net)


def _collectives() -> int:
    group = distributed.group.WORLD
    assert group is not None
    return int(group._get_backend(_CPU)._get_sequence_number_for_group())


def _trained(case: _Case, rank: int, budget_bytes: int | None) -> dict[str, Any]:
    """Train once, and return what came of it, with everything that has to be the same bit by bit."""
    gc.collect()
    before = _collectives()
    model = _made(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(rank)
    auto = None if budget_bytes is None else pooch.auto(model, budget_bytes, tell=lambda _: None)
    live = live_bytes_of(_CPU)
    bits: list[Tensor] = []
    peak_bytes = 0
    for step in range(STEPS):
        for last in (False, True) if case.accumulated else (True,):
            if case.sharded:
                model.set_requires_gradient_sync(last)
            with model.no_sync() if not (last or case.sharded) else nullcontext():
                if auto is None:
                    live.reset_peak()
                loss = model(torch.randn(_ROWS + rank * _ROWS // 4, _WIDTH, generator=draw)).square().mean()
                loss.backward()
                if auto is None and step >= 2:
                    peak_bytes = max(peak_bytes, live.peak())
            bits.append(loss.detach().clone())
            del loss
        optimizer.step()
        optimizer.zero_grad()
        end_s = time.monotonic() + LONGEST_WAIT_S
        while auto is not None and step >= WAIT_AFTER and auto.is_planning and time.monotonic() < end_s:
            time.sleep(0.05)
    found: dict[str, Any] = {"collectives": _collectives() - before, "peak": peak_bytes}
    bits += [getattr(each, "_local_tensor", each).detach().clone() for each in model.parameters()]
    live.close()
    if auto is not None:
        summary = auto.summary()
        auto.remove()
        found |= {"peak": summary.peak_bytes, "steps over": summary.steps_over_budget, "steps": summary.steps}
        found |= {"on plan": summary.steps_on_plan, "swapped": summary.swapped_bytes}
        found |= {"replayed": summary.recomputed_ops, "budget": budget_bytes}
    return found | {"bits": bits}


def _rank(rank: int, cases: list[_Case], share: float, folder: str) -> None:
    torch.set_num_threads(1)
    autopilot.PLANNING_TIME_LIMIT_S = 2.0
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=cases[0].ranks, timeout=timedelta(minutes=5)
    )
    counting = live_bytes_of(_CPU)  # from here on, so that every byte is counted
    results = []
    for case in cases:
        if rank == 0:
            tell(f"{case.name}, {case.ranks} ranks")
        plain = _trained(case, rank, None)
        under = _trained(case, rank, int(share * plain["peak"]))
        same = all(map(torch.equal, plain.pop("bits"), under.pop("bits")))
        gathered: list[Any] = [None] * case.ranks
        distributed.all_gather_object(gathered, {"plain": plain, "under Pooch": under, "same bits": same})
        results.append({"case": case.name, "ranks": gathered})
    if rank == 0:
        torch.save(results, f"{folder}/found")
    counting.close()
    gc.collect()
    distributed.barrier()
    distributed.destroy_process_group()


def measured(cases: list[_Case], share: float) -> list[dict[str, Any]]:
    """Train in all ranks, one case after the other, and return what each rank found."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        multiprocessing.spawn(_rank, (cases, share, folder), nprocs=cases[0].ranks)  # type: ignore[no-untyped-call]
        found: list[dict[str, Any]] = torch.load(f"{folder}/found")
    return found


def row(result: dict[str, Any]) -> Row:
    """Return the row of a case; where ranks differ, the first and the last."""
    ranks = result["ranks"]
    plain, under = ([each[way] for each in ranks] for way in ("plain", "under Pooch"))
    return {
        "case": result["case"],
        "ranks": len(ranks),
        "plain peak": _both([each["peak"] for each in plain]),
        "budget": _both([each["budget"] for each in under]),
        "highest peak": _both([each["peak"] for each in under]),
        "steps over it": sum(each["steps over"] for each in under),
        "on plan": f"{min(each['on plan'] for each in under)} of {under[0]['steps']}",
        "swapped": _both([each["swapped"] for each in under]),
        "ops replayed": " / ".join(str(under[at]["replayed"]) for at in (0, -1)),
        "collectives, plain": _one([each["collectives"] for each in plain]),
        "with Pooch": _one([each["collectives"] for each in under]),
        "same bits": "yes" if all(each["same bits"] for each in ranks) else "NO",
    }


def _both(sizes: list[int]) -> str:
    return f"{format_bytes(sizes[0])} / {format_bytes(sizes[-1])}"


def _one(counts: list[int]) -> str:
    return " / ".join(str(each) for each in sorted(set(counts)))


def main() -> None:
    """Measure all cases, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.6, help="budget, as a share of the plain peak")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--ranks", type=int, help="only cases with so many ranks")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="only cases of these names")
    options = parser.parse_args()
    cases = [case for case in CASES if options.ranks in (None, case.ranks)]
    cases = [case for case in cases if not options.only or case.name in options.only]
    results = []
    for count in sorted({case.ranks for case in cases}):
        results += measured([case for case in cases if case.ranks == count], options.share)
    write_results(NAME, TITLE, [row(each) for each in results], results, options.output)


if __name__ == "__main__":
    main()
