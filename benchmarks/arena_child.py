"""The child process of `benchmarks.arena`: trains under one allocator, a step at a time, when it is told to.

It reads one JSON object per line from standard input, and answers each with one: the job first, then {"step": ...},
{"end": ...}.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

from benchmarks.resident import forget_highest_rss, status_bytes


def prepare_allocator(name: str) -> None:
    """Set up the C library. jemalloc is preloaded by the parent."""
    from pooch.torchtools.malloc import keep_freed_memory, return_freed_memory

    if "mallopt" in name:
        assert keep_freed_memory()
    if "returned" in name:
        assert return_freed_memory()


class Child:
    """A workload in training."""

    def __init__(self, job: dict[str, Any]) -> None:
        import pooch
        from pooch.api.arenas import arena_for
        from pooch.executor import apply_plan
        from pooch.ir import Plan
        from pooch.torchtools.training_state import seed_all
        from pooch.workloads import WorkloadFactory
        from pooch.workloads.loading import SEED

        self.allocator: str = job["allocator"]
        self.workload = WorkloadFactory(job["workload"], settings=job["settings"])()
        seed_all(SEED)
        self.run: Any = None
        self.arena: Any = None
        on_arena = "arena" in self.allocator
        if job["plan"]:
            self.arena = arena_for(self.workload.model) if on_arena else None
            plan = Plan.load(job["plan"])
            self.run = apply_plan(plan, self.workload.model, measure_every=None, memory=self.arena)
        elif on_arena:
            self.arena = pooch.arena(self.workload.model)

    def step(self) -> dict[str, Any]:
        """One step with the optimizer's, and what it cost."""
        from pooch.api.measure.training import digest, forward_and_backward

        before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        self.workload.model.zero_grad(set_to_none=True)
        loss = forward_and_backward(self.workload, self.run)
        middle = time.perf_counter()
        if self.workload.optimizer is not None:
            self.workload.optimizer.step()
        end, after = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        return {
            "wall_ms": (end - start) * 1000,
            "forward_backward_ms": (middle - start) * 1000,
            "user_s": after.ru_utime - before.ru_utime,
            "system_s": after.ru_stime - before.ru_stime,
            "minor_faults": after.ru_minflt - before.ru_minflt,
            "rss_bytes": status_bytes("VmRSS"),
            "loss": digest(loss),
        }

    def settle(self, warm_steps: int) -> dict[str, Any]:
        """Warm up; an arena serves afterwards. The base is what the process takes between steps without one."""
        from pooch.torchtools.device_memory import give_memory_back
        from pooch.torchtools.memory_trace import live_bytes
        from pooch.torchtools.training_state import model_device

        device = model_device(self.workload.model)
        base = {"start_live_bytes": live_bytes(device)}
        self.step()
        self.workload.model.zero_grad(set_to_none=True)
        give_memory_back(device)
        base |= {"base_rss_bytes": status_bytes("VmRSS"), "base_live_bytes": live_bytes(device)}
        forget_highest_rss()
        for _ in range(warm_steps - 1):
            self.step()
            if self.arena is not None:
                self.arena.wait()
        self.step()  # the first that is served touches the arena
        base["warm_highest_rss_bytes"] = status_bytes("VmHWM")
        forget_highest_rss()
        return base

    def end(self) -> dict[str, Any]:
        """What is known at the end."""
        from dataclasses import asdict

        stats = None if self.arena is None else self.arena.stats
        return {"highest_rss_bytes": status_bytes("VmHWM"), "arena": None if stats is None else asdict(stats)}

    def limited(self, room_bytes: int, warm_steps: int) -> dict[str, Any]:
        """Train from the first step on in so many bytes of private memory above what the process has now."""
        from pooch.errors import first_line

        most = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (status_bytes("VmData") + room_bytes, most))
        try:
            self.settle(warm_steps)
        except (RuntimeError, MemoryError) as error:
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
            return {"survived": False, "message": first_line(error)[:200]}
        return {"survived": True, "message": ""} | self.end()


def main() -> None:
    """Serve the parent."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # what models print
    child: Child | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        if child is None:
            prepare_allocator(asked["allocator"])
            import torch

            torch.set_num_threads(asked["threads"])
            child, room_bytes = Child(asked), asked.get("room_bytes")
            if room_bytes is None:
                answer = child.settle(asked["warm_steps"])
            else:
                answer = child.limited(room_bytes, asked["warm_steps"])
        else:
            answer = child.step() if "step" in asked else child.end()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
