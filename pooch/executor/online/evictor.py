"""Holds a budget over all steps that are alive: decides which saved activations leave, and how."""

from __future__ import annotations

import heapq
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...analysis.eviction import distance, online_score
from ...errors import TierError
from ...torchtools.endings import run_lost
from ...torchtools.tensors import find_tensors, has_plain_storage, new_storage, storage_of
from ..engines.protocol import CopyEngine
from ..lock import StepLock
from ..silence import Silence
from ..statistics import RunStats, WarnOnce
from ..verification import Verification
from ..witness import Level, Witness
from .live_bytes import LiveBytes
from .record import OnlineRecord
from .speed import CopySpeed

if TYPE_CHECKING:
    from ..actions import StepActions
    from ..step import PlannedStep

_WRITE_AHEAD_SHARE = 0.5  # of what the step may use: from there on, the copy lane is kept busy
_COPIES_AHEAD = 2
_LOOKED_AT = 8  # values per op, so that the time to look does not grow with the step
_SPARE_SHARE = 0.02  # of what the step may use: freed at once, since looking for candidates takes time


class Evictor:
    """Keeps live bytes within a budget as long as there is anything that can leave.

    Args:
        budget_bytes: The budget.
        engine: Copies to and from the tier. Closed by `close`.
        live: Counts live bytes. Closed by `close`.
        device: The device.
        host_bytes: The most that a step may take of the tier, or None.
        verification: What is known of the recipes. None: nothing is compared.

    Attributes:
        stats: Counters of the current step.
        silence: Counts and tells what is not governed.
        missing_bytes: The most by which live bytes had to pass the budget in the current step, as nothing more could
            leave.
        is_held: Whether the budget is held now.
        stayed_bytes: The most that had to stay then because the tier did not take it.
        on_move: Called with "left", a record and its address before its bytes are freed, with "returned", a record and
            its new address after memory was allocated for them, and with "ended", a record and 0 if it is read no more
            while it is away. None: nobody wants to know.
    """

    def __init__(
        self,
        budget_bytes: int,
        engine: CopyEngine,
        live: LiveBytes,
        device: torch.device,
        host_bytes: int | None = None,
        verification: Verification | None = None,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.engine, self.live, self.device, self.host_bytes = engine, live, device, host_bytes
        self.lock = StepLock(self._handle_ended)
        self.stats = RunStats()
        self.missing_bytes = self.stayed_bytes = 0
        self.is_held = True
        self.stall_ms = 0.0
        self.warn_once = WarnOnce()
        self.verification = Verification("off", self.warn_once) if verification is None else verification
        self.silence = Silence(lambda text: self.warn_once(text, text))
        self.speed = CopySpeed(engine.description)
        self._records: dict[OnlineRecord, None] = {}  # in the order in which they were saved
        self._saves = 0
        self._position = 0.0  # of the backward pass: it reads what was saved before this
        self._ahead: deque[OnlineRecord] = deque()
        # What may be copied out ahead of need, the oldest first. A dict would look through its holes each time.
        self._unwritten: OrderedDict[OnlineRecord, None] = OrderedDict()
        self._start_bytes = 0
        self._largest_bytes = 0
        self._most_higher_bytes = 0
        self._share: float | None = None
        self.on_move: Callable[[str, OnlineRecord, int], None] | None = None
        self._asking = threading.local()
        self._planned: weakref.WeakSet[StepActions] = weakref.WeakSet()
        self._keeping: weakref.WeakSet[PlannedStep] = weakref.WeakSet()

    # Steps ------------------------------------------------------------------------------------------------------------

    def begin_step(self, stats: RunStats) -> None:
        """Begin to count for a new step, from the calling thread."""
        self.lock.give_back()
        run_lost()
        self._forget_ended()
        self.stats, self.missing_bytes, self.stayed_bytes, self.stall_ms = stats, 0, 0, 0.0
        self._start_bytes = self.live.now()
        self.live.reset_peak()
        self.hold()

    def _forget_ended(self) -> None:
        """Let go of the values of steps that are gone, in case an interrupt has kept a handle from telling its end."""
        with self.lock:
            for record in [each for each in self._records if each.owner() is None]:
                self._let_go(record)

    def hold(self) -> None:
        """Have the calling thread ask for room before it passes the budget."""
        if not getattr(self._asking, "on", False):
            self._asking.on = True
            self.live.ask(True)

    def ask_again(self) -> None:
        """Have threads ask for room anew, the calling one at once, as another counter counts from here on."""
        self._asking = threading.local()
        self.hold()

    def rest(self) -> None:
        """Have the calling thread ask for no room: another thread trains, and lets go of its own tensors meanwhile.

        PyTorch ends the process if one thread takes a storage that another one is just releasing.
        """
        self._asking.on = False
        self.live.ask(False)

    def grow_with(self, share: float | None) -> None:
        """Hold a share of the in-core peak, as far as it is known: it grows with the step. None ends that.

        What would be live in-core never shrinks below its highest value so far, so neither does the budget, and at the
        end of the step it is the share of the step's in-core peak.
        """
        self._share = share
        if share is not None:
            self.set_budget(int(share * self.live.now()))

    def _grow(self, missing_bytes: int) -> int:
        """Raise the budget to the share of what would be live in-core now, and return what is still missing.

        The caller holds the lock, so that two threads that ask at once do not lower it again.
        """
        assert self._share is not None
        away_bytes = sum(record.size_bytes for record in self._records if record.storage is None)
        grown_bytes = int(self._share * (self.budget_bytes + missing_bytes + away_bytes))
        if grown_bytes > self.budget_bytes:
            missing_bytes -= grown_bytes - self.budget_bytes
            self.set_budget(grown_bytes)
        return missing_bytes

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget."""
        self.budget_bytes = budget_bytes
        me = weakref.ref(self)

        def ask(missing_bytes: int) -> None:
            evictor = me()
            if evictor is not None:
                evictor.make_room(missing_bytes)

        self.live.hold(budget_bytes, ask)

    def close(self) -> None:
        """Hold nothing any longer. Steps that are alive can still read what they saved."""
        self.live.close()
        self.engine.close()

    # What can leave ---------------------------------------------------------------------------------------------------

    def saved(self, record: OnlineRecord) -> None:
        """Register a value that autograd has saved."""
        if record.size_bytes == 0:
            return  # there is nothing to free
        self._records[record] = None
        self._unwritten[record] = None
        self._largest_bytes = max(self._largest_bytes, record.size_bytes)

    def next_save(self) -> int:
        """Return the position of the next save."""
        self._saves += 1
        self._position = self._saves
        return self._saves

    def keeps(self, step: PlannedStep) -> None:
        """Ask a planned step, before anything leaves, to let what it keeps leave as well."""
        with self.lock:  # another thread may be looking through them
            self._keeping.add(step)

    def take_over(self, actions: StepActions) -> None:
        """Let the values of a planned step leave as well, since its schedule no longer holds."""
        with self.lock:
            self._planned.add(actions)

    def make_room(self, missing_bytes: int) -> None:
        """Evict until so many bytes are free, or until nothing more can leave."""
        start = time.perf_counter()
        with self.lock:
            if self._share is not None:
                missing_bytes = self._grow(missing_bytes)
                if missing_bytes <= 0:
                    return
            with torch._C._DisableTorchDispatch():
                for step in list(self._keeping):
                    step.let_kept_leave()
            freed_bytes = self._finish_copies_ahead()
            if freed_bytes < missing_bytes:
                spare_bytes = int(_SPARE_SHARE * (self.budget_bytes - self._start_bytes))
                freed_bytes += self._evict_cheapest(max(missing_bytes - freed_bytes, spare_bytes))
            for actions in list(self._planned):
                if freed_bytes < missing_bytes:
                    freed_bytes += actions.let_go(missing_bytes - freed_bytes)
            if freed_bytes < missing_bytes and self.engine.health.fault is not None:
                here_bytes = sum(record.size_bytes for record in self._candidates())
                self.stayed_bytes = max(self.stayed_bytes, here_bytes)
        if freed_bytes < missing_bytes:
            self.missing_bytes = max(self.missing_bytes, missing_bytes - freed_bytes)
        elapsed_ms = (time.perf_counter() - start) * 1000
        self.stall_ms += elapsed_ms
        self.stats.host_stall_ms += elapsed_ms

    def look_before(self, arguments: Any) -> None:
        """Make room before an op, which is thought to need as much as its arguments take.

        Args:
            arguments: Its arguments, in any nesting.
        """
        if not self.live.asks:
            tensors = (tensor for tensor in find_tensors(arguments) if has_plain_storage(tensor))
            self.look(sum(storage_of(tensor).nbytes() for tensor in tensors))

    def look(self, needed_bytes: int) -> None:
        """Make room before an op or a read where allocations do not ask for it.

        Args:
            needed_bytes: What the op is thought to need. The most that ever came between two looks is added to what
                is live if that is more.
        """
        found = None if self.live.asks else self.live.look()
        if found is None:
            return
        now, higher_bytes = found
        self._most_higher_bytes = max(self._most_higher_bytes, higher_bytes)
        missing_bytes = now + max(needed_bytes, self._most_higher_bytes) - self.budget_bytes
        if missing_bytes > 0:
            self.make_room(missing_bytes)

    def _evict_cheapest(self, missing_bytes: int) -> int:
        """Evict in the order of cost. A cost that has grown since it was computed is computed again."""
        heap = [(self._cost(record), id(record), record) for record in self._candidates()]
        heapq.heapify(heap)
        freed_bytes = 0
        while heap and freed_bytes < missing_bytes:
            cost, number, record = heapq.heappop(heap)
            now = self._cost(record)
            if heap and now > heap[0][0] and now > cost:
                heapq.heappush(heap, (now, number, record))
            else:
                freed_bytes += self._evict(record)
        return freed_bytes

    def _candidates(self) -> Iterator[OnlineRecord]:
        for record in self._records:
            if not (record.storage is None or record.is_busy or record.changed or record.is_held_elsewhere):
                yield record

    def _cost(self, record: OnlineRecord) -> float:
        """Return the score by which values leave, the lowest first. See `analysis/eviction.py`."""
        cost_ms = min(self._copy_ms(record), self._replay_ms(record))
        return online_score(cost_ms, record.size_bytes, distance(self._position, record.saved_at))

    def _copy_ms(self, record: OnlineRecord) -> float:
        back_ms = self.speed.copy_ms(record.size_bytes)
        return back_ms if record.is_copied else 2 * back_ms

    def _replay_ms(self, record: OnlineRecord) -> float:
        owner = record.owner()
        return float("inf") if owner is None else owner.replay_ms(record.value)

    def _evict(self, record: OnlineRecord) -> int:
        """Let a value's bytes leave, and return how many are free now."""
        if record.is_copied:
            if record.ticket is not None:  # it was on its way back
                record.ticket.wait()
                record.ticket = None
            return self._drop(record)
        if record.ticket is None:
            gained_ms = self._copy_ms(record) - self._replay_ms(record)
            if gained_ms > 0:
                owner = record.owner()
                assert owner is not None, "only its step can replay it"
                owner.effort.gained_ms += gained_ms
                return self._drop(record)
            self._start_copy_out(record)
        if not self._finish_copy_out(record) and self._replay_ms(record) == float("inf"):
            return 0
        return self._drop(record)

    def _drop(self, record: OnlineRecord) -> int:
        if not record.is_copied:
            self._remember(record)
        if self.on_move is not None and record.storage is not None:
            self.on_move("left", record, record.storage.data_ptr())
        record.storage = None
        owner = record.owner()
        if owner is not None:
            owner.forget_costs()
        return record.size_bytes

    def _remember(self, record: OnlineRecord) -> None:
        """Remember the bytes of a value that leaves to be replayed, and copy them if its recipe is not proven."""
        owner, storage = record.owner(), record.storage
        recipe = None if owner is None else owner.recipe(record.value)
        if owner is None or recipe is None or storage is None:
            return
        level = self.verification.level(recipe.key, is_foreign=recipe.is_foreign, device_type=storage.device.type)
        if level == Level.NONE:
            record.witness = None
            return
        record.witness = witness = Witness(recipe.key, level)
        witness.take(storage)
        if level == Level.COPIED:
            record.copy = owner.tier.take(record.size_bytes)
            if record.copy is not None:
                witness.start_copy(record.copy, storage)
                witness.finish_copy()
                self.stats.verified_bytes += record.size_bytes

    def check(self, record: OnlineRecord, storage: torch.UntypedStorage) -> None:
        """Compare what a replay gave with what was there, and put that in its place if it differs.

        Raises:
            ReplayDiffers: If it differs and there is no copy.
        """
        witness, owner = record.witness, record.owner()
        if witness is not None and owner is not None:
            self.verification.compare(witness, storage, partial(owner.difference, record.value))

    def _forget_witness(self, record: OnlineRecord) -> None:
        record.witness = None
        if record.copy is not None:
            record.copy.release()
            record.copy = None

    # Copies -----------------------------------------------------------------------------------------------------------

    def _start_copy_out(self, record: OnlineRecord) -> bool:
        """Start to copy a value out, and return whether the tier has room for it."""
        owner, storage = record.owner(), record.storage
        assert storage is not None
        room = None if owner is None else owner.tier.take(record.size_bytes)
        if room is None:
            return False
        record.room = room
        record.ticket = room.copy_out(storage)
        self.stats.swapped_out_bytes += record.size_bytes
        return True

    def _finish_copy_out(self, record: OnlineRecord) -> bool:
        """Wait for a copy out, and return whether the tier has the value. It may have failed, or there was no room."""
        if record.is_copied or record.ticket is None:
            return record.is_copied
        waited_ms = record.ticket.wait()
        self.speed.note(record.size_bytes, waited_ms)
        assert record.room is not None
        record.room.copied(record.ticket.error)
        if record.ticket.error is None:
            record.is_copied = True
        else:
            self.stats.kept_after_errors += 1
            record.room.release()
            record.room = None
        record.ticket = None
        return record.is_copied

    def _finish_copies_ahead(self) -> int:
        """Drop what was copied out ahead of need, and return how many bytes that frees."""
        freed_bytes = 0
        while self._ahead:
            record = self._ahead.popleft()
            if record.storage is None or record.is_copied or record.ticket is None:
                continue
            if self._finish_copy_out(record) and not (record.is_busy or record.is_held_elsewhere):
                freed_bytes += self._drop(record)
        return freed_bytes

    def write_ahead(self) -> None:
        """Between ops: start to copy out what is needed last while there is still room, so that nobody waits for it."""
        room_bytes = self.budget_bytes - self._start_bytes
        if self._ahead:
            with self.lock:
                while self._ahead and (self._ahead[0].ticket is None or self._ahead[0].ticket.is_done()):
                    self._finish_copy_out(self._ahead.popleft())
        if (
            self.live.recent() < self._start_bytes + _WRITE_AHEAD_SHARE * room_bytes
            or len(self._ahead) >= _COPIES_AHEAD
        ):
            return
        with self.lock:
            for _ in range(min(_LOOKED_AT, len(self._unwritten))):
                if len(self._ahead) >= _COPIES_AHEAD:
                    return
                record, _ = self._unwritten.popitem(last=False)  # the oldest is read last
                if record.storage is None or record.changed or record.is_copied or record.ticket is not None:
                    continue
                if record.is_busy or record.is_held_elsewhere:
                    self._unwritten[record] = None
                elif self._replay_ms(record) >= self._copy_ms(record):
                    if not self._start_copy_out(record):
                        return
                    self._ahead.append(record)

    # Reads ------------------------------------------------------------------------------------------------------------

    def ensure(self, record: OnlineRecord) -> torch.UntypedStorage:
        """Return a value's storage on the device. The caller holds the lock, and reads it before it releases that.

        Raises:
            TierError: If it cannot be read back.
        """
        record.is_busy = True
        try:
            if record.storage is None:
                self.stats.late_swaps += 1
                self._bring_back(record)
            self._finish_copy_in(record)
            assert record.storage is not None
            return record.storage
        finally:
            record.is_busy = False

    def reading(self, record: OnlineRecord) -> None:
        """Note that the backward pass has come to this value."""
        self._position = record.saved_at

    def _bring_back(self, record: OnlineRecord) -> None:
        if record.room is not None and record.is_copied:
            self._start_copy_in(record)
            return
        owner = record.owner()
        assert owner is not None, "a step lives as long as its handles"
        record.storage = owner.make_again(record.value)
        self._forget_witness(record)
        owner.forget_costs()

    def _start_copy_in(self, record: OnlineRecord) -> None:
        assert record.room is not None
        storage = new_storage(record.size_bytes, self.device)  # asks for room
        if self.on_move is not None:
            self.on_move("returned", record, storage.data_ptr())
        ticket = record.room.copy_in(storage)
        record.storage, record.ticket = (
            storage,
            ticket,
        )  # no interrupt between them: it would be read too early
        self.stats.swapped_in_bytes += record.size_bytes

    def _finish_copy_in(self, record: OnlineRecord) -> None:
        if record.ticket is None or not record.is_copied:
            return
        waited_ms = record.ticket.wait()
        self.stats.host_stall_ms += waited_ms
        error, record.ticket = record.ticket.error, None
        if error is not None:
            record.storage = None  # what it holds is not the value
            fault = self.engine.health.failed(error, is_told=False)
            raise TierError(
                f"a swapped activation cannot be read back: {fault}; repeat the step", fault.kind
            ) from error

    def read_ahead(self, record: OnlineRecord) -> None:
        """After a read: start to bring back what the backward pass will most likely read next, if there is room."""
        spare_bytes = self.budget_bytes - self.live.recent() - 2 * self._largest_bytes  # what the next op may need
        if spare_bytes <= 0:
            return
        for other in reversed(self._records):
            if other.saved_at >= record.saved_at:
                continue
            if other.storage is not None or other.owner() is None:
                continue
            if other.size_bytes > spare_bytes or not other.is_copied:
                return
            self._start_copy_in(other)
            return

    # The end ----------------------------------------------------------------------------------------------------------

    def changed(self, record: OnlineRecord) -> None:
        """Prepare for an op that writes over a value's storage: finish its copy, and keep the storage from now on.

        The tensors that autograd saved may be other parts of it, as in a recurrent cell whose gates are changed in
        place one after the other. Their version counters tell when they are read.
        """
        with self.lock:
            record.changed = True
            if record.storage is None:
                return  # the program no longer holds what left, so it is another storage that is written
            if record.ticket is not None:
                record.ticket.wait()
                record.ticket = None
            self._forget_copy(record)

    def _handle_ended(self, record: OnlineRecord) -> None:
        record.handles -= 1
        if record.handles == 0:
            owner = record.owner()
            if owner is not None:
                owner.records.pop(record.value, None)
            if self.on_move is not None and record.storage is None:
                self.on_move("ended", record, 0)
            self._let_go(record)

    def _let_go(self, record: OnlineRecord) -> None:
        self._records.pop(record, None)
        self._unwritten.pop(record, None)
        if record.ticket is not None:
            record.ticket.wait()
            record.ticket = None
        record.storage = None
        self._forget_copy(record)
        self._forget_witness(record)

    def _forget_copy(self, record: OnlineRecord) -> None:
        if record.room is not None:
            record.room.release()
            record.room = None
        record.is_copied = False
