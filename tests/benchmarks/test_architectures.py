"""The sweep over networks of others: what it concludes, what it tells, and how it trains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.architectures import outcome
from benchmarks.architectures.__main__ import FOUND, PAGE, RESULTS, in_turns, stored, trainings_of
from benchmarks.architectures.made import Table, randn
from benchmarks.architectures.network import mean_square
from benchmarks.architectures.page import in_words, page
from benchmarks.setups.counting import preloading

ROOT = Path(__file__).parents[2]


def trained(loss: list[str], peak: int, **values: list[str]) -> dict[str, Any]:
    steps = [{"ms": 2.0, "peak_bytes": peak, "live_bytes": 20} for _ in loss]
    return {"values": {"loss": loss, **values}, "steps": steps, "thread_ms": [2.0] * len(loss), "told": []}


def governed(peak: int, loss: list[str], verdict: str = "pooch: Budget held: 1") -> dict[str, Any]:
    summary = {"steps_on_plan": 3, "steps_online": 2, "steps_in_core": 1, "verdict": verdict}
    return {**trained(loss, peak, gradients=["a"]), "pooch": summary, "plain again": trained(loss[:1], 100)}


PLAIN = {**trained(["1", "2"], 100, gradients=["a"]), "size": 2, "parameters": 3, "modules": 4, "need_bytes": 60,
         "need_operator": "aten.mm.default"}  # fmt: skip


def cell(found: dict[str, Any]) -> dict[str, Any]:
    return outcome.governed_cell("auto", 0.75, 75, PLAIN, found)


def test_a_training_with_the_same_numbers_within_its_budget_is_told_as_such() -> None:
    found = cell(governed(70, ["1", "2"]))
    assert outcome.is_same(found)
    assert outcome.is_within(found)
    assert outcome.slowdown(found) == 1.0
    assert found["differences_afterwards"] == []


def test_the_first_number_that_differs_is_named() -> None:
    assert cell(governed(70, ["1", "3"]))["differences"] == ["loss (1)"]


def test_a_peak_over_the_budget_is_told_or_not() -> None:
    silent = cell(governed(80, ["1", "2"]))
    between = cell(governed(80, ["1", "2"], "pooch: Budget held: 1, but exceeded by 5 bytes between them"))
    told = cell(governed(80, ["1", "2"], "pooch: Budget exceeded by 5 bytes"))
    assert [outcome.is_told(each) for each in (silent, between, told)] == [False, True, True]
    assert not outcome.is_within(silent)


def test_the_page_counts_what_ended_what_failed_and_what_was_never_trained() -> None:
    failed = cell({"failure": "it crashed"})
    lines = [
        {"name": "a/One", "plain": outcome.plain_cell(PLAIN), "governed": [cell(governed(70, ["1", "2"])), failed]},
        {"name": "a/Two", "plain": {"failure": "it asks for a file"}, "governed": []},
    ]
    assert "2 networks were tried, 1 of which train plainly. Of their 2 trainings" in in_words(lines)
    text = page(lines, "## Found\n")
    assert "- a/One, auto 75%: it crashed" in text
    assert "- a/Two: it asks for a file" in text


def test_the_page_is_what_the_stored_lines_say() -> None:
    assert (ROOT / PAGE).read_text() == page(list(stored(ROOT / RESULTS).values()), FOUND.read_text())


def test_networks_take_turns_and_are_trained_at_both_shares_in_both_ways() -> None:
    assert in_turns([["a", "b"], ["c"]]) == ["a", "c", "b"]
    trainings = {each for number in range(20) for each in trainings_of(f"network {number}")}
    assert trainings == {(way, share) for way in ("auto", "exec") for share in (0.75, 0.5)}


def test_a_network_by_name_has_a_loss_of_all_that_can_be_trained() -> None:
    table = Table()
    table.add("torch.nn.Linear", randn(4), name="linear", in_features=4, out_features=2)
    network = table.network("linear")
    assert network.step_loss(network.batch(3)).requires_grad
    first, second = torch.ones(2, requires_grad=True), 2 * torch.ones(3, requires_grad=True)
    assert mean_square({"a": first, "b": [second, torch.ones(1)]}).item() == 5.0


CHILD = """
import json, sys, torch
from benchmarks.architectures.floor import largest_need
from benchmarks.architectures.made import Table, randn
from benchmarks.architectures.network import Network
from benchmarks.architectures.outcome import differences, peak_bytes
from benchmarks.architectures.training import train
from benchmarks.setups.counting import LiveBytes
table = Table()
table.add("torch.nn.TransformerEncoderLayer", randn(32, 32), name="it", d_model=32, nhead=4, batch_first=True)
make, counter = lambda: table.network("it"), LiveBytes()
torch.set_num_threads(1)
plain = train(make, 16, counter, steps=4)
budget = int(0.75 * peak_bytes(plain))
found = [train(make, 16, counter, steps=4, budget_bytes=budget, by_finder=way) for way in (False, True)]
network = make()
need, operator = largest_need(network, network.batch(16), counter)
assert need < peak_bytes(plain), operator
linear = Network(torch.nn.Linear(512, 512, bias=False), randn(512))
need, operator = largest_need(linear, linear.batch(8), counter)
weight, rows = 4 * 512 * 512, 4 * 8 * 512
assert weight + 2 * rows <= need <= weight + 3 * rows, (need, operator)  # the gradient of the weight
sys.stdout.write(json.dumps([[differences(plain, each), peak_bytes(each) <= budget] for each in found]))
"""


def test_a_small_training_is_the_same_within_a_budget_in_both_ways() -> None:
    environment = preloading({"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(Path.home())})
    done = subprocess.run(
        [sys.executable, "-c", CHILD], env=environment, cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [[[], True], [[], True]]
