"""Random steps of one shape each, small enough to try every decision there is."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from pooch.ir import Profile
from tests.toys import ToyStep, random_link, random_profile


def _sizes(random: Random, count: int) -> list[int]:
    """Unequal: some ten times as large as others."""
    return [random.choice([4, 8, 16, 24, 40]) for _ in range(count)]


def _times(random: Random) -> dict[str, float]:
    time_ms = random.choice([0.25, 0.5, 1.0, 2.0, 4.0])
    return {"time_ms": time_ms, "backward_ms": time_ms * random.choice([1.0, 2.0, 3.0])}


def _extras(random: Random) -> dict[str, int]:
    return {"workspace_bytes": random.choice([0, 0, 8]), "gradient_bytes": random.choice([0, 8])}


def _refusal(random: Random) -> str | None:
    return "it draws noise" if random.random() < 0.1 else None


def chains(random: Random, activations: int) -> Profile:
    """One op after the other, with ops between that save nothing."""
    step = ToyStep()
    current = step.external(8)
    for size_bytes in _sizes(random, activations):
        for _ in range(random.choice([0, 0, 1])):
            (current,) = step.op([current], [size_bytes], **_times(random))
        saves = [current] if step.values[current].savers else []
        (current,) = step.op(
            [current], [size_bytes], saves=saves, saves_outputs=[0], refusal=_refusal(random), **_times(random),
            **_extras(random),
        )  # fmt: skip
    return step.build(random_link(random), workload="chain")


def skips(random: Random, activations: int) -> Profile:
    """A U-Net: what is made on the way down is read again on the way up."""
    step = ToyStep()
    current = step.external(8)
    down = []
    for size_bytes in _sizes(random, (activations + 1) // 2):
        (current,) = step.op([current], [size_bytes], saves_outputs=[0], **_times(random), **_extras(random))
        down.append(current)
    for size_bytes in _sizes(random, activations // 2):
        skip = down.pop()
        reads = list(dict.fromkeys([current, skip]))
        (current,) = step.op(reads, [size_bytes], saves_outputs=[0], **_times(random), **_extras(random))
    return step.build(random_link(random), workload="skips")


def shared_inputs(random: Random, activations: int) -> Profile:
    """Several ops read one value, as queries, keys and values do; all replays of theirs need it."""
    step = ToyStep()
    root = step.external(8)
    made = 0
    sizes = _sizes(random, activations)
    while made < activations:
        (root,) = step.op([root], [sizes[made]], saves_outputs=[0], **_times(random))
        made += 1
        branches = []
        for _ in range(min(random.randint(2, 3), activations - made)):
            (branch,) = step.op([root], [sizes[made]], saves_outputs=[0], **_times(random), **_extras(random))
            branches.append(branch)
            made += 1
        if branches:
            (root,) = step.op(branches, [8], **_times(random))
    return step.build(random_link(random), workload="shared inputs")


def in_place(random: Random, activations: int) -> Profile:
    """A heavy op, then one that writes over what it made, which is what is saved."""
    step = ToyStep()
    current = step.external(8)
    for size_bytes in _sizes(random, activations):
        (wide,) = step.op([current], [size_bytes], **_times(random), **_extras(random))
        (current,) = step.op(
            [wide], [0], overwrites=wide, saves_outputs=[0], refusal=_refusal(random), time_ms=0.25, backward_ms=0.5
        )
    return step.build(random_link(random), workload="in place")


def mixed(random: Random, activations: int) -> Profile:
    """All of it at once, and whatever else a step can have; as many activations as come of it."""
    return random_profile(random, activations + random.randint(2, 6))


SHAPES: dict[str, Callable[[Random, int], Profile]] = {
    "chains": chains,
    "skips": skips,
    "shared inputs": shared_inputs,
    "in place": in_place,
    "mixed": mixed,
}
