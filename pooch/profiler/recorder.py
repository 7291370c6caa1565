"""Records the forward pass: ops, the values that they read and write, and what autograd saves."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..executor.compiled import graph_text
from ..ground.errors import ProfileError
from ..ir.plan import GRAPH
from ..torchtools import accelerators
from ..torchtools.effects import StorageMap, argument_keys, new_tensors, written_tensors
from ..torchtools.memory_trace import marker
from ..torchtools.operators import OperatorFacts, call_refusal, operator_facts, reads_statistics
from ..torchtools.recurrent_dropout import INITIALISER, SEED_FINGERPRINTS
from ..torchtools.settings import called_as_unwatched
from ..torchtools.sharding import GATHERING, ShardedUnit, sharded_units
from ..torchtools.standing_aside import SilentMode
from ..torchtools.tensors import (
    FreedStorages,
    dtype_name,
    find_tensors,
    fingerprint,
    has_plain_storage,
    may_move,
    storage_key,
    storage_of,
    tensors_with_memory,
)
from ..torchtools.training_state import model_device
from ..torchtools.watch import address_of
from .modules import ModulePath


@dataclass(slots=True)
class OpRecord:
    """One forward op as it happened; fields as in `Op`.

    Attributes:
        call: number of its marker in the memory trace.
    """

    name: str
    module: str
    call: int
    time_ms: float
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    fingerprint: str
    refusal: str | None
    random: bool
    views: int


@dataclass(frozen=True, slots=True)
class OutlivingRecord:
    """A parameter or buffer of the models.

    Attributes:
        name: in its model, with the model's number before it where there are several.
        is_parameter: whether it is a parameter.
        is_trained: whether the backward pass makes a gradient for it.
        value: what its storage holds in the forward pass, or None if no op uses it.
        size_bytes: of its storage.
    """

    name: str
    is_parameter: bool
    is_trained: bool
    value: int | None
    size_bytes: int


@dataclass(slots=True)
class ValueRecord:
    """One value as it happened; fields as in `Value`, filled in during the step.

    Attributes:
        elsewhere: the device that holds it, if that is not the model's.
        released_after: index of the last op before the program released it, or None if it still held it when the
            forward pass ended.
        beside: whether another stream uses it.
        packs: whether the swap tier would pack what it held when autograd saved it.
    """

    id: int
    size_bytes: int
    pointer: int
    producer: int
    overwrites: int
    label: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    elsewhere: str
    beside: bool = False
    overwritten_at: int = -1
    saved: bool = False
    saved_outside_model: bool = False
    released_after: int | None = None
    touches: set[int] | None = field(default_factory=set)
    packs: bool = False


class _OwnWork(AbstractContextManager[None]):
    """Pooch's own work, which is not recorded. One object serves for all of it, however nested.

    Attributes:
        depth: how often it was entered and not left.
    """

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *exception: object) -> None:
        self.depth -= 1


GRAPHS_RUN = "compiled graphs run in the step, and nobody sees what they write"


@dataclass(slots=True)
class _Graph:
    """A compiled graph that is running.

    Attributes:
        call: number of its marker in the memory trace.
        mark: the marker.
        start_s: when it began.
        writes: the values that it makes.
        texts: what tells them from others.
    """

    call: int
    mark: AbstractContextManager[object]
    start_s: float
    writes: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


class ForwardRecorder(SilentMode):
    """A dispatch mode that records every op below autograd.

    Values are keyed by storage. The finalizer of a storage tells when it is gone, so an address that is reused later is
    never mistaken for it.

    Attributes:
        ops: in the order in which they ran.
        values: in the order in which they were made or first seen.
        model_begin: index of the first op of the model's first call, or -1.
        model_end: index of the op after its last, or -1.
        path: the module that is running.
        units: the units in which FSDP gathers parameters, known from the end of the forward pass on.
        has_graphs: whether compiled graphs are among the ops.
        unit_of: {gathered parameter: its unit}, for those that the unit's backward pass gathers again as they were.
        outliving: parameters and buffers of the models, known from the end of the forward pass on.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.ops: list[OpRecord] = []
        self.values: list[ValueRecord] = []
        self.model_begin = self.model_end = -1
        self.units: tuple[ShardedUnit, ...] = ()
        self.unit_of: dict[int, int] = {}
        self.outliving: tuple[OutlivingRecord, ...] = ()
        self.path = ModulePath(model, self._enter_model, self._leave_model)
        self._device = model_device(model)
        self._calls = 0
        self._views = 0
        self._value_of: dict[int, int] = {}
        self._exotic = StorageMap()  # storages of results without ordinary memory
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._depth = 0
        self._is_over = False
        self._parameters = {storage_key(p) for p in model.parameters() if has_plain_storage(p)}
        self._buffers = {storage_key(b) for b in model.buffers() if has_plain_storage(b)}
        self._stream = self._stream_now()
        self._own_work = _OwnWork()
        self._freed = FreedStorages(self.storage_gone)
        self.has_graphs = False
        self._graph: _Graph | None = None
        self._fingerprints: dict[tuple[object, ...], str] = {}
        self._op = threading.Lock()

    def _enter_model(self) -> None:
        self._depth += 1
        if self.model_begin < 0:
            self.model_begin = len(self.ops)
            if self._is_beside():
                raise ProfileError(
                    "the model is called on another stream than the one the step began on, so none of it could be "
                    "planned: enter the stream before profiling and before the planned step"
                )

    def _leave_model(self) -> None:
        self._depth -= 1
        if self.model_end < 0 and self._depth == 0:
            self.model_end = len(self.ops)

    def leave_for_good(self) -> None:
        """Note that the model, which was called once, has returned. May be repeated."""
        if self._depth:
            self._leave_model()

    def model_extent(self) -> tuple[int, int]:
        """Returns the first op of the model's first call and the op after its last; (0, 0) if the model is not called.

        An exception that leaves the call also ends it, so whatever begins also ends.
        """
        return max(0, self.model_begin), max(0, self.model_end)

    @property
    def inside_model(self) -> bool:
        """Whether the first call of the model is running; later calls count as outside."""
        return self._depth > 0 and self.model_end < 0

    def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Runs an op, and records it."""
        if not self._op.acquire(blocking=False):
            return self._run_overlapping(func, args, kwargs or {})
        try:
            with self._own_work:
                return self._dispatch(func, args, kwargs or {})
        finally:
            self._op.release()

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        facts = operator_facts(func)
        if self.is_silent:
            return self._run_unseen(func, facts, args, kwargs)
        if facts.is_view:
            self._views += 1
            if not facts.reads_nothing:
                self._look((args, kwargs), max(0, len(self.ops) - 1))
            return func(*args, **kwargs)
        if self._is_beside():
            return self._run_beside(func, facts, args, kwargs)
        given = find_tensors((args, kwargs))
        reads = self._read_values(func, facts, args, kwargs, given)
        written = written_tensors(facts, args, kwargs) if facts.written or facts.written_names else {}
        read_keys = argument_keys(given, {})
        call = self._calls
        self._calls += 1
        result, elapsed_ms = self._run(func, args, kwargs, call)
        outputs = find_tensors(result)
        for tensor in tensors_with_memory([each for each in outputs if not has_plain_storage(each)])[0]:
            self._exotic.bind(tensor.untyped_storage(), 1)
        made = new_tensors(written, outputs, read_keys)
        if facts.name == INITIALISER:
            self._forget_seed()
        elif made:
            refusal = facts.refusal or (call_refusal(func, args) if facts.depends_on_call else None)
            if refusal is None and not all(map(has_plain_storage, outputs)):
                refusal = "its result is not an ordinary strided tensor"
            exotic = [tensor for tensor in given if not has_plain_storage(tensor)]
            if refusal is None and any(map(self._is_made_here, exotic)):
                refusal = "it reads a tensor of the step that is not an ordinary strided one"
            self._record(facts, refusal, call, elapsed_ms, reads, made, self._fingerprint(facts.name, outputs))
        else:
            self._views += 1
        slot = max(0, len(self.ops) - 1)
        self._look(given, slot, handed_out=facts.may_surprise)
        if facts.statistics:
            self._look([args[position] for position in facts.statistics if position < len(args)], slot, handed_out=True)
        return result

    def _run_overlapping(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an op while another thread runs one of the step, as where `torch.jit.fork` has it do so.

        Raises:
            ProfileError: The step is recorded to be planned, not to train.
        """
        raise ProfileError(
            "the step computes in two threads at once, so the order of its ops is not fixed: keep a backward pass "
            "within the step on one device"
        )

    def _fingerprint(self, name: str, outputs: list[torch.Tensor]) -> str:
        """Returns an op's fingerprint. Steps repeat their ops, and formatting takes longer than a look."""
        key = (name, *[(tensor.dtype, tensor.shape) for tensor in outputs])
        known = self._fingerprints.get(key)
        if known is None:
            known = self._fingerprints[key] = fingerprint(name, outputs)
        return known

    def _run_beside(self, func: Any, facts: OperatorFacts, args: Any, kwargs: Any) -> Any:
        """Runs an op on a stream of the program's own, as FSDP's collectives and prefetches do. It is not part of the
        plan, and a plan cannot move anything that it uses.
        """
        call = self._calls
        self._calls += 1
        written = written_tensors(facts, args, kwargs)
        result, _ = self._run(func, args, kwargs, call)
        self._look((args, kwargs), max(0, len(self.ops) - 1), handed_out=True)
        for tensor in tensors_with_memory((args, kwargs))[0]:
            key = storage_key(tensor)
            value = self.values[self._value_of[key]] if key in self._value_of else None
            if value is not None and (value.role == "made" or key in written):
                value.role, value.beside = "transient", True
        return result

    def _run_unseen(self, func: Any, facts: OperatorFacts, args: Any, kwargs: Any) -> Any:
        """Runs an op of a compiled function, which may run other kernels the next time. A plan cannot move what it
        writes.
        """
        self._look((args, kwargs), max(0, len(self.ops) - 1), handed_out=True)
        for key in written_tensors(facts, args, kwargs):
            if key in self._value_of:
                self.values[self._value_of[key]].role = "transient"
        return called_as_unwatched(func, facts, args, kwargs)

    def graph_begins(self) -> None:
        """Begins to record a compiled graph as an op."""
        with self._own_work:
            mark = marker(f"op {self._calls}")
            self._graph = _Graph(self._calls, mark, time.perf_counter())
            self._calls += 1
            self.has_graphs = True
            mark.__enter__()

    def graph_ends(self) -> None:
        """Records the compiled graph that ran, if any: it makes what it has saved."""
        graph, self._graph = self._graph, None
        if graph is None:
            return
        with self._own_work:
            elapsed_ms = (time.perf_counter() - graph.start_s) * 1000
            graph.mark.__exit__(None, None, None)
            if not graph.writes:
                return  # as of what Dynamo calls around a graph
            text = graph_text(graph.texts)
            views, self._views = self._views, 0
            self.ops.append(
                OpRecord(
                    GRAPH,
                    self.path.current,
                    graph.call,
                    elapsed_ms,
                    (),
                    tuple(graph.writes),
                    text,
                    GRAPHS_RUN,
                    False,
                    views,
                )
            )

    def _saved_by_graph(self, graph: _Graph, tensor: torch.Tensor) -> None:
        """Notes that a graph saves a tensor. What is no value that an op has made is made by it."""
        key = storage_key(tensor)
        known = self._value_of.get(key)
        if known is not None and self.values[known].producer >= 0:
            return
        graph.texts.append(fingerprint("", [tensor]))
        label = f"{self.path.current}.graph" if self.path.current else "graph"
        graph.writes.append(self._add(tensor, key, len(self.ops), "made", label, -1).id)

    def _is_made_here(self, tensor: torch.Tensor) -> bool:
        """Returns whether the step may have made a tensor without ordinary memory, which a replay could not hold."""
        inner, hidden = tensors_with_memory(tensor)
        keys = [storage_key(each) for each in inner]
        return hidden or not keys or any(key in self._value_of or self._exotic.get(key) is not None for key in keys)

    def _run(self, func: Any, args: Any, kwargs: Any, call: int) -> tuple[Any, float]:
        """Runs an op under its marker; returns its result and its time in ms."""
        with marker(f"op {call}"):
            start = time.perf_counter()
            result = called_as_unwatched(func, operator_facts(func), args, kwargs)
            return result, (time.perf_counter() - start) * 1000

    def _address(self, storage: torch.UntypedStorage) -> int:
        """Returns the address of a storage, as in the memory trace."""
        return address_of(storage)

    def _is_beside(self) -> bool:
        """Returns whether another stream is current than the one the step began on."""
        return self._stream is not None and self._stream_now() != self._stream

    def _stream_now(self) -> torch.Stream | None:
        return accelerators.current_stream(self._device) if accelerators.is_in_use(self._device) else None

    def looked(self, arguments: Any, handed_out: bool) -> None:
        """Notes that the program accesses tensors without an op.

        If the address is handed out, the program may use it at any time from then on.
        """
        if not self._own_work.depth:
            with self._own_work:
                self._look(arguments, max(0, len(self.ops) - 1), handed_out)

    def unwatched(self) -> AbstractContextManager[None]:
        """Returns a context manager for Pooch's own work, which is not recorded."""
        return self._own_work

    def _look(self, arguments: Any, slot: int, handed_out: bool = False) -> None:
        """Notes that values must be on the device in a slot; that applies to all of them if the tensors are opaque."""
        tensors, hidden = tensors_with_memory(arguments)
        for key in list(self._value_of) if hidden else [storage_key(tensor) for tensor in tensors]:
            number = self._value_of.get(key)
            if number is None:
                continue
            value = self.values[number]
            if handed_out:
                value.touches = None
            elif value.touches is not None:
                value.touches.add(slot)

    def _read_values(
        self, func: Any, facts: OperatorFacts, args: Any, kwargs: Any, given: list[torch.Tensor]
    ) -> tuple[int, ...]:
        """Returns the values that an op reads, each once. `given` are the tensors among its arguments."""
        if facts.statistics and not reads_statistics(facts, func, args):
            read = [argument for position, argument in enumerate(args) if position not in facts.statistics]
            given = find_tensors([read, kwargs])
        return tuple(dict.fromkeys([self.value_id(tensor) for tensor in given if has_plain_storage(tensor)]))

    def _record(
        self,
        facts: OperatorFacts,
        refusal: str | None,
        call: int,
        elapsed_ms: float,
        reads: tuple[int, ...],
        made: tuple[torch.Tensor, ...],
        text: str,
    ) -> None:
        index, name = len(self.ops), facts.name
        writes = tuple(self._new_value(tensor, index, name).id for tensor in made)
        refusal = refusal or self._refusal_elsewhere(facts, reads, writes)
        place, views, self._views = self.path.current, self._views, 0
        self.ops.append(OpRecord(name, place, call, elapsed_ms, reads, writes, text, refusal, facts.random, views))

    def _refusal_elsewhere(self, facts: OperatorFacts, reads: tuple[int, ...], writes: tuple[int, ...]) -> str | None:
        """Returns why an op on another device cannot be replayed, or None. The backward pass that replays runs on the
        model's device, where neither the streams nor the random numbers of another device are in order.
        """
        for other in (self.values[i].elsewhere for i in (*reads, *writes)):
            if other and not other.startswith("cpu"):
                return f"it runs on another device ({other})"
        if facts.random and any(self.values[i].elsewhere for i in writes):
            return "it draws from the random generator of another device"
        return None

    def _forget_seed(self) -> None:
        """Removes the last two ops if they drew the seed of a recurrent dropout, which most steps do not do."""
        if [op.fingerprint for op in self.ops[-2:]] != SEED_FINGERPRINTS:
            return
        values = {value for op in self.ops[-2:] for value in op.writes}
        if min(values) != len(self.values) - len(values):
            return
        self._value_of = {key: value for key, value in self._value_of.items() if value not in values}
        self._storages = {key: each for key, each in self._storages.items() if key in self._value_of}
        del self.ops[-2:], self.values[-len(values) :]

    def value_id(self, tensor: torch.Tensor) -> int:
        """Returns the id of the value that the tensor's storage holds; unknown storages existed before the step."""
        key = storage_key(tensor)
        known = self._value_of.get(key)
        if known is not None:
            return known
        role = "parameter" if key in self._parameters else "buffer" if key in self._buffers else "external"
        return self._add(tensor, key, -1, role, role, -1).id

    def _new_value(self, tensor: torch.Tensor, producer: int, name: str) -> ValueRecord:
        key = storage_key(tensor)
        overwrites = self._value_of.get(key, -1)
        if overwrites >= 0:
            self.values[overwrites].overwritten_at = producer
        path = self.path.current
        short = name.removeprefix("aten.").split(".")[0]
        return self._add(tensor, key, producer, "made", f"{path}.{short}" if path else short, overwrites)

    def _add(
        self, tensor: torch.Tensor, key: int, producer: int, role: str, label: str, overwrites: int
    ) -> ValueRecord:
        storage = storage_of(tensor)
        value = ValueRecord(
            id=len(self.values),
            size_bytes=storage.nbytes(),
            pointer=self._address(storage),
            producer=producer,
            overwrites=overwrites,
            label=label,
            dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            role=role,
            elsewhere="" if tensor.device == self._device else str(tensor.device),
        )
        self.values.append(value)
        if key not in self._value_of:
            self._storages[key] = self._freed.watch(storage, key)
        self._value_of[key] = value.id
        return value

    def storage_gone(self, key: int) -> None:
        """Called when both the program and autograd have released a storage."""
        value = self._value_of.pop(key, None)
        if value is not None:
            self.note_release(value)

    def note_release(self, value: int) -> None:
        """Notes that the program has released a value, if it was not known. What it still holds when the forward pass
        ends, it holds until the step does, as it does the loss.
        """
        if not self._is_over and self.values[value].released_after is None:
            self.values[value].released_after = len(self.ops) - 1

    def end_forward(self, models: Iterable[torch.nn.Module]) -> None:
        """Called at the end of the forward pass: finds values whose storages the program empties and fills.

        The recorder holds no model: it outlives the pass with the graph, and a model may go before.

        Args:
            models: the models that were run.
        """
        models = list(models)
        self._is_over = True
        self.note_outliving(models)
        for key, reference in self._storages.items():
            storage, value = reference(), self._value_of.get(key)
            if storage is not None and value is not None and storage.nbytes() < self.values[value].size_bytes:
                self.values[value].role = "transient"
        self.units = sharded_units(models)
        for number, unit in enumerate(self.units):
            for storage in unit.storages:
                self._note_gathered(number, self._value_of.get(storage._cdata, -1))

    def note_outliving(self, models: Sequence[torch.nn.Module]) -> None:
        """Notes the parameters and buffers of the models, each storage once."""
        found: dict[int, OutlivingRecord] = {}
        for name, tensor in named_tensors(models):
            if has_plain_storage(tensor) and tensor.device == self._device:
                key, is_parameter = storage_key(tensor), isinstance(tensor, torch.nn.Parameter)
                size_bytes, value = storage_of(tensor).nbytes(), self._value_of.get(key)
                record = OutlivingRecord(name, is_parameter, tensor.requires_grad, value, size_bytes)
                found.setdefault(key, record)
        self.outliving = tuple(found.values())

    def _note_gathered(self, unit: int, value: int) -> None:
        """Notes all values that a storage of FSDP's held, given the last. They are the same parameter, however often it
        was gathered, unless the program wrote to it, which gathering it again would undo.
        """
        held = []
        while value >= 0:
            held.append(self.values[value])
            value = held[-1].overwrites
        is_gathered = all(each.producer < 0 or self.ops[each.producer].name == GATHERING for each in held)
        for each in held:
            each.role = "transient"
            if is_gathered:
                self.unit_of[each.id] = unit

    def units_there(self) -> frozenset[int]:
        """Returns the units whose parameters are gathered now."""
        return frozenset([number for number, unit in enumerate(self.units) if unit.is_gathered()])

    def note_saved(self, tensor: torch.Tensor) -> int | None:
        """Notes that autograd saves the tensor; returns its value's id, or None if its memory is not ordinary."""
        with self._own_work, torch._C.DisableTorchFunctionSubclass():  # attributes may be the program's functions
            if not may_move(tensor):
                return None
            if self._graph is not None:
                self._saved_by_graph(self._graph, tensor)
            value = self.values[self.value_id(tensor)]
        value.saved = True
        value.saved_outside_model |= not self.inside_model
        return value.id


def named_tensors(models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the parameters and then the buffers of each model, with their names, which tell the models apart."""
    for number, model in enumerate(models):
        prefix = f"{number}." if len(models) > 1 else ""
        for tensors in (model.named_parameters(), model.named_buffers()):
            for name, tensor in tensors:
                yield prefix + name, tensor
