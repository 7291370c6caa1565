"""One training of `benchmarks.real_memory`, in a process of its own: python -P real_memory_child.py '{...}'.

It uses only what every version of Pooch has, so that versions can be compared. Prints one JSON object.
"""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

BLOCKS = {"llama": "LlamaDecoderLayer", "vit": "ViTLayer", "swin": "SwinLayer"}


def status_bytes() -> dict[str, int]:
    """Resident bytes of this process now and at most since the last reset, and its threads."""
    text = Path("/proc/self/status").read_text()
    found = {
        name: int(number) for name, number in re.findall(r"^(VmHWM|VmRSS|RssAnon|RssFile|Threads):\s+(\d+)", text, re.M)
    }
    return {name: number if name == "Threads" else 1024 * number for name, number in found.items()}


def reset_highest() -> None:
    """Let the highest resident size be the present one."""
    Path("/proc/self/clear_refs").write_text("5")


def resident_by_kind() -> dict[str, int]:
    """Resident bytes of this process by kind of mapping."""
    kinds: dict[str, int] = {}
    name = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *others = line.split()
        if not first.endswith(":"):
            path = others[4] if len(others) > 4 else ""
            name = "heap" if path == "[heap]" else "files" if path.startswith("/") else "other" if path else "anonymous"
        elif first == "Rss:":
            kinds[name] = kinds.get(name, 0) + 1024 * int(others[0])
    return kinds


