"""Reads the operator logs of Dynamic Tensor Rematerialization (Kirisame et al. 2021) as profiles.

A log has one JSON object a line: CONSTANT and MEMORY (what exists before), CALL with MEMORY and ALIAS for each of its
results, MUTATE (in place), COPY and COPY_FROM (one more name for a tensor), RELEASE, and ANNOTATE for the beginnings of
the step and of the backward pass. Times are in ns.

As in the authors' simulator, constants stay throughout, a tensor is freed with its last name, and MUTATE makes a new
tensor and lets the old one go. A call that reads in the backward pass what one in the forward pass made is taken for
autograd's: so the tensor is one that a plan can decide on.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pooch.ir import Device, Link, Op, Profile, Value

NS_PER_MS = 1e6
PCIE_3 = Link("pinned host memory, modelled", 0.02, 0.02, 12e6, 12e6)  # 12 GB/s each way

Line = Mapping[str, Any]


@dataclass
class _Storage:
    """Bytes that several names may refer to.

    Attributes:
        producer: the call that made it; -1 for a constant.
        names: that refer to it now.
        reads: calls that read it.
        death: the call after which its last name went; None while there is one.
    """

    size_bytes: int
    producer: int
    names: int = 1
    reads: list[int] = field(default_factory=list)
    death: int | None = None


@dataclass
class _Call:
    """A CALL or a MUTATE, with the storages that it reads and makes."""

    name: str
    time_ms: float
    reads: tuple[int, ...]
    writes: tuple[int, ...]


class DtrLog:
    """A step that was logged.

    Attributes:
        calls: in order.
        storages: in the order in which they were made.
        forward_calls: how many come before the backward pass.
    """

    def __init__(self, lines: Iterable[Line]) -> None:
        self.calls: list[_Call] = []
        self.storages: list[_Storage] = []
        self.forward_calls = -1
        self._named: dict[str, int] = {}
        told = list(lines)
        self._is_annotated = any(line.get("ANNOTATION") == "BACKWARD" for line in told)
        rest = iter(told)
        if not any(line.get("ANNOTATION") == "START" for line in rest):
            raise ValueError("the log has no START: give one of a training step")
        for line in rest:
            self._take(line, rest)
        if self.forward_calls < 0:
            raise ValueError("the log has no backward pass: give one of a training step")

    def _take(self, line: Line, rest: Iterator[Line]) -> None:
        kind = line["INSTRUCTION"]
        if kind == "CONSTANT":
            self._named[line["NAME"]] = self._make(int(next(rest)["MEMORY"]), -1)
        elif kind == "COPY":
            self._name(line["DST"], self._named[line["SRC"]])
        elif kind == "COPY_FROM":
            source = self._named[line["SRC"]]
            self._release(line["DST"])
            self._name(line["DST"], source)
        elif kind == "RELEASE":
            self._release(line["NAME"])
        elif kind == "CALL":
            self._call(line, rest)
        elif kind == "MUTATE":
            self._mutate(line)
        elif kind == "ANNOTATE":
            if line["ANNOTATION"] == "BACKWARD":
                self._begin_backward()
        else:
            raise ValueError(f"the log has the instruction {kind!r}, which is not known")

    def _call(self, line: Line, rest: Iterator[Line]) -> None:
        reads = self._begin_call(line)
        made = []
        for name in line["RESULT"]:
            size_bytes, alias = int(next(rest)["MEMORY"]), int(next(rest)["ALIAS"])
            if alias >= 0:
                self._name(name, self._named[line["ARGS"][alias]])
            else:
                self._named[name] = self._make(size_bytes, len(self.calls))
                made.append(self._named[name])
        self.calls.append(_Call(line["NAME"], int(line["TIME"]) / NS_PER_MS, reads, tuple(made)))

    def _mutate(self, line: Line) -> None:
        reads = self._begin_call(line)
        made = []
        self.calls.append(_Call(line["NAME"], int(line["TIME"]) / NS_PER_MS, reads, ()))
        for position in line["MUTATE"]:
            name = line["ARGS"][int(position)]
            made.append(self._make(self.storages[self._named[name]].size_bytes, len(self.calls) - 1))
            self._release(name)
            self._named[name] = made[-1]
        self.calls[-1].writes = tuple(made)

    def _begin_call(self, line: Line) -> tuple[int, ...]:
        # Some forward calls bear the name of their backward ones, so names count only where nothing else does.
        if not self._is_annotated and "backward" in line["NAME"]:
            self._begin_backward()
        reads = tuple(dict.fromkeys(self._named[name] for name in line["ARGS"]))
        for storage in reads:
            self.storages[storage].reads.append(len(self.calls))
        return reads

    def _begin_backward(self) -> None:
        if self.forward_calls < 0:
            self.forward_calls = len(self.calls)

    def _make(self, size_bytes: int, producer: int) -> int:
        self.storages.append(_Storage(size_bytes, producer))
        return len(self.storages) - 1

    def _name(self, name: str, storage: int) -> None:
        self._named[name] = storage
        self.storages[storage].names += 1

    def _release(self, name: str) -> None:
        if name not in self._named:
            return  # of a tensor from before the step
        storage = self.storages[self._named.pop(name)]
        storage.names -= 1
        if storage.names == 0:
            storage.death = max(len(self.calls) - 1, storage.producer)


def read_log(path: Path) -> DtrLog:
    """Read a log.

    Raises:
        ValueError: a line is none of a log, or there is no step.
    """
    with path.open() as file:
        return DtrLog(json.loads(line) for line in file if line.strip())


def profile_of(log: DtrLog, workload: str, link: Link = PCIE_3) -> Profile:
    """Return a logged step as a profile, over a modelled link."""
    return _ProfileMaker(log).profile(workload, link)


class _ProfileMaker:
    def __init__(self, log: DtrLog) -> None:
        self._log = log
        self._end = len(log.calls) + 1  # ops, the closing one included
        # Everything that a forward call reads or makes is a value; what only the backward pass has is in live bytes.
        made_before = [k for k, storage in enumerate(log.storages) if storage.producer < log.forward_calls]
        self._value_of = {storage: value for value, storage in enumerate(made_before)}

    def profile(self, workload: str, link: Link) -> Profile:
        """All of it."""
        log = self._log
        constants_bytes = sum(storage.size_bytes for storage in log.storages if storage.producer < 0)
        ops = tuple(self._ops(constants_bytes))
        values = tuple(self._value(storage, value) for storage, value in self._value_of.items())
        unpacked: defaultdict[int, list[int]] = defaultdict(list)
        for value in values:
            if value.role == "made" and value.first_unpack >= 0:
                unpacked[value.first_unpack].append(value.id)
        return Profile(
            workload=workload,
            mode="run",
            device=Device("cuda", "as in the log", 0, modelled=True),
            link=link,
            ops=ops,
            values=values,
            anchors=tuple((slot, tuple(ids)) for slot, ids in sorted(unpacked.items())),
            forward_ops=log.forward_calls,
            model_begin=0,
            model_end=log.forward_calls,
            persistent_bytes=constants_bytes,
            step_ms=sum(op.time_ms for op in ops),
            peak_bytes=max(op.peak_bytes for op in ops),
            reserved_bytes=0,
            time_factor=1.0,
            model_signature="",
            notes=("from an operator log", "transfers modelled"),
        )

    def _ops(self, constants_bytes: int) -> Iterator[Op]:
        log, live_bytes = self._log, constants_bytes
        dying: defaultdict[int, int] = defaultdict(int)
        for storage in log.storages:
            if storage.producer >= 0 and storage.death is not None:
                dying[storage.death] += storage.size_bytes
        for index, call in enumerate(log.calls):
            made = [log.storages[storage] for storage in call.writes]
            made_bytes = sum(storage.size_bytes for storage in made)
            is_forward = index < log.forward_calls
            yield Op(
                index=index,
                name=call.name,
                phase="forward" if is_forward else "backward",
                module="",
                time_ms=call.time_ms,
                entry_bytes=live_bytes,
                peak_bytes=live_bytes + made_bytes,
                reads=tuple(self._value_of[storage] for storage in call.reads) if is_forward else (),
                writes=tuple(self._value_of[storage] for storage in call.writes) if is_forward else (),
                fingerprint=call.name if is_forward else "",
                gradient_bytes=0 if is_forward else sum(each.size_bytes for each in made if each.death is None),
            )
            live_bytes += made_bytes - dying[index]
        yield Op(self._end - 1, "pooch.end", "backward", "", 0.0, live_bytes, live_bytes)

    def _value(self, storage: int, value: int) -> Value:
        log, found = self._log, self._log.storages[storage]
        is_made = found.producer >= 0
        death = self._end if found.death is None or not is_made else found.death
        unpacks = [call for call in found.reads if call >= log.forward_calls] if is_made else []
        in_forward = max((call for call in found.reads if call < log.forward_calls), default=found.producer)
        fixed = None if unpacks and found.size_bytes else "no activation" if not unpacks else "too small"
        return Value(
            id=value,
            size_bytes=found.size_bytes,
            allocated_bytes=found.size_bytes,
            role="made" if is_made else "parameter",  # which stays throughout
            producer=found.producer,
            overwrites=-1,
            overwritten_at=-1,
            label=log.calls[found.producer].name if is_made else "constant",
            dtype="",
            shape=(),
            saved=bool(unpacks),
            saved_outside_model=False,
            release=in_forward if unpacks else death,
            first_unpack=unpacks[0] if unpacks else -1,
            death=death,
            fixed=fixed,
            touches=(),
        )
