"""Processes of ranks, each forked from one that has imported what ranks need and has done nothing else.

Starting Python and importing PyTorch, its compiler (FSDP does) and Pooch takes a rank five seconds, and a test has two
to four ranks. What a rank is given has to be importable, as for any process that is started anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch._dynamo
import torch.distributed.fsdp
from torch import multiprocessing

import pooch
from pooch.ground.live_objects import freeze_known

# Pooch loads what it needs on first use; a rank that had to would do so beside the other one.
_LOADED = (torch._dynamo, torch.distributed.fsdp, pooch.profile, pooch.plan, pooch.apply, pooch.auto, pooch.guard)


def run_ranks(work: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> None:
    """Run `work(rank, *arguments)` in processes of their own; what one of them raises is raised here."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    given = (work, arguments, dict(os.environ))
    multiprocessing.start_processes(_begun, given, nprocs=ranks, start_method="forkserver")  # type: ignore[no-untyped-call]


def _begun(rank: int, work: Callable[..., None], arguments: tuple[Any, ...], environment: dict[str, str]) -> None:
    os.environ.clear()  # the process that this one was forked from was started by an earlier test
    os.environ.update(environment)
    freeze_known()  # what was imported is nobody's garbage
    work(rank, *arguments)