class Phases:
    """What each phase of a training takes."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []
        reset_highest()
        self._start_s = time.perf_counter()

    def ended(self, name: str) -> None:
        """Note the highest and the present resident size, and begin the next phase."""
        seconds = time.perf_counter() - self._start_s
        self.found.append({"phase": name, "seconds": seconds, **status_bytes(), "kinds": resident_by_kind()})
        reset_highest()
        self._start_s = time.perf_counter()


def built(name: str) -> tuple[Any, Callable[[], Any]]:
    """A network with random weights, and its loss on a fixed batch."""
    import torch
    import transformers

    torch.manual_seed(0)
    if name == "llama":
        sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 4}
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=2000, use_cache=False)
        model = transformers.LlamaForCausalLM(config)
        tokens = torch.randint(0, 2000, (8, 256))
        return model, lambda: model(input_ids=tokens, labels=tokens).loss
    if name == "vit":
        sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 4}
        model = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, num_labels=10))
        images = torch.randn(8, 3, 224, 224)
    else:
        sizes = {"embed_dim": 48, "depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24]}
        model = transformers.SwinForImageClassification(transformers.SwinConfig(**sizes, num_labels=10))
        images = torch.randn(8, 3, 224, 224)
    labels = torch.arange(len(images)) % 10
    return model, lambda: model(pixel_values=images, labels=labels).loss


def checkpoint_blocks(model: Any, block_name: str) -> None:
    """Put every block of that class under `torch.utils.checkpoint`."""
    from torch.utils.checkpoint import checkpoint

    blocks = [module for module in model.modules() if type(module).__name__ == block_name]
    assert blocks, f"no module of class {block_name}"
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


@contextmanager
def saved_in_a_file(model: Any) -> Iterator[None]:
    """Keep saved tensors in an unnamed file, as `torch.autograd.graph.save_on_cpu` keeps a GPU's in host memory."""
    import torch

    staying = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    end = 0

    def pack(tensor: torch.Tensor) -> Any:
        nonlocal end
        if tensor.untyped_storage().data_ptr() in staying or not tensor.numel():
            return tensor
        view = memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
        start, end = end, end + len(view)
        done = 0
        while done < len(view):
            done += os.pwrite(file.fileno(), view[done:], start + done)
        return start, tensor.shape, tensor.dtype

    def unpack(saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        start, shape, dtype = saved
        tensor = torch.empty(shape, dtype=dtype)
        view = memoryview(tensor.view(-1).view(torch.uint8).numpy())
        done = 0
        while done < len(view):
            done += os.preadv(file.fileno(), [view[done:]], start + done)
        return tensor

    with tempfile.TemporaryFile() as file, torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def applied(job: dict[str, Any], model: Any, forward: Any, optimizer: Any, phases: Phases) -> tuple[Any, int]:
    """Profile, plan and apply; returns the run and its budget, which is the smallest one if the given one is less."""
    import pooch

    phases.ended("import pooch")
    profile = pooch.profile(forward, model, optimizer, **job["profile"])
    phases.ended("profile")
    budget_bytes = job["budget_bytes"]
    try:
        plan = pooch.plan(profile, budget_bytes, region="step")
    except pooch.InfeasibleBudget as error:
        budget_bytes = error.minimum_bytes
        plan = pooch.plan(profile, budget_bytes, region="step")
    phases.ended("plan")
    run = pooch.apply(plan, model, **({"arena": True} if job["arena"] else {}))
    del profile, plan
    phases.ended("apply")
    return run, budget_bytes


def installed_counter() -> Any:
    """The counting allocator, in place."""
    from pooch.torchtools.cpu_allocator import counting_allocator

    counter = counting_allocator()
    if isinstance(counter, str) or not counter.install():
        raise SystemExit(f"the counting allocator is needed here: {counter}")
    return counter


def main() -> None:
    """Train as the first argument says.

    Its fields: `model`; `way` ("plain", "checkpointing", "offloading", "pooch"); `budget_bytes` for "pooch"; `profile`,
    further arguments of `pooch.profile`; `arena`, whether Pooch runs on an arena; `steps`; `counted`, whether to count
    live bytes, which takes an allocator that may change the resident size; `kept`, whether freed memory is kept; and
    `in_turns`, whether each step waits for a line of the standard input.
    """
    job = json.loads(sys.argv[1])
    phases = Phases()
    import torch

    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # which would touch memory that nothing else does
    import transformers  # noqa: F401

    phases.ended("imports")
    counter = installed_counter() if job["counted"] else None
    if job["kept"]:
        import pooch

        pooch.keep_freed_memory()
    model, forward = built(job["model"])
    model.train()
    optimizer = torch.optim.AdamW(model.parameters())
    phases.ended("model")
    if job["way"] == "checkpointing":
        checkpoint_blocks(model, BLOCKS[job["model"]])
    run = None
    if job["way"] == "pooch":
        run, job["budget_bytes"] = applied(job, model, forward, optimizer, phases)
    region: Callable[[], AbstractContextManager[object]] = nullcontext if run is None else run.step
    live_bytes, losses, steps = 0, [], []
    for number in range(job["steps"]):
        if job["in_turns"]:
            sys.stdin.readline()
        if counter is not None:
            counter.reset_peak()
        before, start_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        # A step of the offloading has its own file, which ends with its backward pass.
        with saved_in_a_file(model) if job["way"] == "offloading" else nullcontext():
            with region():
                loss = forward()
            at_turn = resident_by_kind() if number == job["steps"] - 1 else None
            loss.backward()
        if counter is not None:
            live_bytes = max(live_bytes, counter.peak_bytes())
        optimizer.step()
        optimizer.zero_grad()
        wall_ms, after = (time.perf_counter() - start_s) * 1000, resource.getrusage(resource.RUSAGE_SELF)
        losses.append(loss.item())
        del loss
        phases.ended(f"step {number + 1}")
        steps.append(
            {
                "wall_ms": wall_ms,
                "user_s": after.ru_utime - before.ru_utime,
                "system_s": after.ru_stime - before.ru_stime,
                "minor_faults": after.ru_minflt - before.ru_minflt,
            }
        )
        if job["in_turns"]:
            print(json.dumps(steps[-1]), flush=True)
    heavy = ("pandas", "pulp", "highspy", "matplotlib", "pydantic", "scipy")
    found = {
        **job,
        "live_peak_bytes": live_bytes,
        "losses": losses,
        "phases": phases.found,
        "steps_run": steps,
        "at_turn": at_turn,
        "imported": [name for name in heavy if name in sys.modules],
    }
    if run is not None:
        run.remove()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
