"""Small consistent profiles for tests: a builder, ready-made shapes, and hypothesis strategies.

A `ToyStep` is told forward ops with what they read, write and save; `build` adds one backward op per forward op
in reverse order (it unpacks what the forward op saved) and the closing op, and works out releases, unpacks, deaths,
and bytes at every point, so that the profile is consistent by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from random import Random
from typing import Any

from hypothesis import strategies as st

from pooch.analysis.dataflow import Dataflow
from pooch.ir import Choice, Device, GatheredUnit, Link, Op, Profile, Value
from pooch.ir.profile import Role

FAST_LINK = Link("toy tier", 0.0, 0.0, 1e9, 1e9)
SLOW_LINK = Link("slow toy tier", 0.01, 0.01, 100.0, 100.0)
DISK_LINK = Link("toy disk", 0.05, 0.05, 2e6, 2e6, full_duplex=False)


def in_full(document: Any) -> str:
    """Everything in a plan, a profile or what holds them as text, in which numbers that are nan are equal."""
    return repr(asdict(document))


@dataclass
class _ToyValue:
    """A value while the step is being told."""

    size_bytes: int
    role: Role = "made"
    producer: int = -1
    overwrites: int = -1
    overwritten_at: int = -1
    held_until: int | None = -1
    readers: list[int] = field(default_factory=list)
    savers: list[int] = field(default_factory=list)
    too_small: bool = False
    touches: list[int] | None = field(default_factory=list)


@dataclass
class _ToyOp:
    """A forward op while the step is being told."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    time_ms: float
    backward_ms: float
    workspace_bytes: int
    refusal: str | None
    saves: list[int]
    backward_ops: int
    gradient_bytes: int
    name: str = ""


class ToyStep:
    """Told op by op, then built. Value ids are returned by `parameter`, `external` and `op`.

    Args:
        round_bytes: the allocator rounds every value up to a multiple of this.
    """

    def __init__(self, round_bytes: int = 1) -> None:
        self.round_bytes = round_bytes
        self.values: list[_ToyValue] = []
        self.ops: list[_ToyOp] = []

    def parameter(self, size_bytes: int) -> int:
        """Something that outlives the step."""
        return self._new(_ToyValue(size_bytes, "parameter", held_until=None))

    def external(self, size_bytes: int, held_until: int | None = None) -> int:
        """An input; `held_until`: last slot in which it exists (None: all of the step)."""
        return self._new(_ToyValue(size_bytes, "external", held_until=held_until))

    def op(
        self,
        reads: Sequence[int],
        sizes: Sequence[int] = (8,),
        *,
        saves: Sequence[int] = (),
        saves_outputs: Sequence[int] = (),
        overwrites: int = -1,
        time_ms: float = 1.0,
        backward_ms: float = 2.0,
        workspace_bytes: int = 0,
        refusal: str | None = None,
        backward_ops: int = 1,
        gradient_bytes: int = 0,
        name: str = "",
    ) -> tuple[int, ...]:
        """Add a forward op and return the ids of the values that it writes.

        Args:
            reads: ids. sizes: of the written values, in bytes.
            saves: which of the read values autograd saves for it. saves_outputs: which outputs, by position.
            overwrites: id of a read value whose storage the first output takes over (in place).
            backward_ops: how many ops its backward has; the first unpacks. 0: it never runs, nothing is unpacked, and
                autograd lets go after the forward pass where the op's index is even, else at the end.
            gradient_bytes: live beside the values while its backward runs.
            name: of the operator; by default each has a name of its own.
        """
        index = len(self.ops)
        writes = tuple(self._new(_ToyValue(size, producer=index)) for size in sizes)
        for read in reads:
            self.values[read].readers.append(index)
        if overwrites >= 0:
            self.values[writes[0]].overwrites = overwrites
            self.values[writes[0]].size_bytes = self.values[overwrites].size_bytes
            self.values[overwrites].overwritten_at = index
        saved = [*saves, *(writes[position] for position in saves_outputs)]
        told = _ToyOp(
            tuple(reads), writes, time_ms, backward_ms, workspace_bytes, refusal, [], backward_ops, gradient_bytes
        )
        told.name = name or f"op{index}"
        self.ops.append(told)
        for value in saved:
            self.save(value, index)
        return writes

    def save(self, value: int, op: int) -> None:
        """Have autograd save `value` for the backward of forward op `op`."""
        if value not in self.ops[op].saves:
            self.ops[op].saves.append(value)
            self.values[value].savers.append(op)

    def hold(self, value: int, until: int | None = None) -> None:
        """The program itself holds the value until this slot (None: it never lets go)."""
        self.values[value].held_until = until

    def touch(self, value: int, slot: int) -> None:
        """The program looks at the value in this slot without an op, so it holds it until then."""
        self.values[value].touches = sorted({*(self.values[value].touches or ()), slot})

    def hand_out(self, value: int) -> None:
        """Somebody has the value's address, so nobody knows when it is read."""
        self.values[value].touches = None

    def too_small(self, value: int) -> None:
        """Mark the value as one that nobody decides on."""
        self.values[value].too_small = True

    def _new(self, value: _ToyValue) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def build(
        self,
        link: Link = FAST_LINK,
        *,
        persistent_bytes: int = 0,
        model: tuple[int, int] | None = None,
        workload: str = "toy",
    ) -> Profile:
        """Make the profile. `model`: (begin, end) of the ops of `model.forward`; all forward ops by default."""
        return _Build(self, link, persistent_bytes, model or (0, len(self.ops)), workload).profile()


