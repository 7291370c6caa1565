# ruff: noqa: E501  (a text to change is one line, so that it can be searched for)
"""Ways to break the machine, one at a time: each gives other contents, passes the budget, or loses room or memory.

What changes speed alone is left out: random steps look at contents and bytes. Each text to change occurs once.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pooch

_ROOM = Path(pooch.__file__).parent / "machine"
_OURS = ("pooch.machine", "tests.machine.programs", "tests.machine.persistent_programs", "tests.machine.modelled")


@dataclass(frozen=True)
class Mutation:
    """One change.

    Attributes:
        name: What is wrong then.
        module: The module of `pooch.machine` that it changes.
        old: The text that is replaced.
        new: What replaces it.
    """

    name: str
    module: str
    old: str
    new: str

    @property
    def text(self) -> str:
        """The module's text with the change in it.

        Raises:
            ValueError: The text that it replaces is not there, or more than once.
        """
        text = (_ROOM / f"{self.module}.py").read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name!r}: {self.module}.py has its text {text.count(self.old)} times, not once")
        return text.replace(self.old, self.new)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, mutation: Mutation) -> None:
        self._name, self._text = f"pooch.machine.{mutation.module}", mutation.text

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self) if fullname == self._name else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._text, f"<{self._name}, broken>", "exec"), module.__dict__)


@contextmanager
def broken_by(mutation: Mutation, programs: str = "programs") -> Iterator[Any]:
    """Import the machine with a change in it, and yield what runs on top of that.

    Args:
        mutation: The change.
        programs: The module of `tests.machine` that is yielded.
    """
    kept = {name: module for name, module in sys.modules.items() if name.startswith(_OURS)}
    finder = _Finder(mutation)
    for name in kept:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module(f"tests.machine.{programs}")
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.startswith(_OURS)]:
            del sys.modules[name]
        sys.modules.update(kept)
        for name, module in kept.items():  # packages hold their modules by name as well
            parent, _, last = name.rpartition(".")
            if parent in sys.modules:
                setattr(sys.modules[parent], last, module)


STORE = (
    Mutation("a copy out counts as done without being waited for", "store", "        waited_ms = ticket.wait()\n        self.speed.learn", "        waited_ms = 0.0\n        self.speed.learn"),
    Mutation("a copy that failed counts as done", "store", "        if ticket.error is None:\n            value.is_copied = True", "        if True:\n            value.is_copied = True"),
    Mutation("a copy that is done counts as failed", "store", "        if ticket.error is None:\n            value.is_copied = True", "        if False:\n            value.is_copied = True"),
    Mutation("a copy out leaves its ticket", "store", "            self.forget_copy(value)\n        value.ticket = None\n        return waited_ms", "            self.forget_copy(value)\n        return waited_ms"),
    Mutation("bytes that come back are dropped in the middle of the copy", "store", "        if value.ticket is not None:\n            value.ticket.wait()\n            value.ticket = None\n        if self.on_move", "        value.ticket = None\n        if self.on_move"),
    Mutation("what is dropped stays", "store", '            self.on_move("left", value, storage)\n        value.storage = storage = None\n', '            self.on_move("left", value, storage)\n'),
    Mutation("dropping frees nothing, they say", "store", "        return value.size_bytes if is_gone else 0", "        return 0"),
    Mutation("a value that comes back is filled from nowhere", "store", "        ticket = value.place.copy_in(storage)\n", "        ticket = value.place.copy_in(self.memory.new(value.size_bytes))\n"),
    Mutation("a value that comes back is not waited for", "store", "        stats.host_stall_ms += ticket.wait()\n", ""),
    Mutation("a value that comes back keeps its ticket and is read early", "store", "        if ticket is None or not value.is_copied:\n            return\n        stats", "        if ticket is not None or not value.is_copied:\n            return\n        stats"),
    Mutation("what copies a value is not waited for at its end", "store", "        if value.ticket is not None:\n            value.ticket.wait()\n            value.ticket = None\n\n    def forget_copy", "        value.ticket = None\n\n    def forget_copy"),
    Mutation("the tier keeps what is written over", "store", "        place, value.place, value.is_copied = value.place, None, False\n", "        place = None\n"),
    Mutation("room in the tier is lost", "store", "        if place is not None:\n            place.release()", "        if place is None:\n            place.release()"),
)  # fmt: skip

PRESSURE = (
    Mutation("no room is made", "pressure", "self.live.hold(budget_bytes, weakly(self.make_room))", "self.live.hold(budget_bytes, lambda _: None)"),
    Mutation("half of the room is made", "pressure", "if freed_bytes >= max(missing_bytes, spare_bytes):", "if freed_bytes >= max(missing_bytes, spare_bytes) // 2:"),
    Mutation("values that the program writes over leave", "pressure", " or value.changed or value.is_pinned:\n", " or value.is_pinned:\n"),
    Mutation("values leave while they are read", "pressure", "value.storage is None or value.is_busy or value.changed or", "value.storage is None or value.changed or"),
    Mutation("values leave that the program holds", "values", "        return memory.is_held_elsewhere(storage)", "        return False"),
    Mutation("nothing leaves, since everything seems held", "values", "        return memory.is_held_elsewhere(storage)", "        return True"),
    Mutation("what is copied is copied again", "pressure", "        if value.is_copied:\n            return self._drop(value)\n", ""),
    Mutation("what cannot be made again is dropped when its copy fails", "pressure", "        if not value.is_copied and self._costs.replay_ms(value) == NEVER_MS:\n            return 0\n", ""),
    Mutation("what could not be copied counts as free", "pressure", "        if not value.is_copied and self._costs.replay_ms(value) == NEVER_MS:\n            return 0\n", "        if not value.is_copied and self._costs.replay_ms(value) == NEVER_MS:\n            return value.size_bytes\n"),
    Mutation("everything is dropped to be made again", "pressure", "            if gained_ms > 0:", "            if True:"),
    Mutation("a replay is compared with nothing", "pressure", "            owner.remember(value)\n", "            pass\n"),
    Mutation("a copy out has no room", "pressure", "            place = owner.take_place(value.size_bytes)\n", "            place = owner.take_place(1)\n"),
    Mutation("what is copied is dropped before the copy is done", "pressure", "        self.store.finish_out(value, self.stats)\n        if value in", "        value.is_copied, value.ticket = True, None\n        if value in"),
    Mutation("what was copied ahead is dropped under the program", "pressure", "        return 0 if value.is_held_elsewhere(self.memory) else self._drop(value)\n", "        return self._drop(value)\n"),
    Mutation("what is there is read ahead", "away", "            if value.storage is None and value.is_copied:", "            if value.is_copied:"),
    Mutation("a value that is away is handed over", "pressure", "                self.stats.late_swaps += 1\n                self._bring_back(value)\n", "                self.stats.late_swaps += 1\n                value.storage = self.memory.new(value.size_bytes)\n"),
    Mutation("a value is read before it is back", "pressure", "            self.store.finish_in(value, self.stats)\n            assert value.storage", "            assert value.storage"),
    Mutation("a value that was read stays for ever", "pressure", "            value.is_busy = was_busy\n", "            pass\n"),
    Mutation("a copy under way is written over", "pressure", "            self.store.settle(value)\n            self.store.forget_copy(value)\n\n    def _handle_ended", "            self.store.forget_copy(value)\n\n    def _handle_ended"),
    Mutation("what was written over comes back as it was", "pressure", "            value.changed = True\n            if value.storage is None:", "            if value.storage is None:"),
    Mutation("a value ends with its first handle", "pressure", "        if value.handles:\n            return\n", ""),
    Mutation("a value never ends", "pressure", "        value.handles -= 1\n", ""),
    Mutation("a step keeps values that have ended", "pressure", "if owner is not None and owner.released(value.number):", "if owner is not None and False:"),
    Mutation("values that have ended are still known", "pressure", "        self._values.pop(value, None)\n", ""),
    Mutation("values that have ended wait to leave", "pressure", "        self._candidates.discard(value)\n        self._away", "        self._away"),
    Mutation("values that have ended wait to be brought back", "pressure", "        self._away.discard(value)\n", ""),
    Mutation("values that have ended are still copied ahead", "pressure", "        self._values.pop(value, None)\n        self._writing.pop(value, None)\n", "        self._values.pop(value, None)\n"),
    Mutation("the bytes of a value that has ended stay", "pressure", "        self.store.settle(value)\n        value.storage = None\n", "        self.store.settle(value)\n"),
    Mutation("a value that has ended keeps its room", "pressure", "        value.storage = None\n        self.store.forget_copy(value)\n        value.forget_witness()", "        value.storage = None\n        value.forget_witness()"),
    Mutation("a value that has ended keeps the room of its copy", "pressure", "        value.storage = None\n        self.store.forget_copy(value)\n        value.forget_witness()", "        value.storage = None\n        self.store.forget_copy(value)"),
    Mutation("what is over the budget is not told", "pressure", "                self._missing_bytes = max(self._missing_bytes, missing_bytes - freed_bytes)\n", ""),
)  # fmt: skip

RECIPES = (
    Mutation("a replay reads nothing in particular", "recipes", "            storage = made.get(read)\n", "            storage = next(iter(made.values()), None)\n"),
    Mutation("a replay is believed", "recipes", "                        self._kitchen.check(value, storage)\n", ""),
    Mutation("what a chain still reads may leave in vain", "recipes", "                            value.storage, value.is_busy = storage, True\n", "                            value.storage = storage\n"),
    Mutation("what a chain has made on the way stays busy", "recipes", "                        _may_leave(staying.pop(read, None))\n        finally:\n            for value in staying.values():\n                _may_leave(value)\n", "                        staying.pop(read, None)\n        finally:\n            pass\n"),
    Mutation("what a chain has made loses its room for a copy", "recipes", "                            value.forget_witness()\n", "                            value.witness = None\n"),
    Mutation("a chain holds what it has just made", "recipes", "                del storages, storage  # what nobody reads any more may leave during the next call\n", ""),
    Mutation("a chain runs in any order", "recipes", "        return [found[first] for first in sorted(found)]", "        return [found[first] for first in sorted(found, reverse=True)]"),
    Mutation("what cannot be made again costs nothing", "recipes", "            if call is None or current in self._out_of_date or", "            if call is None:\n                return 0.0\n            if current in self._out_of_date or"),
    Mutation("what changes is not brought back before", "recipes", "                self._kitchen.ensure(value)\n        for number in changing:", "                pass\n        for number in changing:"),
    Mutation("what has changed is still read by replays", "recipes", "            self._calls.pop(number, None)\n", "            pass\n"),
    Mutation("what is made from what has changed is still replayed", "recipes", "            if not changing.isdisjoint(call.reads):\n                changing.add(number)\n", "            pass\n"),
    Mutation("costs are those from before a change", "recipes", "        self._out_of_date |= changing\n        self._costs_ms.clear()\n", "        self._costs_ms.clear()\n"),
)  # fmt: skip

WITNESSES = (
    Mutation("a difference is agreement", "values", "        return self.checksum(storage, self.level == Level.SAMPLE) == self.digest", "        return True"),
    Mutation("the copy of what was there is not looked at", "values", "        ticket.wait()\n        self.ticket = None\n        return ticket.error", "        self.ticket = None\n        return ticket.error"),
    Mutation("the room of a witness is given back in the middle of the copy", "values", "        waited_ms = ticket.wait()\n        self.ticket = None  # only", "        waited_ms = 0.0\n        self.ticket = None  # only"),
    Mutation("the room of a witness is lost", "values", "        place, self.place = self.place, None\n        if place is not None:\n            place.release()", "        self.place = None"),
)  # fmt: skip

LOCK = (
    Mutation("handles that end while the lock is held are forgotten", "lock", "        self._queue.append(value)\n        self._settle()\n", "        self._settle()\n"),
    Mutation("an interrupt leaves the lock held", "lock", "        while self._lock._is_owned():  # type: ignore[attr-defined]\n            self._depth = 0\n            self._lock.release()\n", ""),
)  # fmt: skip

# Of what outlives steps: noticed by `tests.machine.persistent_programs`.
PERSISTENT = (
    Mutation("what was written to counts as copied", "persistent", " or self._writes == self._written\n", " or True\n"),
    Mutation("what is away counts as lost", "persistent", "self._arriving is not None or not self._home.is_here or self._writes == self._written", "self._writes == self._written"),
    Mutation("writes after a copy began count as copied", "persistent", "        self._written, self._is_in_tier = self._writes, False\n", "        self._is_in_tier = False\n"),
    Mutation("a copy that began counts as complete", "persistent", "        self._written, self._is_in_tier = self._writes, False\n", "        self._written = self._writes\n"),
    Mutation("what has come back counts as written to", "persistent", "            self._home.give(arriving)\n            self._written = self._writes\n", "            self._home.give(arriving)\n"),
    Mutation("what has come back is not where the program looks", "persistent", "            self._home.give(arriving)\n", "            pass\n"),
    Mutation("what is on its way back is not there", "persistent", "        if self._arriving is not None:\n            return self._arriving\n", ""),
    Mutation("what comes back is put over what is there", "persistent", "        if storage is not None or self._arriving is not None:\n", "        if storage is not None:\n"),
    Mutation("what ops work on leaves", "persistent", "self.users or home.is_used or self._is_pinned:", "self.users or self._is_pinned:"),
    Mutation("what is being brought back leaves again", "persistent", "if self.is_busy or self.users or home", "if self.users or home"),
    Mutation("what somebody has the address of leaves", "persistent", "home.is_used or self._is_pinned:", "home.is_used:"),
    Mutation("what arrays are on leaves", "persistent", "        return self._is_pinned or self._is_lent\n", "        return self._is_pinned\n"),
    Mutation("what has a further tensor on it is not lent any more", "persistent", "not self.users and self._home.tensors <= 1", "not self.users and self._home.tensors <= 2"),
    Mutation("what is written to through an array counts as copied", "persistent", "            self._is_lent, self._loans = False, self._loans + 1\n", "            self._is_lent = False\n"),
    Mutation("a loan ends before it is used", "persistent", "if not self.users and self._home.tensors", "if self._home.tensors"),
    Mutation("loans never end", "persistent", "            self._is_lent, self._loans = False, self._loans + 1\n", "            self._loans += 1\n"),
    Mutation("what is read without an op leaves", "persistent", "if self.is_busy or self.users or home", "if self.is_busy or home"),
    Mutation("what is pinned leaves", "persistent", "        return self._is_pinned or self._is_lent\n", "        return self._is_lent\n"),
    Mutation("what another thread has just written to is dropped", "persistent", "self._left(self._home.take(self._written - self._loans))", "self._left(self._home.take())"),
    Mutation("what is lent is taken where a slice is undone", "persistent", "        if not self.is_pinned:\n            self._left(self._home.take())\n            return\n", "        self._left(self._home.take())\n        return\n"),
    Mutation("a slice that is undone stays as it is", "persistent", "        if not self.is_pinned:\n            self._left(self._home.take())\n", "        if not self.is_pinned:\n"),
    Mutation("what was filled again in its place is not waited for", "persistent", "        try:\n            ticket.wait()\n        finally:\n            ticket.wait()  # an interrupt must not leave a part of it\n", ""),
    Mutation("the room of a copy that failed is lost", "persistent", "        self._value.spare = self\n", "        pass\n"),
    Mutation("a value whose copy failed stays for ever", "persistent", "                value.place, value.spare = value.spare, None\n", "                value.spare = None\n"),
    Mutation("what the program has released stays known", "persistent", "            del self._values[key]\n", "            pass\n"),
    Mutation("what the program has released is brought back", "persistent", "not self._home.is_here and not self._home.is_gone", "not self._home.is_here"),
    Mutation("what is there is brought back", "persistent", "self._arriving is None and not self._home.is_here and not", "self._arriving is None and not"),
    Mutation("what a step makes anew takes the room of what it made before", "persistent", "    def is_gone(self) -> bool:\n        \"\"\"Whether the program has released it.\"\"\"\n        return self._home.is_gone\n", "    def is_gone(self) -> bool:\n        \"\"\"Whether the program has released it.\"\"\"\n        return True\n"),
    Mutation("the next use is looked for one place too late", "persistent", "place = now % max(1, self.length)", "place = (now + 1) % max(1, self.length)"),
    Mutation("uses in the next step are forgotten", "persistent", "*self.order[:place]]", "*[-1] * place]"),
    Mutation("what is used first leaves first", "persistent", "return sorted(scored, key=itemgetter(0))", "return sorted(scored, key=itemgetter(0), reverse=True)"),
    Mutation("values leave in the order in which they came", "persistent", "return sorted(scored, key=itemgetter(0))", "return scored"),
    Mutation("the order of the step before is forgotten", "persistent", "            self._uses = Uses(order)\n", "            pass\n"),
    Mutation("what was used last is told to be used next", "persistent", "range(now, now + min(count, length))", "range(now - 1, now - 1 + min(count, length))"),
    Mutation("what costs more than all saved values stays", "persistent", "            yield from (value for _, value in chain((following,), own) if value.can_leave)\n", "            pass\n"),
    Mutation("one value for each saved one leaves", "persistent", "for _, value in chain((following,), own) if", "for _, value in (following,) if"),
    Mutation("values that left meanwhile leave again", "persistent", "in chain((following,), own) if value.can_leave)", "in chain((following,), own))"),
    Mutation("what does not outlive steps is all that may leave", "pressure", "return saved if self.persistent is None else", "return saved if self.persistent is not None else"),
    Mutation("what was written to while it was copied stays", "pressure", "        if value.is_outdated:\n            self._finish_out(value)  # and it is copied again\n", ""),
    Mutation("what was released while it was copied is dropped", "pressure", "        if value.is_gone:\n            return value.size_bytes  # nothing but the copy has held it\n", ""),
    Mutation("room is given up although what outlives steps may leave", "pressure", " or self.persistent is not None\n", "\n"),
)  # fmt: skip

MUTATIONS = (*STORE, *PRESSURE, *RECIPES, *WITNESSES, *LOCK)
