"""What the program reads and writes without an op, of what outlives steps: the bytes are there meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch

from ..machine.lock import StepLock
from ..machine.persistent import PersistentValue, PersistentValues
from ..torchtools.address_askers import RunningCall, reading_call
from ..torchtools.function_modes import past_subclasses
from ..torchtools.raw_looks import LooksEverywhere
from ..torchtools.raw_storages import Access, serve, serve_no_longer
from ..torchtools.tensors import find_tensors, has_plain_storage, storage_key

# What these hand out is a further tensor on the storage, which shows how long it lives, or nothing that lasts.
_LENDING = {"numpy", "__array__", "apply_", "map_", "map2_"}


class ProgramReads:
    """Has values be there while the program reads them without an op, and stay once it has their address.

    Args:
        values: The values.
        homes: Their homes, by the keys of the storages.
        lock: Is held while values are changed.
        bring_back: Brings values back.
    """

    def __init__(
        self,
        values: PersistentValues,
        homes: dict[int, Any],
        lock: StepLock,
        bring_back: Callable[[Iterable[PersistentValue]], None],
    ) -> None:
        self._values, self._homes, self._lock, self._bring_back = values, homes, lock, bring_back
        # Calls that read from addresses, and what ends that.
        self._reading: dict[RunningCall, list[Callable[[], None]]] = {}
        self._looks = LooksEverywhere(self._looked)

    def begin(self) -> None:
        """Watch from now on."""
        self._looks.begin()
        serve(self)

    def end(self) -> None:
        """Watch no longer."""
        self._looks.end()
        serve_no_longer(self)

    @past_subclasses
    def _looked(self, arguments: Any, name: str, hands_out: bool) -> Callable[[], None]:
        """Note that the program is about to read tensors without an op. What it obtains the address of stays in place.

        Returns what ends that.

        Args:
            arguments: What it reads, in any nesting.
            name: Of the method.
            hands_out: Whether the program obtains the address.
        """
        access: Access = "read" if not hands_out else "write" if name in _LENDING else "address"
        with ExitStack() as ends:
            for value in (value_of(self._values, tensor) for tensor in find_tensors(arguments)):
                if value is not None:
                    ends.callback(self._accessed(value, access))
            return ends.pop_all().close

    def moves(self, key: int) -> bool:
        """Whether the bytes of a storage may leave."""
        return self._values.of(key) is not None

    def is_away(self, key: int) -> bool:
        """Whether the bytes of a storage are away."""
        value = self._values.of(key)
        return value is not None and not value.is_here

    def access(self, key: int, access: Access) -> Callable[[], None]:
        """Have the bytes of a storage be there until what is returned is called."""
        value = self._values.of(key)
        assert value is not None
        return self._accessed(value, access)

    def adopt_tensor(self, tensor: torch.Tensor) -> None:
        """Have the ops on a tensor be seen that the program has put on a storage."""
        home = self._homes.get(storage_key(tensor)) if has_plain_storage(tensor) else None
        if home is not None:
            home.mark(tensor)

    def _accessed(self, value: PersistentValue, access: Access) -> Callable[[], None]:
        """Have the bytes of a value be there until what is returned is called, and longer where they may be written to.

        What is lent stays as long as there is an array, which is a further tensor. Nothing tells how long an address
        will be used, but for calls that are known.
        """
        call = reading_call() if access == "address" else None
        with self._lock:
            value.users += 1
            if access == "address" and call is None:
                value.is_pinned = True
            elif access == "write":
                value.lend()

        def end() -> None:
            with self._lock:
                value.users -= 1

        try:
            self._bring_back([value])
        except BaseException:
            end()
            raise
        if call is None:
            return end
        with self._lock:
            self._reading.setdefault(call, []).append(end)
        return lambda: None

    def end_calls(self) -> None:
        """Let leave what calls have read from that have returned. The caller holds the lock."""
        for call in [each for each in self._reading if each.has_ended()]:
            for end in self._reading.pop(call):
                end()


def value_of(values: PersistentValues, tensor: torch.Tensor) -> PersistentValue | None:
    """Return the value that a tensor lies in, or None."""
    return values.of(storage_key(tensor)) if has_plain_storage(tensor) else None
