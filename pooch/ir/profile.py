"""The profile: one training step as measured. Frozen data, no torch.

Time in a profile is a row of *slots*, one per op: forward ops first, then backward ops, then one
closing op `pooch.end` of no duration. Slot k lasts from the moment just before op k starts to the
moment just before op k + 1 starts, so whatever autograd or the program frees after op k still counts in slot k.
Memory is known at two *points* of each slot: `2k`, its entry (just before op k starts, where the
actions of a schedule happen), and `2k + 1`, its body (the highest live bytes while it lasts).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import pandas

Phase = Literal["forward", "backward"]
Sizes = Literal["requested", "rounded", "allocated"]
Role = Literal["parameter", "buffer", "external", "made", "transient"]


@dataclass(frozen=True, slots=True)
class Device:
    """Where the profile was taken.

    Attributes:
        kind: "cpu", or the type of the accelerator as PyTorch calls it ("cuda").
        name: processor or card, as it calls itself.
        memory_bytes: device memory in all.
        modelled: True when times come from a device model and not from this device.
        software: versions, such as {"torch": "2.13.0+cpu", "python": "3.11.7"}.
    """

    kind: str
    name: str
    memory_bytes: int
    modelled: bool = False
    software: dict[str, str] = field(default_factory=dict)

    @property
    def has_streams(self) -> bool:
        """Whether the host issues ops that the device runs later; on a CPU the host itself computes."""
        return self.kind != "cpu"


@dataclass(frozen=True, slots=True)
class Link:
    """Cost of moving bytes between the device and the swap tier. A copy of n bytes lasts `latency + n * ranks / rate`.

    Attributes:
        tier: what lies at the other end, such as "spill file /tmp (direct)" or "pinned host memory".
        out_latency_ms, in_latency_ms: fixed cost of one copy, in ms.
        out_bytes_per_ms, in_bytes_per_ms: rate of long copies, in bytes per ms.
        full_duplex: both directions run at once at full rate; else all copies share one queue.
        out_compute_share, in_compute_share: compute work that one ms of copying displaces, in ms (0 = free
            overlap): while a copy runs, compute advances at rate 1 / (1 + share).
        ranks: processes that copy over this link at the same time; each gets that part of the rates.
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

    def out_ms(self, size_bytes: int) -> float:
        """Duration of one copy of `size_bytes` from the device to the tier, in ms."""
        return self.out_latency_ms + size_bytes * self.ranks / self.out_bytes_per_ms

    def in_ms(self, size_bytes: int) -> float:
        """Duration of one copy of `size_bytes` from the tier to the device, in ms."""
        return self.in_latency_ms + size_bytes * self.ranks / self.in_bytes_per_ms


@dataclass(frozen=True, slots=True)
class HookCosts:
    """What the runtime itself takes of the host under a plan that does anything, in ms. None of it in-core.

    On a CPU this is time of compute. A device with streams waits for it only where the host is behind.

    Attributes:
        op_ms: for each forward op of the planned region. replay_ms: for each op that is replayed, beyond what it
            took the first time.
        copy_ms: for each copy that is begun.
    """

    op_ms: float = 0.0
    replay_ms: float = 0.0
    copy_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Op:
    """One executed operator that computes (pure views are left out).

    Attributes:
        index: position in the step = its slot.
        name: "aten.convolution.default" in the forward pass, "aten::convolution_backward" in the backward pass.
        phase: "forward" or "backward".
        module: path of the module that called it ("" outside of any module; in backward: the autograd node).
        time_ms: duration, rescaled so that all ops sum up to the unprofiled step.
        entry_bytes: live device bytes just before it starts, in-core.
        peak_bytes: highest live device bytes in its slot, in-core.
        reads: ids of the values it reads (forward only).
        writes: ids of the values it makes (forward only).
        fingerprint: name, shapes and dtypes of outputs as text, to recognise it at run time (forward only).
        refusal: why it cannot be replayed, or None where it can (backward ops are never replayed).
        random: draws from the random generator.
        host_ms: time of the host to issue it to a device with streams, where that is known; 0 on a CPU, whose time of
            compute it is. In-core the host is never late: up to each op it has taken no longer than the device.
        hooked_bytes: bytes that its peak rises by while hooks are attached: under a dispatch mode `aten::linear` adds
            its bias out of place where it otherwise adds in place.
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


@dataclass(frozen=True, slots=True)
class Value:
    """The contents of one storage between two writes.

    Attributes:
        id: position in `Profile.values`.
        size_bytes: bytes of the storage (what a copy moves).
        allocated_bytes: bytes that the allocator takes for it (rounded up on a GPU).
        role: "parameter" and "buffer" of the model; "external": existed before the step (inputs, constants);
            "made": written by an op of the forward pass; "transient": in a storage that the program itself empties and
            fills, as FSDP does with gathered parameters, so nothing can count on its being there.
        producer: index of the op that wrote it; -1 for values that existed before the step.
        overwrites: id of the value whose storage an in-place op reused for this one, or -1.
        overwritten_at: index of the op that wrote over this value's storage in place, or -1.
        label: for people: module path and operator.
        dtype, shape: of the tensor that was first seen on it, for people.
        saved: autograd saved it for the backward pass.
        saved_outside_model: at least one save happened outside of calls of the model (in the loss, say), so a
            plan for the region "model" cannot decide on it.
        release: last slot in which the program itself (not autograd) holds it; `len(ops)` where it never lets go.
        first_unpack: slot of its first read by the backward pass, -1 where never read.
        death: last slot in which it is held in-core; `len(ops)` where it outlives the step.
        fixed: why nothing can be decided on it ("too small", "held by the program", ...), or None for an activation
            that a plan decides on.
        touches: forward slots in which the program looks at it without an op of the profile: through a view, `.item()`
            or `print`. None: unknown, or its address was handed out (`.numpy()`, `.data_ptr()`, a collective), so that
            nobody sees when it is read and its storage cannot be emptied while the program holds it.
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


