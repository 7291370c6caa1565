"""The profile: one measured training step. No torch.

Time in a profile is a sequence of *slots*, one per op: forward ops, backward ops, then a closing op `pooch.end` of no
duration. Slot k lasts from just before op k starts to just before op k + 1 starts, so what autograd or the program
frees after op k still counts in slot k. Memory is known at two *points* of each slot: `2k`, its entry (just before op k
starts, where the actions of a schedule happen), and `2k + 1`, its body (the highest live bytes while it lasts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from ..ground.plugins import view
from ..ground.units import MOST_BYTES, format_bytes, format_ms, plural
from ..ground.visible import one_line
from .files import Document
from .modelled_ranks import ModelledRanks
from .persistent import PersistentTensor
from .split import Split

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

Phase = Literal["forward", "backward"]
SizeKind = Literal["requested", "rounded", "allocated"]
Role = Literal["parameter", "buffer", "external", "made", "transient"]
LONGEST_NAME = 20  # of what `repr` shows


def shown_name(workload: str) -> str:
    """The name of a workload as `repr` shows it."""
    return one_line(workload, LONGEST_NAME) or "a step"


@dataclass(frozen=True, slots=True)
class Device:
    """The device of a profile.

    Attributes:
        kind: "cpu", or the type of the accelerator as PyTorch calls it ("cuda").
        name: of the processor or card.
        memory_bytes: total device memory.
        modelled: whether times come from a device model instead of this device.
        software: versions, such as {"torch": "2.13.0+cpu", "python": "3.11.7"}.
        shares_memory: whether its memory is that of the host, so that a copy there frees nothing.
    """

    kind: str
    name: str
    memory_bytes: int
    modelled: bool = False
    software: dict[str, str] = field(default_factory=dict)
    shares_memory: bool = False

    @property
    def has_streams(self) -> bool:
        """Whether the host issues ops that the device runs later; on a CPU, the host itself computes."""
        return self.kind != "cpu"


@dataclass(frozen=True, slots=True)
class Link:
    """Cost of moving bytes between the device and the swap tier. A copy of n bytes lasts `latency + n * ranks / rate`.

    Attributes:
        tier: the swap tier, such as "spill file /tmp (direct)" or "pinned host memory".
        out_latency_ms: fixed cost of one copy to the tier.
        in_latency_ms: fixed cost of one copy from the tier.
        out_bytes_per_ms: rate of long copies to the tier.
        in_bytes_per_ms: rate of long copies from the tier.
        full_duplex: whether both directions run at once at full rate; otherwise all copies share one queue.
        out_compute_share: compute time in ms that 1 ms of moving bytes to the tier displaces (0: free overlap). While
            they move, compute advances at rate 1 / (1 + share). The latency of a copy displaces nothing.
        in_compute_share: the same for moving bytes from the tier.
        ranks: processes that copy over this link at the same time and share its rates.
        packed_out_bytes_per_ms: rate of long copies of masks to the tier, which packs them. 0: it does not.
        packed_in_bytes_per_ms: rate of long copies of masks from the tier.
    """

    tier: str
    out_latency_ms: float
    in_latency_ms: float
    out_bytes_per_ms: float
    in_bytes_per_ms: float
    full_duplex: bool = True
    out_compute_share: float = 0.0
    in_compute_share: float = 0.0
    ranks: int = 1
    packed_out_bytes_per_ms: float = 0.0
    packed_in_bytes_per_ms: float = 0.0

    def out_ms(self, size_bytes: int, *, packs: bool = False) -> float:
        """Duration of one copy of `size_bytes` from the device to the tier, in ms."""
        return self.out_latency_ms + self.moving_out_ms(size_bytes, packs=packs)

    def in_ms(self, size_bytes: int, *, packs: bool = False) -> float:
        """Duration of one copy of `size_bytes` from the tier to the device, in ms."""
        return self.in_latency_ms + self.moving_in_ms(size_bytes, packs=packs)

    def moving_out_ms(self, size_bytes: int, *, packs: bool = False) -> float:
        """For how long the bytes of such a copy to the tier move, in ms, which slows compute down."""
        return size_bytes * self.ranks / max(self.out_bytes_per_ms, self.packed_out_bytes_per_ms if packs else 0.0)

    def moving_in_ms(self, size_bytes: int, *, packs: bool = False) -> float:
        """For how long the bytes of such a copy from the tier move, in ms, which slows compute down."""
        return size_bytes * self.ranks / max(self.in_bytes_per_ms, self.packed_in_bytes_per_ms if packs else 0.0)


@dataclass(frozen=True, slots=True)
class HookCosts:
    """Host time that the runtime takes under a plan that swaps or recomputes anything.

    On a CPU this is compute time. A device with streams waits for it only if the host is behind.

    Attributes:
        op_ms: for each forward op of the planned region, between ops that move little.
        replay_ms: for each op that is replayed, beyond its time in the forward pass.
        copy_ms: for each copy that is started.
        view_ms: for each call of the planned region that computes nothing, see `Op.views`.
        adds_in_place: whether steps are watched natively, so that no `Op.hooked_bytes` are taken.
        step_ms: for each step, however many ops it has.
        cold_op_ms: that a forward op takes beyond `op_ms` where it moves so many bytes that caches are cold.
    """

    op_ms: float = 0.0
    replay_ms: float = 0.0
    copy_ms: float = 0.0
    view_ms: float = 0.0
    adds_in_place: bool = False
    step_ms: float = 0.0
    cold_op_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class InFlight:
    """Microbatches of a step that are in flight at once: their forward passes are over, their backward passes are not.

    The bytes of all ops of such a profile include the other microbatches, as if these kept everything.

    Attributes:
        microbatches: that are in flight at most, the one that the profile shows included.
        resident_bytes: that one of them holds between its two passes, in-core.
        gradient_bytes: gradients that the first backward pass makes and later ones add to. 0: they are there all the
            time, and are persistent bytes.
    """

    microbatches: int = 1
    resident_bytes: int = 0
    gradient_bytes: int = 0

    def others_bytes(self, resident_bytes: int, missing_bytes: int) -> int:
        """Bytes that the others add to a slot at most.

        All of them are in flight during the last forward pass and the first backward pass. In the second backward pass
        there is one less, but all gradients exist, some of which the first one has yet to make.

        Args:
            resident_bytes: that each of them holds.
            missing_bytes: gradients that do not exist yet in this slot of the first backward pass; 0 in forward passes.
        """
        if self.microbatches == 1:
            return 0
        return (self.microbatches - 2) * resident_bytes + max(resident_bytes, missing_bytes)


@dataclass(frozen=True, slots=True)
class Op:
    """One executed operator that computes (not a mere view).

    Attributes:
        index: position in the step = its slot.
        name: "aten.convolution.default" in the forward pass, "aten::convolution_backward" in the backward pass.
        phase: "forward" or "backward".
        module: path of the module that called it ("" outside any module; in the backward pass, the autograd node).
        time_ms: duration, scaled so that all ops sum up to the time of the step without profiling.
        entry_bytes: live device bytes just before it starts, in-core.
        peak_bytes: highest live device bytes in its slot, in-core.
        reads: ids of the values that it reads (forward only).
        writes: ids of the values that it makes (forward only).
        fingerprint: name, shapes and dtypes of its outputs, to recognize it at run time (forward only).
        refusal: why it cannot be replayed, or None if it can (backward ops are never replayed).
        random: whether it draws random numbers.
        host_ms: host time to issue it to a device with streams, if known; 0 on a CPU, where it is compute time.
            In-core, the host is never late: up to each op it has taken no longer than the device.
        hooked_bytes: bytes by which its peak rises while hooks are attached: under a dispatch mode, `aten::linear` adds
            its bias out of place where it otherwise adds in place.
        gradient_bytes: bytes that are allocated in its slot and outlive the step: gradients (backward only).
        views: calls since the op before it that make no value, such as views, and so are no ops themselves; hooks see
            them all the same (forward only).
    """

    index: int
    name: str
    phase: Phase
    module: str
    time_ms: float
    entry_bytes: int
    peak_bytes: int
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    fingerprint: str = ""
    refusal: str | None = None
    random: bool = False
    host_ms: float = 0.0
    hooked_bytes: int = 0
    gradient_bytes: int = 0
    views: int = 0


@dataclass(frozen=True, slots=True)
class Value:
    """The contents of one storage between two writes.

    Attributes:
        id: position in `Profile.values`.
        size_bytes: of the storage, which is what a copy moves.
        allocated_bytes: that the allocator takes for it (rounded up on a GPU).
        role: "parameter" and "buffer" of the model; "external": existed before the step (inputs, constants);
            "made": written by an op of the forward pass; "transient": in a storage that the program itself empties and
            fills, as FSDP does with gathered parameters, so that nothing can rely on its contents outside of the
            windows of a `GatheredUnit`.
        producer: index of the op that wrote it; -1 for values that existed before the step.
        overwrites: id of the value that an in-place op overwrote with this one, or -1.
        overwritten_at: index of the op that overwrote it in place, or -1.
        label: module path and operator.
        dtype: of the first tensor that was seen on it.
        shape: of that tensor.
        saved: whether autograd saved it for the backward pass.
        saved_outside_model: whether it was also saved outside calls of the model (in the loss, for example), so that a
            plan for the region "model" cannot decide on it.
        release: last slot in which the program itself (not autograd) holds it; `len(ops)` if it never releases it.
        first_unpack: slot of its first read by the backward pass, or -1.
        death: last slot in which anything holds it in-core; `len(ops)` if it outlives the step.
        fixed: why a plan cannot decide on it ("too small", "held by the program", ...), or None for an activation.
        touches: forward slots in which the program reads it without an op of the profile: through a view, `.item()` or
            `print`. None: unknown, or its address was passed on (`.numpy()`, `.data_ptr()`, a collective), so that
            reads cannot be seen and its storage cannot be emptied while the program holds it.
        packs: whether its bytes take a fraction of their room where the tier packs: a mask, or all the same. This is as
            it was found in the step, and decides about times alone.
    """

    id: int
    size_bytes: int
    allocated_bytes: int
    role: Role
    producer: int
    overwrites: int
    overwritten_at: int
    label: str
    dtype: str
    shape: tuple[int, ...]
    saved: bool
    saved_outside_model: bool
    release: int
    first_unpack: int
    death: int
    fixed: str | None
    touches: tuple[int, ...] | None = None
    packs: bool = False


@dataclass(frozen=True, slots=True)
class GatheredUnit:
    """Parameters that FSDP gathers from all ranks together, and empties together (an `FSDPParamGroup`).

    Attributes:
        name: the modules that it was made of ("" for the root).
        values: ids of its gathered parameters, which have the role "transient". A parameter that is gathered several
            times in the forward pass has several.
        windows: (first slot, last slot) of each stretch of the backward pass at whose entries all of them are there.
            The unit's backward pass opens it, and closes it again.
    """

    name: str
    values: tuple[int, ...]
    windows: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Profile(Document):
    """One measured training step.

    Attributes:
        workload: name of what was profiled.
        mode: how it was profiled.
        device: where it was profiled, or the modelled device.
        link: cost of transfers to the swap tier.
        ops: forward ops, backward ops, and the closing op `pooch.end`; `ops[k].index == k`.
        values: every value of the step; `values[i].id == i`.
        anchors: (slot, value ids in order of unpacking) for each backward slot at whose entry values made by the step
            are first unpacked. During the backward pass, a schedule can act only there.
        forward_ops: number of forward ops; `ops[forward_ops:]` is the backward pass.
        model_begin: index of the first op of the first call of the model, its hooks included.
        model_end: index after the last op of that call; equal to `model_begin` if the step never calls the model.
        persistent_bytes: parameters, buffers, optimizer state (also what its first step will create), inputs and
            everything else that lived before the step; counted in every `entry_bytes` and `peak_bytes`.
        step_ms: in-core time of the forward and backward pass without profiling (median of the repeats). In mode
            "offload" it is the sum of op times, since the step could not run plainly.
        peak_bytes: in-core peak of live device bytes.
        reserved_bytes: peak that the allocator reserved (0: unknown).
        time_factor: factor by which measured op times were scaled to sum up to `step_ms`.
        model_signature: digest of the names, shapes and dtypes of the model's parameters and buffers.
        batch_size: items per step (0: unknown).
        notes: for the reader ("times modelled", "2 ops could not be attributed").
        sizes: what bytes of the profile count. "requested": what the program requested, as on a CPU; "allocated":
            blocks of the caching allocator, rounded up to 512 bytes and not split if little would be left; "rounded":
            only rounded up to 512 bytes (mode "fake" for such a device).
        hooks: host time that a plan costs; all 0 if it was not measured (modelled devices).
        gathered: the units in which FSDP gathers parameters; none in profiles of other models.
        in_flight: other microbatches that the bytes of the ops include.
        accumulates: whether gradients live throughout the step, and so are among the persistent bytes.
        ranks: of several ranks that are modelled, of which this is one; None for what was profiled as it runs.
        splits: calls that run in slices in this step; none in plain training.
        split: the same step with calls that run in slices, or None if there is none that can or should. Its link and
            hooks are those of this profile, see `variant`.
        persistent: what outlives the step and could leave: parameters, buffers, gradients, the optimizer's state. Those
            of a profile without them stay.
    """

    format_name: ClassVar[str] = "pooch-profile"

    workload: str
    mode: Literal["run", "offload", "fake"]
    device: Device
    link: Link
    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    anchors: tuple[tuple[int, tuple[int, ...]], ...]
    forward_ops: int
    model_begin: int
    model_end: int
    persistent_bytes: int
    step_ms: float
    peak_bytes: int
    reserved_bytes: int
    time_factor: float
    model_signature: str
    batch_size: int = 0
    notes: tuple[str, ...] = ()
    hooks: HookCosts = HookCosts()
    sizes: SizeKind = "requested"
    gathered: tuple[GatheredUnit, ...] = ()
    in_flight: InFlight = InFlight()
    accumulates: bool = False
    ranks: ModelledRanks | None = None
    splits: tuple[Split, ...] = ()
    split: Profile | None = None
    persistent: tuple[PersistentTensor, ...] = ()

    @property
    def activations(self) -> tuple[Value, ...]:
        """The values that a plan decides on, in forward order."""
        return tuple(value for value in self.values if value.fixed is None)

    def shared_by(self, ranks: int) -> Profile:
        """The same step with several processes that copy over the link at the same time, such as GPUs on one bus."""
        return replace(self, link=replace(self.link, ranks=ranks))

    def with_in_flight(self, microbatches: int) -> Profile:
        """The same step while several microbatches of a pipeline stage, or of accumulated gradients, are in flight.

        Args:
            microbatches: that are in flight at most, this one included. 1 leaves the profile as it is.

        Raises:
            ValueError: the number is not positive, or the profile includes another number of them already.
        """
        if microbatches < 1:
            raise ValueError(f"{microbatches} microbatches in flight: there is at least one")
        if microbatches in (1, self.in_flight.microbatches):
            return self
        if self.in_flight.microbatches != 1:
            raise ValueError(f"the profile is for {self.in_flight.microbatches} microbatches in flight already")
        resident_bytes = self.ops[self.forward_ops].entry_bytes - self.persistent_bytes
        gradient_bytes = max(0, self.ops[-1].entry_bytes - self.persistent_bytes)
        in_flight = InFlight(microbatches, resident_bytes, gradient_bytes)
        missing = replace(self, in_flight=in_flight).missing_gradients()
        added = [in_flight.others_bytes(resident_bytes, missing_bytes) for missing_bytes in missing]
        if max(added) >= MOST_BYTES:
            raise ValueError(f"{microbatches} microbatches of {resident_bytes} bytes in flight are beyond all memory")
        ops = tuple(
            replace(op, entry_bytes=op.entry_bytes + more, peak_bytes=op.peak_bytes + more)
            for op, more in zip(self.ops, added, strict=True)
        )
        peak_bytes = max(op.peak_bytes for op in ops)
        return replace(self, ops=ops, peak_bytes=peak_bytes, reserved_bytes=0, in_flight=in_flight, split=None)

    def missing_gradients(self) -> list[int]:
        """By op: bytes of gradients that do not exist yet in the first backward pass, and do in later ones.

        A later pass makes them too, and adds them up when the node of the graph ends; until then both exist.
        """
        missing_bytes, made_bytes, node = self.in_flight.gradient_bytes, 0, ""
        found = [0] * self.forward_ops
        for op in self.ops[self.forward_ops :]:
            if op.module != node:
                missing_bytes, made_bytes, node = missing_bytes - made_bytes, 0, op.module
            found.append(max(0, missing_bytes))
            made_bytes += op.gradient_bytes
        return found

    @property
    def in_slices(self) -> Profile | None:
        """The same step with calls that run in slices, over the same link."""
        return None if self.split is None else replace(self.split, link=self.link, hooks=self.hooks)

    def variant(self, splits: Sequence[Split]) -> Profile:
        """The step as a plan with these splits has it: in slices, if there are any and this profile knows that step."""
        return (self.in_slices or self) if splits else self

    def __repr__(self) -> str:
        device = self.device
        place = f"{one_line(device.name, LONGEST_NAME)}, modelled" if device.modelled else device.kind
        batch = f"batch {self.batch_size}, " if self.batch_size else ""
        figures = f"{format_bytes(self.peak_bytes)} peak, {format_ms(self.step_ms)}"
        activations = plural(len(self.activations), "activation")
        return f"Profile({shown_name(self.workload)}, {batch}{place}: {figures}, {activations})"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return str(view("profile_html")(self))

    def plot(self, path: str | Path | None = None, *, depth: int | None = 2) -> Figure:
        """Draw live bytes over time, and the bytes of activations by layer; needs matplotlib, and no display.

        Args:
            path: a file to write the picture to (.png, .pdf or .svg). None: it is only returned.
            depth: number of names of the module path that make up a layer. None: all.

        Returns:
            The figure, which a notebook shows.

        Raises:
            UsageError: the file ends in something else.
            FileFormatError: the file cannot be written.
        """
        figure: Figure = view("profile_figure")(self, path, depth=depth)
        return figure

    def to_frame(self) -> pandas.DataFrame:
        """One row per activation in forward order, indexed by `activation` (its id).

        `layer` is the module that made the activation and `op` the operator. `pooch.activation_costs` has recompute
        costs.
        """
        import pandas

        of_value = ["label", "dtype", "shape", "size_bytes", "allocated_bytes", "producer", "first_unpack", "death"]
        of_value.append("saved_outside_model")
        columns = ["activation", "layer", "op", *of_value, "copy_out_ms", "copy_in_ms"]
        rows = []
        for value in self.activations:
            op = self.ops[value.producer]
            copies_ms = (
                self.link.out_ms(value.size_bytes, packs=value.packs),
                self.link.in_ms(value.size_bytes, packs=value.packs),
            )
            rows.append((value.id, op.module, op.name, *(getattr(value, name) for name in of_value), *copies_ms))
        return pandas.DataFrame(rows, columns=columns).set_index("activation")
