"""The ranks that train together: who they are, and what they tell one another.

They talk through the store of `torch.distributed`, and never through a collective, so none is added to the program's.
A store is asked without waiting wherever another rank may not come.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import distributed

from ..ground.errors import RankError, UsageError, first_line
from ..ground.live_objects import live_objects
from ..ground.messages import write_line
from .tensors import gradient_of

LOOK_EVERY_S = 0.05
GRACE_S = 10.0  # for a rank to leave a collective by itself, which fails when the connection to another rank does
_LOCAL_COUNTS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_SESSIONS: Counter[str] = Counter()  # the ranks of a group do the same things in the same order


def has_collectives(model: torch.nn.Module) -> bool:
    """Whether a step of the model runs collectives: it, or a part of it, is data parallel or sharded."""
    if not is_distributed():
        return False
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # loaded by any program that shards a model
    names = ("FSDPModule", "FullyShardedDataParallel")
    kinds = (torch.nn.parallel.DistributedDataParallel, *(getattr(fsdp, name) for name in names if hasattr(fsdp, name)))
    return any(isinstance(module, kinds) for module in model.modules())


def will_arrange_buckets(model: torch.nn.Module) -> bool:
    """Whether DDP is still to arrange its buckets anew, at the beginning of a forward pass.

    It does so once, after the first backward pass in which it averages gradients: that of the first step, of the second
    in a static graph, and later where gradients are accumulated.
    """
    return (
        isinstance(model, torch.nn.parallel.DistributedDataParallel)
        and (model.static_graph or not model.find_unused_parameters)
        and not getattr(model, "_has_rebuilt_buckets", True)
    )


# Models whose buckets were made while allocations were counted, with whether they would still arrange them anew when
# that was noted: the allocator counts them for as long as they live.
_COUNTED: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()
_OPEN: weakref.WeakSet[EarlierBuckets] = weakref.WeakSet()


class EarlierBuckets:
    """The buckets of DDP models that are there already. DDP makes them as it is made, and C++ holds them, unseen."""

    def __init__(self) -> None:
        for other in list(_OPEN):  # as `pooch exec` counts before a model is there
            other._note()
        models = [(each, will_arrange_buckets(each)) for each in _ddp_models()]
        self._models = [(weakref.ref(each), would) for each, would in models if _COUNTED.get(each) is not would]
        self.counted_bytes = 0  # by the last `count`
        _OPEN.add(self)

    def close(self) -> None:
        """Count none any longer."""
        self._note()
        _OPEN.discard(self)

    def _note(self) -> None:
        """Note what has been counted as it was made, for those who count later in the same process."""
        still = {id(each) for each in self._there()}
        _COUNTED.update({each: will_arrange_buckets(each) for each in _ddp_models() if id(each) not in still})

    def _there(self) -> list[torch.nn.parallel.DistributedDataParallel]:
        models = ((model(), would_arrange) for model, would_arrange in self._models)
        return [each for each, would in models if each is not None and (not would or will_arrange_buckets(each))]

    def count(self, device_type: str) -> int:
        """Return the bytes of those that are still there, but for those that are seen as gradients."""
        self.counted_bytes = sum(_bucket_bytes(each, device_type) for each in self._there())
        return self.counted_bytes

    def has_changed(self, device_type: str) -> bool:
        """Return whether fewer or others are there than were counted last."""
        return bool(self._models) and self.counted_bytes != self.count(device_type)


def _ddp_models() -> list[torch.nn.parallel.DistributedDataParallel]:
    return live_objects(torch.nn.parallel.DistributedDataParallel) if is_distributed() else []


def _bucket_bytes(model: torch.nn.parallel.DistributedDataParallel, device_type: str) -> int:
    ignored = model.parameters_to_ignore
    named = model.module.named_parameters()
    trained = [each for name, each in named if each.requires_grad and name not in ignored]
    if model.gradient_as_bucket_view and any(gradient_of(each) is not None for each in trained):
        return 0  # they are the gradients
    return sum(each.nbytes for each in trained if each.device.type == device_type)


def is_distributed() -> bool:
    """Whether this process has a process group."""
    return distributed.is_available() and distributed.is_initialized()


def rank_count() -> int:
    """Number of ranks of the default process group; 1 without one."""
    return distributed.get_world_size() if is_distributed() else 1


def own_rank() -> int | None:
    """Number of this process in the default process group, or None if there is none with several ranks."""
    return distributed.get_rank() if rank_count() > 1 else None


def local_count(count: int) -> int:
    """Return how many ranks share this machine: what the launcher says, or else all of them.

    Args:
        count: Number of all ranks.
    """
    for name in _LOCAL_COUNTS:
        given = os.environ.get(name, "")
        if given.isdigit() and int(given) > 0:
            return min(count, int(given))
    return count


class Ranks:
    """The ranks of a process group, as one of them sees them.

    Args:
        what: What they are about to do. Ranks that do the same thing for the same time meet.
        group: The process group. None: the default one.

    Attributes:
        number: This rank's number among all ranks, for messages.
        count: Number of ranks of the group.

    Raises:
        UsageError: `torch.distributed` has not been initialised, the group is none, or this rank is not in it.
    """

    def __init__(self, what: str, group: Any = None) -> None:
        if not is_distributed():
            raise UsageError(
                "process_group is given, and torch.distributed has no group: call init_process_group first"
            )
        if group is distributed.GroupMember.NON_GROUP_MEMBER:
            raise UsageError("this rank is not in process_group: give the group that it trains with")
        if group is not None and not isinstance(group, distributed.ProcessGroup):
            raise UsageError(f"process_group takes a torch.distributed.ProcessGroup, not {type(group).__name__}")
        here = distributed.get_rank(group)
        if here < 0:
            raise UsageError("this rank is not in process_group: give the group that it trains with")
        self.number, self.count, self._here = distributed.get_rank(), distributed.get_world_size(group), here
        name = "" if group is None else group.group_name
        session = f"pooch/{name}/{what}"
        _SESSIONS[session] += 1
        self._store, self._limit_s = _own_store(f"{session}/{_SESSIONS[session]}")

    @property
    def name(self) -> str:
        """This rank, in words."""
        return f"rank {self.number}"

    def is_first(self) -> bool:
        """Whether this is the first rank of the group."""
        return self._here == 0

    def is_first_here(self) -> bool:
        """Whether this is the first rank of its machine."""
        return os.environ.get("LOCAL_RANK", str(self._here)) == "0"

    # Failures ---------------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank has failed. The first one that fails is the one that is told of."""
        with suppress(Exception):  # the store may be gone, and its error would hide the one that matters
            self._store.compare_set("failed", "", f"{self.name} failed: {type(error).__name__}: {first_line(error)}")

    def failure(self) -> str | None:
        """Which rank has failed first, and why, in one line; None if none has."""
        try:
            return self._store.get("failed").decode() if self._store.check(["failed"]) else None
        except Exception:  # noqa: BLE001 - the process that keeps the store has ended
            return None

    # Meeting ----------------------------------------------------------------------------------------------------------

    def meet(self, where: str, patience_s: float) -> bool:
        """Wait until all ranks have come, and return whether they have.

        Args:
            where: A name, used once.
            patience_s: The longest wait.
        """
        try:
            self._store.add(f"{where}/came", 1)
            end_s = time.monotonic() + patience_s
            while self._store.add(f"{where}/came", 0) < self.count:
                if time.monotonic() > end_s or self.failure() is not None:
                    return False
                time.sleep(LOOK_EVERY_S)
        except Exception:  # noqa: BLE001 - the process that keeps the store has ended, and so has training
            return False
        return True

    def least(self, what: str, value: int) -> int:
        """Wait for the value of each rank, and return the smallest.

        Args:
            what: A name, used once.
            value: This rank's value.

        Raises:
            RankError: Another rank has failed, or has not come within the time limit of the process group.
        """
        self._store.set(f"{what}/{self._here}", str(int(value)))
        keys = [f"{what}/{rank}" for rank in range(self.count)]
        end_s = time.monotonic() + self._limit_s
        while not self._store.check(keys):
            failed = self.failure()
            if failed is not None:
                raise RankError(failed)
            if time.monotonic() > end_s:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise RankError(f"no word from rank {missing[0]}: every rank has to do this at the same time")
            time.sleep(LOOK_EVERY_S)
        return min(int(self._store.get(key)) for key in keys)

    def sum_if_last(self, what: str, value: int, count: int) -> int | None:
        """Add a value, and return the sum of all of them in the rank that comes last; None in the others.

        Nobody waits.

        Args:
            what: A name, used once.
            value: This rank's value.
            count: Number of ranks that come.
        """
        try:
            total: int = self._store.add(f"{what}/sum", value)
            return total if self._store.add(f"{what}/came", 1) == count else None
        except Exception:  # noqa: BLE001 - the process that keeps the store has ended
            return None

    @contextmanager
    def in_lockstep(self) -> Iterator[None]:
        """All ranks do what is inside, or none: where one of them fails, each of the others ends with one line.

        A rank that waits for one that has failed is in the middle of a collective. If it does not come out of that by
        itself, as it does when the other process ends, it tells why and ends its process: nothing else can end a
        collective whose partner never comes.

        Raises:
            RankError: Another rank has failed.
        """
        ended = threading.Event()
        threading.Thread(target=self._watch, args=(ended,), name="pooch-ranks", daemon=True).start()
        try:
            yield
            self.least("ended", 1)
        except RankError:
            raise
        except BaseException as error:
            other = self.failure()
            if other is not None:
                raise RankError(other) from error
            self.fail(error)
            raise
        finally:
            ended.set()

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(10 * LOOK_EVERY_S):
            failed = self.failure()
            if failed is not None and not ended.wait(GRACE_S):
                write_line(f"{failed}; this rank waits for it, and ends", f"pooch (rank {self.number})")
                os._exit(1)


def _own_store(prefix: str) -> tuple[Any, float]:
    """Return the store of the default group, over a connection of its own where there are connections, and its time
    limit in s.

    A connection serves one call at a time, and the program's may wait in one.
    """
    store: Any = distributed.distributed_c10d._get_default_store()
    limit_s = store.timeout.total_seconds()
    with suppress(RuntimeError, NotImplementedError):
        store = store.clone()
    return distributed.distributed_c10d.PrefixStore(prefix, store), limit_s
