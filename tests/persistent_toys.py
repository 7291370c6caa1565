"""Toy steps with parameters, buffers, gradients and state of which it is known when they are used."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy
from hypothesis import strategies as st

from pooch.analysis.persistence import present_points
from pooch.ir import PersistentTensor, Profile
from tests.toys import random_profile

MOST_BYTES = 40


def persistent_profiles(max_ops: int = 10, most_parameters: int = 5) -> st.SearchStrategy[Profile]:
    """Random steps with random tensors that outlive them."""
    seeds = st.integers(0, 2**32 - 1)
    counts = st.integers(2, max_ops).map(lambda count: max_ops + 2 - count)  # hypothesis prefers small numbers
    return st.builds(lambda count, seed: persistent_profile(Random(seed), count, most_parameters), counts, seeds)


def persistent_profile(random: Random, count: int, most_parameters: int = 5) -> Profile:
    """A random step with trained and frozen parameters, buffers, state of all sizes, and some that nothing uses."""
    return with_persistent(random_profile(random, count), random, random.randint(1, most_parameters))


def with_persistent(profile: Profile, random: Random, parameters: int) -> Profile:
    """The step, and so many parameters and buffers that it uses somewhere, with what belongs to them."""
    found: list[PersistentTensor] = []
    slots = range(len(profile.ops))
    rounding = random.choice([1, 8])
    for number in range(parameters):
        name, size_bytes = f"layer{number}.weight", random.choice([8, 16, 16, random.randint(1, MOST_BYTES)])
        allocated_bytes = -(-size_bytes // rounding) * rounding
        uses = tuple(sorted(random.sample(slots, min(len(slots), random.choice([0, 1, 2, 2, 3])))))
        is_trained = random.random() < 0.7
        kind = "parameter" if is_trained or random.random() < 0.5 else "buffer"
        found.append(PersistentTensor(name, kind, size_bytes, allocated_bytes, uses, is_trained, is_trained))
        if not is_trained:
            continue
        if random.random() < 0.8:
            made = random.randrange(profile.forward_ops, len(profile.ops))
            found.append(PersistentTensor(name, "gradient", size_bytes, allocated_bytes, (made,), True, True))
        if random.random() < 0.7:
            found.append(PersistentTensor(name, "state", 2 * size_bytes, 2 * allocated_bytes, (), True, True))
    return with_tensors(profile, tuple(found))


def with_tensors(profile: Profile, tensors: tuple[PersistentTensor, ...]) -> Profile:
    """The step with what outlives it, whose bytes count from the beginning; those of a gradient from its slot on."""
    profile = replace(profile, persistent=tensors)
    added = present_points(profile)
    ops = tuple(
        replace(op, entry_bytes=op.entry_bytes + int(entry), peak_bytes=op.peak_bytes + int(body))
        for op, entry, body in zip(profile.ops, added[0::2], added[1::2], strict=True)
    )
    always_bytes = sum(each.allocated_bytes for each in tensors if each.kind != "gradient")
    return replace(
        profile,
        ops=ops,
        persistent_bytes=profile.persistent_bytes + always_bytes,
        peak_bytes=max(op.peak_bytes for op in ops),
    )


def layered(
    layers: int, *, size_bytes: int = 64, state_factor: int = 2, frozen: bool = False
) -> tuple[PersistentTensor, ...]:
    """A parameter for each op of `tests.toys.chain(layers)`, with gradient and state if it is trained."""
    found: list[PersistentTensor] = []
    for layer in range(layers):
        name, backward = f"{layer}.weight", 2 * layers - 1 - layer
        found.append(
            PersistentTensor(name, "parameter", size_bytes, size_bytes, (layer, backward), not frozen, not frozen)
        )
        if not frozen:
            found.append(PersistentTensor(name, "gradient", size_bytes, size_bytes, (backward,), True, True))
            state_bytes = state_factor * size_bytes
            if state_bytes:
                found.append(PersistentTensor(name, "state", state_bytes, state_bytes, (), True, True))
    return tuple(found)


def total_points(profile: Profile) -> numpy.ndarray:
    """int64 array of shape (2 * ops,): live bytes in-core."""
    points = numpy.empty(2 * len(profile.ops), dtype=numpy.int64)
    points[0::2] = [op.entry_bytes for op in profile.ops]
    points[1::2] = [op.peak_bytes for op in profile.ops]
    return points