@dataclass(frozen=True, slots=True)
class Profile:
    """One measured training step.

    Attributes:
        workload: name of what was profiled, for people.
        mode: how it was profiled: "run", "offload" or "fake".
        device, link: where, and the cost of transfers.
        ops: forward ops, backward ops, and the closing op `pooch.end`; `ops[k].index == k`.
        values: every value of the step; `values[i].id == i`.
        anchors: for each backward slot at whose entry a value made by the step is first unpacked: (slot, value ids in
            order of unpacking). Only there can a schedule act during the backward pass.
        forward_ops: number of forward ops; `ops[forward_ops:]` is the backward pass.
        model_begin, model_end: the ops of the first call of the model, its hooks included, are
            `ops[model_begin:model_end]`; the same number where the step never calls the model itself.
        persistent_bytes: parameters, buffers, optimizer state (also what its first step will create), inputs and
            whatever else lived before the step; counted in every `entry_bytes` and `peak_bytes`.
        step_ms: unprofiled in-core time of forward + backward (median of the repeats). In mode "offload" it is
            the sum of op times: the model could not run plainly.
        peak_bytes: in-core peak of live device bytes. reserved_bytes: peak that the allocator reserved (0 = unknown).
        time_factor: what measured op times were multiplied by so that they sum up to `step_ms`.
        model_signature: digest of the names, shapes and dtypes of the model's parameters and buffers.
        batch_size: items per step, 0 where unknown.
        notes: anything a reader should know ("times modelled", "2 ops could not be attributed").
        sizes: what all bytes of the profile count. "requested": what the program asked for, as the CPU's allocator
            counts; "allocated": blocks as the caching allocator of the recorded step handed them out, rounded up to 512
            bytes and not split where little would be left; "rounded": rounded up to 512 bytes alone (mode "fake" for
            such a device).
        hooks: what a plan costs the host besides; all 0 where that was not measured (modelled devices).
    """

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
    sizes: Sizes = "requested"

    @property
    def activations(self) -> tuple[Value, ...]:
        """The values that a plan decides on, in forward order."""
        return tuple(value for value in self.values if value.fixed is None)

    def shared_by(self, ranks: int) -> Profile:
        """The same step where so many processes copy over the link at the same time, as several GPUs on one bus do."""
        return replace(self, link=replace(self.link, ranks=ranks))

    def save(self, path: str | Path) -> None:
        """Write validated JSON (beside the target first, then renamed)."""
        from pooch.ir.files import save_document

        save_document(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a saved profile.

        Raises:
            FileFormatError: missing, unreadable, truncated, foreign, of a newer version, or inconsistent.
        """
        from pooch.ir.files import load_document

        return load_document(cls, path)

    def to_frame(self) -> pandas.DataFrame:
        """One row per activation, in forward order (pandas)."""
        from pooch.ir.frames import profile_frame

        return profile_frame(self)
