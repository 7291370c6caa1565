"""Ways to break the copy engine and the executor's use of it, one at a time; `mutations.py` shows that tests notice.

Each changes what is computed, what is freed or what is reported. What changes speed alone is left out, since no test of
order or numbers can tell: both directions on one copy stream (one lane is as well ordered as two); `aside` without its
own stream, or ordered after compute; blocks unlocked when a step ends (unlocking waits for the device); rooms of steps
and of snapshots in one list; the last `ticket.wait` of `PlannedValues._let_go` and the order within `PlannedValues.free`
(the engine itself holds what a copy works on).
"""

from __future__ import annotations

from dataclasses import dataclass

ORDERING = ("tests/executor/test_gpu_ordering.py",)
_FIVE_STEPS = "tests/executor/test_gpu.py::test_five_steps_with_buffers_used_again"
CONV = (f"{_FIVE_STEPS}[conv-False]",)
UNET = (f"{_FIVE_STEPS}[unet-False]",)
SAVED_AGAIN = ("tests/executor/test_saved_again.py",)
_IN_PLACE = "tests/executor/test_in_place.py"
IN_PLACE = tuple(
    f"{_IN_PLACE}::{name}"
    for name in ("test_it_raises_as_plain_training_does", "test_a_parameter_changed_before_the_replay_raises")
)
REPLAYED_IN_PLACE = (f"{_IN_PLACE}::test_a_replay_writes_into_nothing_that_a_later_one_reads",)
LEFT = ("tests/executor/test_path.py::test_another_branch_or_shape[mode-long-swap]",)
WRITTEN_OVER = (f"{_IN_PLACE}::test_what_a_step_off_its_path_writes_over_is_read_by_replays_as_it_was",)
TOO_LARGE = ("tests/executor/test_path.py::test_a_value_larger_than_its_room_in_the_tier_is_not_copied_there",)
LOOKS = tuple(f"tests/executor/test_long_skips.py::test_who_looks_finds_it[{name}]" for name in ("item", "slice"))
_LONG_SKIPS = "tests/executor/test_long_skips.py"
RESTORED = (
    f"{_LONG_SKIPS}::test_what_is_away_is_back_as_soon_as_the_path_is_left",
    f"{_LONG_SKIPS}::test_after_an_exception_everything_is_there",
)
BESIDE = (
    "tests/executor/test_gpu_streams.py::test_a_prefetcher_and_gathered_weights_are_let_through",
    "tests/executor/test_gpu_streams.py::"
    "test_a_side_stream_that_works_on_a_planned_value_ends_the_plan_and_keeps_the_numbers",
)
_LEAVES = (
    "        if guide is not None and moved and guide.on_path:\n"
    '            actual = f"{facts.name} on another stream, which works on a value of the plan"\n'
    '            self.leave_path("an op on the stream that the region began on", actual)\n'
    "        self.bring_back((args, kwargs))\n"
)
_JOINS = (
    "        if moved:\n            with self.lock:"
    "  # last, since only now do emptied storages have memory to tell the allocator of\n"
    "                self.tier.join(moved)\n"
)

_STREAMS = "engines/streams.py"
_PINNED = "engines/pinned.py"


def _forked(work: str) -> str:
    """The test of a program that does some of its work on another stream, in one way."""
    name = "test_a_program_that_forks_a_stream_computes_what_it_does_without_a_plan"
    return f"tests/executor/test_gpu_streams.py::{name}[{work}-recompute]"