class _Build:
    """Works out slots, lifetimes and bytes of a told step."""

    def __init__(self, step: ToyStep, link: Link, persistent_bytes: int, model: tuple[int, int], workload: str) -> None:
        self.step, self.link, self.model, self.workload = step, link, model, workload
        existing = sum(self._allocated(v.size_bytes) for v in step.values if v.role != "made")
        self.persistent_bytes = persistent_bytes + existing
        self.backward: list[tuple[int, int]] = []  # (forward op, how many-th op of its backward), in backward order
        for index in reversed(range(len(step.ops))):
            self.backward += [(index, part) for part in range(step.ops[index].backward_ops)]
        self.forward_ops = len(step.ops)
        self.end = self.forward_ops + len(self.backward) + 1
        self.unpack_slot = {op: self.forward_ops + place for place, (op, part) in enumerate(self.backward) if part == 0}

    def _allocated(self, size_bytes: int) -> int:
        return -(-size_bytes // self.step.round_bytes) * self.step.round_bytes

    def profile(self) -> Profile:
        values = tuple(self._value(index) for index in range(len(self.step.values)))
        entries, peaks = self._bytes(values)
        ops = tuple(self._op(slot, entries[slot], peaks[slot]) for slot in range(self.end))
        return Profile(
            workload=self.workload, mode="run", device=Device("cpu", "toy", 2**34), link=self.link, ops=ops,
            values=values, anchors=self._anchors(values), forward_ops=self.forward_ops, model_begin=self.model[0],
            model_end=self.model[1], persistent_bytes=self.persistent_bytes, step_ms=sum(op.time_ms for op in ops),
            peak_bytes=max(peaks), reserved_bytes=0, time_factor=1.0, model_signature="toy",
        )  # fmt: skip

    def _value(self, index: int) -> Value:
        told = self.step.values[index]
        unpacks = [self.unpack_slot[op] for op in told.savers if op in self.unpack_slot]
        held = told.held_until
        looks = [*told.readers, *(told.touches or ())]
        release = self.end if held is None else max([told.producer, held, *looks])
        death = max([release, *unpacks])
        for op in told.savers:
            if op not in self.unpack_slot:  # a node that never runs: dropped after the forward pass, or kept to the end
                death = max(death, self.forward_ops if op % 2 == 0 else self.end - 1)
        outside = any(not self.model[0] <= op < self.model[1] for op in told.savers)
        return Value(
            id=index, size_bytes=told.size_bytes, allocated_bytes=self._allocated(told.size_bytes), role=told.role,
            producer=told.producer, overwrites=told.overwrites, overwritten_at=told.overwritten_at,
            label=f"value {index}", dtype="float32", shape=(told.size_bytes,), saved=bool(told.savers),
            saved_outside_model=outside, release=min(release, self.end), first_unpack=min(unpacks, default=-1),
            death=min(death, self.end), fixed=self._fixed(told),
            touches=None if told.touches is None else tuple(told.touches),
        )  # fmt: skip

    def _fixed(self, told: _ToyValue) -> str | None:
        if told.role != "made":
            return f"a {told.role}"
        if not told.savers:
            return "not saved"
        if told.overwritten_at >= 0:
            return "written over"
        if told.held_until is None:
            return "held by the program"
        return "too small" if told.too_small else None

    def _bytes(self, values: Sequence[Value]) -> tuple[list[int], list[int]]:
        """Bytes at the entry and at the peak of each slot."""
        change = [self.persistent_bytes] + [0] * (2 * self.end)
        for value in values:
            if value.role == "made":
                last = 2 * value.death + 1 if value.overwritten_at < 0 else 2 * value.overwritten_at
                first, beyond = 2 * value.producer + 1, min(last + 1, 2 * self.end)
                if first < beyond:
                    change[first] += value.allocated_bytes
                    change[beyond] -= value.allocated_bytes
        points = list(accumulate(change))[: 2 * self.end]
        gradients = [0] * self.forward_ops + [self.step.ops[op].gradient_bytes for op, _ in self.backward] + [0]
        for slot in range(self.end):
            workspace = self.step.ops[slot].workspace_bytes if slot < self.forward_ops else 0
            following = gradients[slot + 1] if slot + 1 < self.end else 0
            points[2 * slot] += gradients[slot]
            points[2 * slot + 1] += max(workspace, gradients[slot], following)
        return points[0::2], points[1::2]

    def _op(self, slot: int, entry_bytes: int, peak_bytes: int) -> Op:
        if slot < self.forward_ops:
            told = self.step.ops[slot]
            return Op(
                slot, f"toy.{told.name}", "forward", f"layer{slot}", told.time_ms, entry_bytes, peak_bytes, told.reads,
                told.writes, f"toy{slot}", told.refusal,
            )  # fmt: skip
        if slot == self.end - 1:
            return Op(slot, "pooch.end", "backward", "", 0.0, entry_bytes, peak_bytes)
        of_op, part = self.backward[slot - self.forward_ops]
        time_ms = self.step.ops[of_op].backward_ms
        return Op(slot, f"toy::back{of_op}.{part}", "backward", f"node{of_op}", time_ms, entry_bytes, peak_bytes)

    def _anchors(self, values: Sequence[Value]) -> tuple[tuple[int, tuple[int, ...]], ...]:
        anchors = []
        for op, slot in sorted(self.unpack_slot.items(), key=lambda item: item[1]):
            first = [v for v in self.step.ops[op].saves if values[v].role == "made" and values[v].first_unpack == slot]
            if first:
                anchors.append((slot, tuple(first)))
        return tuple(anchors)


def chain(
    layers: int,
    *,
    size_bytes: int = 8,
    time_ms: float = 1.0,
    link: Link = FAST_LINK,
    persistent_bytes: int = 0,
    unsaved_between: int = 0,
    workspace_bytes: int = 0,
    gradient_bytes: int = 0,
) -> Profile:
    """A row of layers: each reads and saves what the last one made; `unsaved_between` ops of a layer save nothing."""
    step = ToyStep()
    current = step.external(size_bytes)
    for _ in range(layers):
        saves: tuple[int, ...] = (current,)
        for _ in range(unsaved_between + 1):
            (current,) = step.op(
                [current], [size_bytes], saves=saves, time_ms=time_ms, backward_ms=2 * time_ms,
                workspace_bytes=workspace_bytes, gradient_bytes=gradient_bytes,
            )  # fmt: skip
            saves = ()
    return step.build(link, persistent_bytes=persistent_bytes, workload=f"chain{layers}")


def ladder(depth: int, *, size_bytes: int = 8, link: Link = FAST_LINK) -> Profile:
    """A U-Net's shape: `depth` layers down, as many up; each one up also reads (and saves) its partner from below."""
    step = ToyStep()
    current = step.external(size_bytes)
    skips = []
    for level in range(depth):
        (current,) = step.op([current], [max(1, size_bytes >> level)], saves=[current])
        skips.append(current)
    for level in reversed(range(depth)):
        reads = list(dict.fromkeys([current, skips[level]]))
        (current,) = step.op(reads, [max(1, size_bytes >> level)], saves=reads)
    return step.build(link, workload=f"ladder{depth}")


def blocks(count: int, *, size_bytes: int = 1 << 20, link: Link = DISK_LINK) -> Profile:
    """Residual blocks, each of five ops (linear, in-place activation, linear with a small second output, dropout
    that cannot be replayed, sum), with unequal sizes: a profile of realistic variety in any length."""
    step = ToyStep(round_bytes=512)
    current = step.external(size_bytes)
    for _ in range(count):
        weight = step.parameter(4096)
        common = {"workspace_bytes": size_bytes // 8, "gradient_bytes": size_bytes}
        (wide,) = step.op([current, weight], [4 * size_bytes], saves=[current], time_ms=4.0, name="wide", **common)
        (active,) = step.op([wide], [0], overwrites=wide, saves_outputs=[0], time_ms=1.0, name="act", **common)
        narrow, small = step.op(
            [active, weight], [size_bytes, 64], saves=[active], saves_outputs=[1], time_ms=4.0, name="narrow", **common
        )
        step.too_small(small)
        (dropped,) = step.op(
            [narrow], [size_bytes], saves_outputs=[0], refusal="it draws noise", name="noise", **common
        )
        (current,) = step.op([current, dropped], [size_bytes], time_ms=0.5, name="sum", **common)
    return step.build(link, persistent_bytes=size_bytes, workload=f"blocks{count}")


def profiles(max_ops: int = 20) -> st.SearchStrategy[Profile]:
    """Random steps (see `random_profile`); a short steps are rare."""
    seeds = st.integers(0, 2**32 - 1)
    counts = st.integers(2, max_ops).map(lambda count: max_ops + 2 - count)  # hypothesis prefers small numbers
    return st.builds(lambda count, seed: random_profile(Random(seed), count), counts, seeds)


def sharded_profiles(max_ops: int = 20) -> st.SearchStrategy[Profile]:
    """Random steps whose inputs and parameters FSDP gathers, each in a unit of its own."""
    seeds = st.integers(0, 2**32 - 1)
    return st.builds(lambda profile, seed: sharded(profile, Random(seed)), profiles(max_ops), seeds)


def sharded(profile: Profile, random: Random) -> Profile:
    """The step with all that existed before it gathered in stretches of the backward pass, most of them long."""
    existing = {value.id for value in profile.values if value.role != "made" and value.overwritten_at < 0}
    values = tuple(replace(value, role="transient") if value.id in existing else value for value in profile.values)
    units = tuple(GatheredUnit(f"unit {value}", (value,), _windows(profile, random)) for value in sorted(existing))
    return replace(profile, values=values, gathered=units)


def _windows(profile: Profile, random: Random) -> tuple[tuple[int, int], ...]:
    slots = range(profile.forward_ops, len(profile.ops))
    edges = sorted(random.sample(slots, min(len(slots), random.choice([0, 2, 2, 4])) // 2 * 2))
    if len(edges) == 2 and random.random() < 0.7:
        edges = [slots[0], slots[-1]]
    return tuple(zip(edges[0::2], edges[1::2], strict=True))


def random_profile(random: Random, count: int) -> Profile:
    """Chains, skips, shared inputs, in-place ops, several outputs, unsaved intermediates, unequal sizes, ops that
    cannot be replayed, values that the program holds, nodes that never run, and links of all kinds."""
    step = ToyStep(round_bytes=random.choice([1, 4]))
    pool = [step.external(random.randint(1, 9)), step.parameter(random.randint(1, 9))]
    if random.random() < 0.2:
        pool.append(step.external(3, held_until=random.randint(0, 3)))
    saving, refusing = random.uniform(0.2, 0.9), random.choice([0.0, 0.0, 0.2])
    for _ in range(count):
        pool += _random_op(random, step, pool, saving, refusing)
    for value in [v for v in pool if step.values[v].role == "made"]:
        special = random.randint(0, 19)
        if special == 0:
            step.hold(value)
        elif special <= 2:
            step.hold(value, until=random.randint(0, 2 * count))
        elif special == 3:
            step.too_small(value)
        elif special == 4:
            step.hand_out(value)
        elif special <= 6:
            step.touch(value, random.randint(step.values[value].producer, count - 1))
        elif special <= 10:
            step.hold(value, until=random.randint(step.values[value].producer, count - 1))
    begin = random.choice([0, 0, random.randint(0, count // 2)])
    model = (begin, random.choice([count, random.randint(begin, count)]))
    return step.build(random_link(random), persistent_bytes=random.randint(0, 20), model=model)


def random_link(random: Random) -> Link:
    """Fast and slow, with and without latency, one queue or two, with and without a share of compute."""
    return Link(
        "toy tier",
        out_latency_ms=random.choice([0.0, 0.25]),
        in_latency_ms=random.choice([0.0, 0.5]),
        out_bytes_per_ms=random.choice([1.0, 8.0, 1e6]),
        in_bytes_per_ms=random.choice([2.0, 8.0, 1e6]),
        full_duplex=random.random() < 0.5,
        out_compute_share=random.choice([0.0, 0.5]),
        in_compute_share=random.choice([0.0, 1.0]),
    )


def _random_op(random: Random, step: ToyStep, pool: list[int], saving: float, refusing: float) -> list[int]:
    """Add one random op; a value that it writes over leaves the pool."""
    candidates = [
        random.choice(pool[-3:] if random.random() < 0.7 else pool) for _ in range(random.choice([1, 1, 2, 3]))
    ]
    reads = list(dict.fromkeys(candidates))
    free_to_change = [r for r in reads if step.values[r].role == "made" and not step.values[r].savers]
    target = random.choice(free_to_change) if free_to_change and random.random() < 0.4 else -1
    if target >= 0:
        pool.remove(target)
    sizes = [random.randint(1, 40) for _ in range(random.choice([1, 1, 1, 2, 3]))]
    made = [r for r in reads if r != target and step.values[r].role == "made"]
    writes = step.op(
        reads,
        sizes,
        saves=[r for r in made if random.random() < saving],
        saves_outputs=[position for position in range(len(sizes)) if random.random() < saving / 3],
        overwrites=target,
        time_ms=random.choice([0.0, 0.5, 1.0, 3.0]),
        workspace_bytes=random.choice([0, 0, 5, 30]),
        refusal="a toy that cannot be replayed" if random.random() < refusing else None,
        backward_ops=random.choice([1, 1, 1, 1, 1, 2, 2, 0]),
        gradient_bytes=random.choice([0, 4, 25]),
    )
    return list(writes)


def random_decisions(random: Random, dataflow: Dataflow) -> dict[int, Choice]:
    """A random possible choice for most activations (those left out are kept)."""
    weights = random.choice([(1, 3, 3), (1, 1, 5), (1, 5, 1), (3, 1, 1)])
    chosen: dict[int, Choice] = {}
    for value in dataflow.activations:
        choice: Choice = random.choices(("keep", "swap", "recompute"), weights)[0]
        if choice == "recompute" and dataflow.refusal(value.id) is not None:
            choice = "swap"
        if choice != "keep" or random.random() < 0.5:
            chosen[value.id] = choice
    return chosen


def some_decisions(dataflow: Dataflow, pattern: str = "ksr") -> dict[int, Choice]:
    """Decisions in turn by letters of `pattern` (k, s, r), with swap where recompute is impossible."""
    names: dict[str, Choice] = {"k": "keep", "s": "swap", "r": "recompute"}
    chosen: dict[int, Choice] = {}
    for place, value in enumerate(dataflow.activations):
        choice = names[pattern[place % len(pattern)]]
        chosen[value.id] = "swap" if choice == "recompute" and dataflow.refusal(value.id) is not None else choice
    return chosen
