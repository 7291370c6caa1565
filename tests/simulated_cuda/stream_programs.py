"""Programs with streams, some of which race, as the simulated device and PyTorch's stream sanitizer see them.

`TORCH_CUDA_SANITIZER=1 python -m tests.simulated_cuda.stream_programs` prints as JSON, by program, what each of them
says.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

import pooch
from tests.simulated_cuda.mistakes import take_mistakes

NUMEL = 1000
Program = Callable[[torch.cuda.Stream], object]
PROGRAMS: dict[str, Program] = {}


def program(run: Program) -> Program:
    """List a program, which gets a stream beside the current one, by its name. It keeps alive what it returns."""
    PROGRAMS[run.__name__] = run
    return run


def pinned(value: float = 1.0) -> Tensor:
    """Numbers in page-locked memory."""
    return torch.full((NUMEL,), value).pin_memory()


def on_device() -> Tensor:
    """Memory of the device that nothing is under way for."""
    made = torch.zeros(NUMEL, device="cuda")
    torch.cuda.synchronize()
    return made


def copied_out(source: Tensor, stream: torch.cuda.Stream) -> Tensor:
    """Put a copy to page-locked memory on a stream."""
    back = pinned()
    with torch.cuda.stream(stream):
        back.copy_(source, non_blocking=True)
    return back


@program
def racy_read_without_waiting(other: torch.cuda.Stream) -> object:
    """Copied out while it is copied in."""
    target, source = on_device(), pinned()
    target.copy_(source, non_blocking=True)
    return target, source, copied_out(target, other)


@program
def racy_event_recorded_too_early(other: torch.cuda.Stream) -> object:
    """It waits, for what came before."""
    target, source = on_device(), pinned()
    other.wait_event(torch.cuda.current_stream().record_event())
    target.copy_(source, non_blocking=True)
    return target, source, copied_out(target, other)


@program
def racy_write_over_what_is_read(other: torch.cuda.Stream) -> object:
    """Copied out while the next contents come."""
    source, following = on_device(), pinned(2)
    back = copied_out(source, other)
    source.copy_(following, non_blocking=True)
    return source, following, back


@program
def racy_kernel(other: torch.cuda.Stream) -> object:
    """A kernel on one stream, and on the other one that reads and writes the same."""
    values = on_device()
    values.add_(1)
    with torch.cuda.stream(other):
        values.mul_(2)
    return values


@program
def racy_matrix_product(other: torch.cuda.Stream) -> object:
    """A product on one stream that reads what another one still makes."""
    matrix = torch.ones(16, 16, device="cuda")
    made = matrix @ matrix
    with torch.cuda.stream(other):
        return made, made @ made


@program
def racy_after_the_wait_of_a_third(other: torch.cuda.Stream) -> object:
    """A stream waits; the one that goes on does not."""
    target, source, third = on_device(), pinned(), torch.cuda.Stream()
    target.copy_(source, non_blocking=True)
    third.wait_stream(torch.cuda.current_stream())
    return target, source, copied_out(target, other)


@program
def clean_wait_for_a_stream(other: torch.cuda.Stream) -> object:
    """Copied in, waited for, copied out."""
    target, source = on_device(), pinned()
    target.copy_(source, non_blocking=True)
    other.wait_stream(torch.cuda.current_stream())
    return target, source, copied_out(target, other)


@program
def clean_wait_by_way_of_a_third(other: torch.cuda.Stream) -> object:
    """What a stream has waited for, those that wait for it have waited for too."""
    target, source, third = on_device(), pinned(), torch.cuda.Stream()
    target.copy_(source, non_blocking=True)
    third.wait_stream(torch.cuda.current_stream())
    other.wait_stream(third)
    return target, source, copied_out(target, other)


@program
def clean_host_has_waited(other: torch.cuda.Stream) -> object:
    """What the host has seen happen has happened for all that it puts on streams next."""
    target, source = on_device(), pinned()
    target.copy_(source, non_blocking=True)
    torch.cuda.current_stream().record_event().synchronize()
    return target, source, copied_out(target, other)


@program
def clean_two_readers(other: torch.cuda.Stream) -> object:
    """Readers need not wait for one another."""
    source = on_device()
    return source, copied_out(source, other), source + 1


@program
def clean_write_after_the_readers(other: torch.cuda.Stream) -> object:
    """The next contents wait for the copy of the last ones."""
    source, following = on_device(), pinned(2)
    back = copied_out(source, other)
    torch.cuda.current_stream().wait_stream(other)
    source.copy_(following, non_blocking=True)
    return source, following, back


@program
def clean_training_on_a_stream(other: torch.cuda.Stream) -> object:
    """Forward and backward pass on a stream of the program's own, and the gradients read on the first one."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)).cuda()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        loss = model(torch.ones(8, 16, device="cuda")).square().mean()
        loss.backward()
    torch.cuda.current_stream().wait_stream(other)
    return loss, model, [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]


def swapped(other: torch.cuda.Stream, *, waits: bool) -> object:
    """Steps on a plan that swaps everything; what a layer gives is read on the other stream."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).cuda()
    inputs = torch.ones(64, 64, device="cuda")
    profile = pooch.profile(lambda: model(inputs).square().mean(), model)
    plan = pooch.plan(profile, profile.peak_bytes, policy="swap_all")
    read = []
    with pooch.apply(plan, model, verify="off") as run:
        for _ in range(2):
            outputs = model(inputs)
            if waits:
                other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                read.append(outputs.sum())
            torch.cuda.current_stream().wait_stream(other)
            outputs.square().mean().backward()
            assert run.stats.swapped_in_bytes > 0, "nothing was swapped"
    return read


@program
def clean_steps_on_a_plan_that_swaps(other: torch.cuda.Stream) -> object:
    """Copies of Pooch's own, which the sanitizer does not see, and a reader that waits."""
    return swapped(other, waits=True)


@program
def racy_reader_beside_a_plan_that_swaps(other: torch.cuda.Stream) -> object:
    """The same with a reader that does not."""
    return swapped(other, waits=False)


@program
def unseen_by_the_sanitizer_block_given_back(other: torch.cuda.Stream) -> object:
    """A block goes back to the allocator while another stream reads it: the sanitizer does not look at that."""
    source = on_device()
    with torch.cuda.stream(other):
        torch.cuda._sleep(1_000_000)
    return copied_out(source, other)


def seen(run: Program) -> dict[str, list[str]]:
    """What both say of one program."""
    from torch.cuda._sanitizer import CUDASanitizerErrors  # this import alone has PyTorch trace the whole process

    take_mistakes()
    sanitizer, kept = [], None
    try:
        kept = run(torch.cuda.Stream())
    except CUDASanitizerErrors as errors:
        sanitizer = [type(error).__name__ for error in errors.errors]
    torch.cuda.synchronize()
    del kept
    return {"device": take_mistakes(), "sanitizer": sanitizer}


def main() -> None:
    """Run all of them, one after the other."""
    torch.ones(1, device="cuda").add_(1)
    sys.stdout.write(json.dumps({name: seen(run) for name, run in PROGRAMS.items()}) + "\n")


if __name__ == "__main__":
    main()