@dataclass(frozen=True)
class Mutation:
    """One way to break the executor.

    Args:
        name: what is done. file: under `pooch/executor`. old: text that is there once. new: what takes its place.
        breaks: what is wrong then. tests: that are to notice, the fastest first.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...] = ORDERING


WAITS = (
    Mutation(
        "a ticket is not waited for",
        _STREAMS,
        "        self.arena.await_copy(self.event)\n",
        "",
        "compute reads what is not there yet, and memory goes back under a copy",
    ),
    Mutation(
        "the clock notes a wait that it does not make",
        "engines/step_clock.py",
        "        self._stream.wait_event(event)\n",
        "",
        "compute does not wait for copies",
    ),
    Mutation(
        "joined streams do not wait for copies",
        _STREAMS,
        "                stream.wait_event(event)\n        self._under_way.pop(event, None)",
        "                pass\n        self._under_way.pop(event, None)",
        "another stream reads what is not there yet",
    ),
    Mutation(
        "a copy out does not wait for compute",
        _STREAMS,
        "        self._wait_for_compute(stream)\n        end_bytes",
        "        end_bytes",
        "a value is copied before it is computed",
    ),
    Mutation(
        "a copy in does not wait for compute",
        _STREAMS,
        "        self._wait_for_compute(stream)\n        stream.wait_event(self._out_events",
        "        stream.wait_event(self._out_events",
        "memory is filled while what had it before is still read",
    ),
    Mutation(
        "copies wait for the step's own stream alone",
        _STREAMS,
        "        for compute in self.compute_streams():\n            stream.wait_event(self._engine.mark(compute))",
        "        stream.wait_event(self._engine.mark(self._seen[0]))",
        "what other streams do to values of the plan is not waited for",
    ),
    Mutation(
        "a copy in does not wait for the copy out of its room",
        _STREAMS,
        "        stream.wait_event(self._out_events[offset_bytes])\n",
        "",
        "a room is read before it is filled",
    ),
    Mutation(
        "a copy out does not wait for the copy in that reads its room",
        _STREAMS,
        "                stream.wait_event(event)  # the previous value in this room must be back\n",
        "                pass\n",
        "a room is filled again before it is read",
    ),
    Mutation(
        "a copy out waits for readers of a room that begins where its own does",
        _STREAMS,
        "            if begin < end_bytes and offset_bytes < end:",
        "            if begin == offset_bytes:",
        "rooms that overlap are filled again before they are read",
    ),
    Mutation(
        "a copy out waits for readers of a room that ends where its own does",
        _STREAMS,
        "            if begin < end_bytes and offset_bytes < end:",
        "            if end == end_bytes:",
        "rooms that overlap are filled again before they are read",
    ),
    Mutation(
        "the next step does not wait for the block's last copies",
        _STREAMS,
        "            self.out_stream.wait_event(event)\n",
        "            pass\n",
        "a step on another stream fills a block that is still read",
    ),
    Mutation(
        "a step ends without waiting for its copies",
        _STREAMS,
        "        for event in self._last.values():\n            self.await_copy(event)\n",
        "",
        "memory of an abandoned step goes to others under its copies",
    ),
)

RECORDS = (
    Mutation(
        "an event is recorded on the caller's stream",
        _STREAMS,
        "        event.record(stream)\n",
        "        event.record(self.current_stream())\n",
        "whoever waits for a copy waits for compute instead",
    ),
    Mutation(
        "an event is not recorded",
        _STREAMS,
        "        event.record(stream)\n",
        "",
        "waiting for it is waiting for nothing",
    ),
    Mutation(
        "a copy out's event is recorded on the other copy stream",
        _STREAMS,
        "self._out_events[offset_bytes] = self._marked(stream)",
        "self._out_events[offset_bytes] = self._marked(self._engine.in_stream)",
        "the end of the copy is not what is waited for",
    ),
    Mutation(
        "a copy in's event is recorded on the other copy stream",
        _STREAMS,
        "        event = self._marked(stream)\n        self._under_way[event] = storage\n        self._read_rooms",
        "        event = self._marked(self._engine.out_stream)\n        self._under_way[event] = storage\n"
        "        self._read_rooms",
        "the end of the copy is not what is waited for",
    ),
    Mutation(
        "a copy out's event is recorded before the copy",
        _STREAMS,
        "        with torch._C._DisableTorchDispatch(), accelerators.on_stream(stream):  # no op of the program's\n"
        "            self._to_room(bytes_of(storage), offset_bytes)\n"
        "        event = self._out_events[offset_bytes] = self._marked(stream)\n",
        "        event = self._out_events[offset_bytes] = self._marked(stream)\n"
        "        with torch._C._DisableTorchDispatch(), accelerators.on_stream(stream):  # no op of the program's\n"
        "            self._to_room(bytes_of(storage), offset_bytes)\n",
        "memory goes back while it is still copied",
    ),
    Mutation(
        "a copy in's event is recorded before the copy",
        _STREAMS,
        "            raw = bytes_of(storage)\n"
        "            with accelerators.on_stream(stream):\n"
        "                self._from_room(raw, offset_bytes)\n"
        "            self._tell_allocator(raw)\n"
        "        event = self._marked(stream)\n",
        "            event = self._marked(stream)\n"
        "            raw = bytes_of(storage)\n"
        "            with accelerators.on_stream(stream):\n"
        "                self._from_room(raw, offset_bytes)\n"
        "            self._tell_allocator(raw)\n",
        "values are read before they are back",
    ),
    Mutation(
        "who reads a room is not noted",
        _STREAMS,
        "        self._read_rooms.append((offset_bytes, offset_bytes + storage.nbytes(), event))\n",
        "",
        "a room is filled again before it is read",
    ),
    Mutation(
        "the last copy each way is not noted",
        _STREAMS,
        "        event = self._last[stream] = self._engine.mark(stream, timed=True)\n",
        "        event = self._engine.mark(stream, timed=True)\n",
        "nobody waits for the copies of an abandoned step",
    ),
    Mutation(
        "a block does not carry the ends of its last copies",
        _STREAMS,
        "            self._block.in_use_until = tuple(self._last.values())\n",
        "",
        "a step on another stream fills a block that is still read",
    ),
    Mutation(
        "what a copy out reads is not held",
        _STREAMS,
        "        self._under_way[event] = storage\n        return StreamTicket(before, event, self, storage.nbytes())\n\n    def copy_in",
        "        return StreamTicket(before, event, self, storage.nbytes())\n\n    def copy_in",
        "memory that is let go of goes to others under the copy",
    ),
    Mutation(
        "what a copy in fills is not held",
        _STREAMS,
        "        self._under_way[event] = storage\n        self._read_rooms",
        "        self._read_rooms",
        "memory that is let go of goes to others under the copy",
        ("tests/executor/test_gpu.py::test_what_a_copy_still_fills_goes_to_nobody_else",),
    ),
    Mutation(
        "what copies worked on is held to the end of the step",
        _STREAMS,
        "        self._under_way.pop(event, None)\n",
        "",
        "swapping frees no memory before the step ends",
    ),
)

STREAMS = (
    Mutation(
        "copies out are issued on the stream that computes",
        _STREAMS,
        "_DisableTorchDispatch(), accelerators.on_stream(stream):",
        "_DisableTorchDispatch(), accelerators.on_stream(self._engine.current_stream()):",
        "events of the copy stream say nothing of them",
    ),
    Mutation(
        "copies in are issued on the stream that computes",
        _STREAMS,
        "            with accelerators.on_stream(stream):\n                self._from_room(",
        "            with accelerators.on_stream(self._engine.current_stream()):\n                self._from_room(",
        "events of the copy stream say nothing of them",
    ),
    Mutation(
        "copies out are issued on the default stream",
        _STREAMS,
        "_DisableTorchDispatch(), accelerators.on_stream(stream):",
        "_DisableTorchDispatch(), accelerators.on_stream(torch.cuda.default_stream()):",
        "events of the copy stream say nothing of them",
    ),
    Mutation(
        "copies in are issued on the default stream",
        _STREAMS,
        "            with accelerators.on_stream(stream):\n                self._from_room(",
        "            with accelerators.on_stream(torch.cuda.default_stream()):\n                self._from_room(",
        "events of the copy stream say nothing of them",
    ),
    Mutation(
        "a stream that joins is forgotten",
        _STREAMS,
        "            self._seen.append(current)\n",
        "            pass\n",
        "neither waits for the other",
    ),
    Mutation(
        "the allocator is not told of a stream that joins",
        _STREAMS,
        "            bytes_of(storage).record_stream(current)\n",
        "            pass\n",
        "memory goes to others while the stream still reads it",
    ),
    Mutation(
        "the allocator is not told who reads what comes back",
        _STREAMS,
        "        self._tell_allocator(raw)\n",
        "",
        "memory goes to others while a joined stream still reads it",
    ),
    Mutation(
        "a caller on a stream of its own is not waited for",
        _STREAMS,
        "        return self._seen if current in self._seen else [*self._seen, current]\n",
        "        return self._seen\n",
        "copies come before the work of who asked for them, and it does not wait for them",
    ),
    Mutation(
        "what is done at home does not wait for the caller",
        _STREAMS,
        "        home.wait_event(self._engine.mark(current))\n",
        "",
        "what the caller made is read before it is there",
    ),
    Mutation(
        "the caller does not wait for what was done at home",
        _STREAMS,
        "            current.wait_event(self._engine.mark(home))\n",
        "            pass\n",
        "what was made at home is read before it is there",
    ),
    Mutation(
        "what should be done at home stays on the caller's stream",
        _STREAMS,
        "            with accelerators.on_stream(home):\n                yield\n",
        "            yield\n",
        "replays run beside the work that they depend on",
    ),
    Mutation(
        "no stream is beside the step's",
        _STREAMS,
        "        return self._engine.current_stream() != self._seen[0]\n",
        "        return False\n",
        "ops of a prefetcher are taken for the plan's",
        BESIDE,
    ),
    Mutation(
        "copies aside are not waited for",
        _STREAMS,
        "                yield stream.synchronize\n",
        "                yield lambda: None\n",
        "a copy is timed, and its memory used again, before it is complete",
    ),
    Mutation(
        "a thread stays aside",
        _STREAMS,
        "        finally:\n            self._aside.active = False\n",
        "        finally:\n            pass\n",
        "its later copies wait for one stream only",
    ),
)

BLOCKS = (
    Mutation(
        "every value has the same room",
        _STREAMS,
        "        return self._block.pieces(offset_bytes, size_bytes)",
        "        return self._block.pieces(0, size_bytes)",
        "values come back with the bytes of others",
    ),
    Mutation(
        "a value's room begins a page too early",
        _STREAMS,
        "        return self._block.pieces(offset_bytes, size_bytes)",
        "        return self._block.pieces(max(0, offset_bytes - 4096), size_bytes)",
        "the end of the room before is written over",
    ),
    Mutation(
        "a block that a step has stays among the free ones",
        "engines/free_room.py",
        "            if item.size_bytes >= size_bytes and self._is_taken(item):\n",
        "            if item.size_bytes >= size_bytes:\n",
        "two steps have one block, and it may be unlocked in their hands",
    ),
    Mutation(
        "a block that became too small is used again",
        "engines/free_room.py",
        "            if item.size_bytes >= size_bytes and self._is_taken(item):\n",
        "            if self._is_taken(item):\n",
        "values have no room",
    ),
    Mutation(
        "a block is unlocked when its step ends, and used again",
        _STREAMS,
        "            self._free[purpose].give(block)\n",
        "            self._free[purpose].give(block)\n            block.unlock()\n",
        "the device reads and fills memory that is not locked",
    ),
    Mutation(
        "a block is unlocked before the device is done",
        _PINNED,
        "        accelerators.synchronize(device)\n",
        "",
        "memory is unlocked, and goes back to the system, under a copy",
    ),
    Mutation(
        "a kept block is taken over whatever its size",
        _PINNED,
        "        if block.device == device and block.size_bytes >= size_bytes and _is_taken(block):",
        "        if block.device == device and _is_taken(block):",
        "values have no room",
    ),
    Mutation(
        "a kept block goes to every engine that asks",
        _PINNED,
        "block.size_bytes >= size_bytes and _is_taken(block):",
        "block.size_bytes >= size_bytes:",
        "two engines have one block",
    ),
    Mutation(
        "a kept block is unlocked",
        _PINNED,
        "        _KEPT.append(block)\n",
        "        _KEPT.append(block)\n        block.unlock()\n",
        "the next engine copies to memory that is not locked",
    ),
)

SNAPSHOTS = (
    Mutation(
        "a snapshot's copies out are not waited for",
        "snapshot.py",
        "            tickets.append(arena.copy_out(together, self._packed_offset_bytes))\n"
        "        self._finish(tickets)\n",
        "            tickets.append(arena.copy_out(together, self._packed_offset_bytes))\n",
        "gradients are added to while they are kept aside",
    ),
    Mutation(
        "a snapshot's copies in are not waited for",
        "snapshot.py",
        "            tickets.append(arena.copy_in(together, self._packed_offset_bytes))\n"
        "        self._finish(tickets)\n",
        "            tickets.append(arena.copy_in(together, self._packed_offset_bytes))\n",
        "the step is repeated with gradients that are not back",
    ),
    Mutation(
        "a snapshot's small buffers lie where its gradients lie",
        "snapshot.py",
        "        self._packed_offset_bytes = room_bytes\n",
        "        self._packed_offset_bytes = 0\n",
        "gradients come back with the bytes of buffers",
    ),
    Mutation(
        "a snapshot's gradients share a room",
        "snapshot.py",
        "                self._large.append(_InTier(storage, room_bytes))",
        "                self._large.append(_InTier(storage, 0))",
        "gradients come back with the bytes of others",
    ),
    Mutation(
        "a snapshot does not put the gradients in their places",
        "../torchtools/training_state.py",
        "            parameter.grad = gradient\n",
        "            pass\n",
        "what accumulates begins from nothing",
    ),
    Mutation(
        "a snapshot leaves the random state",
        "snapshot.py",
        "        self._random.restore(self._device)\n",
        "",
        "the repeated step draws other numbers",
    ),
)

ACTIONS = (
    Mutation(
        "a copy out counts as done without being waited for",
        "../machine/store.py",
        "        waited_ms = ticket.wait()\n        self.speed",
        "        waited_ms = 0.0\n        self.speed",
        "storages that the program holds are emptied under the copy",
        SAVED_AGAIN,
    ),
    Mutation(
        "a storage is emptied before its copy out is waited for",
        "planned_values.py",
        '        """Free the bytes of a value that the program holds."""\n        self.end_copy_out(value)\n',
        '        """Free the bytes of a value that the program holds."""\n        self.emptied.empty(value)\n'
        "        self.end_copy_out(value)\n",
        "memory goes back under the copy",
        SAVED_AGAIN,
    ),
    Mutation(
        "an op writes over a value while it is copied out",
        "planned_values.py",
        "            if value.ticket is not None:\n                self.stats.host_stall_ms += value.ticket.wait()\n"
        "            if value.handles:\n",
        "            value.ticket = None\n            if value.handles:\n",
        "what is copied is neither the old value nor the new one",
        IN_PLACE,
    ),
    Mutation(
        "a replay reads what was written over",
        "planned_values.py",
        "                self.held[number] = copied_storage(held)\n",
        "                self.held[number] = held\n",
        "values are computed again from others",
        WRITTEN_OVER,
    ),
    Mutation(
        "a value that comes back is not waited for",
        "../machine/store.py",
        "        stats.host_stall_ms += ticket.wait()\n        self.speed.learn(ticket, value.size_bytes, outwards=False)\n",
        "",
        "the backward pass reads what is not there yet",
        CONV,
    ),
    Mutation(
        "a value that comes back late is not waited for",
        "../machine/pressure.py",
        "            self.store.finish_in(value, self.stats)\n            assert value.storage is not None\n",
        "            assert value.storage is not None\n",
        "the backward pass reads what is not there yet",
        LEFT,
    ),
    Mutation(
        "a value that is read ahead of the schedule's wait is not waited for",
        "../machine/store.py",
        "        if ticket is None or not value.is_copied:\n            return\n        stats",
        "        if ticket is None or not value.is_copied or True:\n            return\n        stats",
        "the backward pass reads what is not there yet",
        (f"{ORDERING[0]}::test_a_read_ahead_of_the_schedules_wait_waits_for_the_copy",),
    ),
    Mutation(
        "a value that is larger than its room does not end the plan",
        "planned_values.py",
        "        if size_bytes > self.table.room_bytes[value.number] and not self.table.has_any_sizes:",
        "        if False:",
        "the peak is no longer the one that was planned",
        TOO_LARGE,
    ),
    Mutation(
        "values come back from the first room",
        "leaving.py",
        "        return self.arena.copy_in(storage, self.offset_bytes)",
        "        return self.arena.copy_in(storage, 0)",
        "values come back with the bytes of others",
        CONV,
    ),
    Mutation(
        "a replay writes into a value that is still needed",
        "planned_values.py",
        "            storage = self.ensure(value)\n        return copied_storage(storage) if written else storage\n",
        "            storage = self.ensure(value)\n        return storage\n",
        "whoever reads it next reads another value",
        REPLAYED_IN_PLACE,
    ),
    Mutation(
        "a replay off the path writes into what others still read",
        "../machine/recipes.py",
        "            return self._kitchen.copied(storage) if written else storage\n",
        "            return storage\n",
        "values are computed again from others",
        ("tests/machine/test_values.py::test_an_op_in_place_writes_into_a_copy_of_what_others_read",),
    ),
    Mutation(
        "what autograd lets go of counts as not copied out",
        "planned_values.py",
        "        self.end_copy_out(value)  # so that the tier has it if the program has it saved again\n",
        "",
        "a value that is saved again is neither here nor in the tier",
        SAVED_AGAIN,
    ),
)

STEPS = (
    Mutation(
        "a stream that works on a planned value does not join",
        "step.py",
        "                self.tier.join(moved)\n",
        "                pass\n",
        "memory goes to others while that stream still reads it",
        (_forked("looked_at"),),
    ),
    Mutation(
        "a stream joins for a planned value before its bytes are back",
        "step.py",
        _LEAVES + _JOINS,
        _JOINS + _LEAVES,
        "the memory that it reads goes to others",
        (_forked("looked_at_while_away"),),
    ),
    Mutation(
        "an op on another stream counts as one of the step",
        "native_watch.py",
        "            if step.tier.is_beside():\n",
        "            if False:\n",
        "the plan waits for nothing that the program does beside it",
        BESIDE,
    ),
    Mutation(
        "a read on another stream is not answered at home",
        "step.py",
        "        with self.lock, self.tier.at_home():  # wait for what",
        "        with self.lock:  # wait for what",
        "replays and copies run beside the work that they depend on",
        (_forked("read_by_two_streams"),),
    ),
    Mutation(
        "who reads on another stream does not join",
        "step.py",
        "                self.tier.join([storage])\n",
        "                pass\n",
        "memory goes to others while that stream still reads it",
        (_forked("read_while_others_take_memory"),),
    ),
    Mutation(
        "actions tied to a kept value run on the reader's stream",
        "step.py",
        "            with torch._C._DisableTorchDispatch(), self.tier.at_home():\n                self.act(guide, slot)",
        "            with torch._C._DisableTorchDispatch():\n                self.act(guide, slot)",
        "replays and copies run beside the work that they depend on",
        (_forked("kept_and_made_again"),),
    ),
    Mutation(
        "an op that writes over a value is not told of",
        "step.py",
        "            if guide.values.protect(number, storage):\n",
        "            if number in guide.values.planned:\n",
        "gradients of other values than those that were saved",
        IN_PLACE,
    ),
    Mutation(
        "what is away stays away where the path is left",
        "step.py",
        "        self.restore()\n        guide.values.keep_what_is_held()\n",
        "        guide.values.keep_what_is_held()\n",
        "a tensor without its bytes is read",
        RESTORED,
    ),
    Mutation(
        "a look at what is away is not waited for",
        "emptied.py",
        "            self._stats.host_stall_ms += ticket.wait()\n            if ticket.error",
        "            if ticket.error",
        "the program reads what is not there yet",
        LOOKS,
    ),
    Mutation(
        "a copy back begins before there is memory for it",
        "emptied.py",
        "        storage.resize_(value.size_bytes)\n        if value.is_copied:\n"
        "            assert value.place is not None\n            value.ticket = value.place.copy_in(storage)\n",
        "        if value.is_copied:\n"
        "            assert value.place is not None\n            value.ticket = value.place.copy_in(storage)\n"
        "            storage.resize_(value.size_bytes)\n",
        "nothing is copied",
        LOOKS,
    ),
)

REPLAYS = (
    Mutation(
        "a replay draws numbers of its own",
        "replay.py",
        "            return _drawn(call.draws, partial(with_homes, partial(call.func, *args, **kwargs)))\n",
        "            return with_homes(partial(call.func, *args, **kwargs))\n",
        "dropout drops others, and what is drawn later changes",
        CONV,
    ),
    Mutation(
        "a replay leaves the random state where it ended",
        "../torchtools/accelerators.py",
        "    finally:\n        restore(state)\n",
        "    finally:\n        pass\n",
        "what is drawn later changes",
        CONV,
    ),
    Mutation(
        "a replay draws from the remembered state itself",
        "../torchtools/accelerators.py",
        "            restore(snapshot.clone_state())",
        "            restore(snapshot)",
        "the second replay of an op draws other numbers than the first",
        (f"{ORDERING[0]}::test_numbers_are_drawn_from_a_snapshot_as_often_as_a_replay_needs_them",),
    ),
    Mutation(
        "a replay reads a parameter that was changed since",
        "replay.py",
        "    if argument.has_moved():",
        "    if False:",
        "activations of other parameters than those of the step",
        IN_PLACE,
    ),
)

MUTATIONS: dict[str, tuple[Mutation, ...]] = {
    "Waits": WAITS,
    "Events and what is held": RECORDS,
    "Streams": STREAMS,
    "Rooms and pinned blocks": BLOCKS,
    "Snapshots": SNAPSHOTS,
    "Actions of the schedule": ACTIONS,
    "The step": STEPS,
    "Replays": REPLAYS,
}
