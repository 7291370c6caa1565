"""Batches of a program that computes on the host, for a model on a device: "meta" stands for it, where nothing runs."""

from __future__ import annotations

from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from pooch.autopilot.carrying import Carrier
from pooch.autopilot.governed import device_named
from pooch.ground.errors import UsageError

META = torch.device("meta")
Pair = namedtuple("Pair", ["left", "right"])


def seen(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """What a model is called with on the device."""
    found: list[Any] = []

    def model(*args: Any, **kwargs: Any) -> None:
        found.append((args, kwargs))

    Carrier(META).call(model, args, kwargs)
    return found[0][0], found[0][1]


def test_tensors_in_any_nesting_are_on_the_device() -> None:
    ones = torch.ones(2)
    args, kwargs = seen(ones, [ones, {"a": ones}], Pair(ones, 3), batch=UserDict(ids=ones), mask=None)
    assert args[0].device == args[1][0].device == args[1][1]["a"].device == args[2].left.device == META
    assert (args[2].right, kwargs["mask"]) == (3, None)
    assert isinstance(kwargs["batch"], UserDict)
    assert kwargs["batch"]["ids"].device == META


def test_what_the_program_holds_stays_as_it_is() -> None:
    batch = UserDict(ids=torch.ones(2))
    seen(batch)
    assert batch["ids"].device.type == "cpu"


def test_packed_sequences_keep_their_lengths_on_the_host() -> None:
    packed = seen(pack_sequence([torch.ones(3), torch.ones(2)]))[0][0]
    assert (packed.data.device, packed.batch_sizes.device.type) == (META, "cpu")


def test_what_a_program_moves_itself_is_left_alone() -> None:
    lengths = torch.ones(2)
    args, _ = seen(torch.ones(2, device=META), lengths)
    assert args[1] is lengths


def test_single_numbers_do_not_say_where_a_batch_is() -> None:
    scale = torch.tensor(2.0)
    assert seen(scale)[0][0] is scale
    assert seen(torch.ones(2, device=META), scale)[0][1] is scale


def test_results_are_where_the_batch_was_and_gradients_pass() -> None:
    results = Carrier(torch.device("cpu")).call(lambda each: {"out": each * 2}, (torch.ones(2),), {})
    assert results["out"].tolist() == [2, 2]
    carried = Carrier(META).call(lambda: torch.ones(2, device=META), (), {})
    assert carried.device == META  # nothing has come from the host


@pytest.mark.parametrize(("name", "why"), [("nowhere", "there is no device 'nowhere'"), ("cuda:x", "no device")])
def test_a_device_that_does_not_exist_is_refused_in_one_line(name: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        device_named(name)
