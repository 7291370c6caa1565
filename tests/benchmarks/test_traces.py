"""Logs and instances of others are read as what they are; what is stored of them says what the docs say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import pooch
from benchmarks.traces import dtr, knapsack, minimalloc
from benchmarks.traces.dtr_log import DtrLog, Line, profile_of, read_log
from pooch.ir.consistency import check_profile
from pooch.published.policies.dtr import DynamicRematerialization

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
STORED = {module: json.loads((RESULTS / f"{module.NAME}.json").read_text()) for module in (minimalloc, dtr, knapsack)}
MB = 1_000_000


class Writer:
    """Tells a log line by line, as DTR's prototype does."""

    def __init__(self) -> None:
        self.lines: list[Line] = [{"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"}]

    def constant(self, name: str, size_bytes: int) -> None:
        self.lines += [{"INSTRUCTION": "CONSTANT", "NAME": name}, self._memory(name, size_bytes)]

    def call(self, op: str, reads: list[str], made: str, size_bytes: int, *, ms: int = 1, alias: int = -1) -> None:
        self.lines.append({"INSTRUCTION": "CALL", "NAME": op, "ARGS": reads, "RESULT": [made], "TIME": str(ms * 10**6)})
        self.lines += [
            self._memory(made, size_bytes), {"INSTRUCTION": "ALIAS", "NAME": made, "ALIAS": str(alias)}
        ]  # fmt: skip

    def tell(self, instruction: str, **fields: object) -> None:
        self.lines.append({"INSTRUCTION": instruction, **fields})

    @staticmethod
    def _memory(name: str, size_bytes: int) -> Line:
        return {"INSTRUCTION": "MEMORY", "NAME": name, "MEMORY": str(size_bytes)}


def layers(count: int) -> Writer:
    """Layers that read what the last one made; each backward op reads it again, and makes a gradient as large."""
    log = Writer()
    log.constant("w", MB)
    log.constant("x0", MB)
    for k in range(count):
        log.call("layer", [f"x{k}", "w"], f"x{k + 1}", 4 * MB, ms=2)
        log.tell("COPY", DST=f"saved{k + 1}", SRC=f"x{k + 1}")
        if k:
            log.tell("RELEASE", NAME=f"x{k}")
    log.tell("ANNOTATE", ANNOTATION="BACKWARD")
    log.call("ones", [f"x{count}"], f"g{count}", MB)
    for k in range(count, 0, -1):
        log.call("layer_grad", [f"g{k}", f"saved{k}"], f"g{k - 1}", MB, ms=3)
        log.tell("RELEASE", NAME=f"g{k}")
        log.tell("RELEASE", NAME=f"saved{k}")
    log.tell("RELEASE", NAME=f"x{count}")
    return log


def test_a_log_becomes_a_profile_with_its_bytes_and_times() -> None:
    profile = profile_of(DtrLog(layers(3).lines), "layers")
    assert check_profile(profile) is None
    assert profile.forward_ops == 3
    assert profile.persistent_bytes == 2 * MB
    assert [op.entry_bytes // MB for op in profile.ops] == [2, 6, 10, 14, 15, 15, 11, 3]
    assert profile.peak_bytes == 16 * MB
    assert profile.step_ms == 3 * 2 + 1 + 3 * 3
    assert [value.size_bytes // MB for value in profile.activations] == [4, 4, 4]
    assert [value.first_unpack for value in profile.activations] == [6, 5, 3]


def test_views_copies_and_writes_in_place_keep_count_of_names() -> None:
    log = Writer()
    log.constant("w", MB)
    log.call("make", ["w"], "a", 4 * MB)
    log.call("view", ["a"], "b", 4 * MB, alias=0)
    log.tell("RELEASE", NAME="a")
    log.tell("MUTATE", NAME="add_", ARGS=["b", "w"], MUTATE=[0], TIME="0")
    log.call("copy", ["w"], "c", 2 * MB)
    log.tell("COPY_FROM", DST="c", SRC="b")
    log.tell("RELEASE", NAME="never seen")
    log.call("max_pool2d_backward", ["c"], "d", MB)  # a forward call that was logged under this name
    log.tell("ANNOTATE", ANNOTATION="BACKWARD")
    log.call("grad", ["c"], "e", MB)
    read = DtrLog(log.lines)
    assert read.forward_calls == 5
    profile = profile_of(read, "names")
    assert check_profile(profile) is None
    # The view takes nothing; in place is a new tensor, after which the old one goes; c's own bytes go with COPY_FROM.
    assert [op.entry_bytes // MB for op in profile.ops] == [1, 5, 5, 5, 5, 6, 7]
    assert [op.peak_bytes // MB for op in profile.ops] == [5, 5, 9, 7, 6, 7, 7]
    (activation,) = profile.activations
    assert (activation.size_bytes, activation.producer, activation.first_unpack) == (4 * MB, 2, 5)


def test_where_nothing_is_annotated_the_backward_pass_begins_by_name() -> None:
    log = layers(2)
    log.lines = [line for line in log.lines if line.get("ANNOTATION") != "BACKWARD"]
    for line in log.lines:
        if line.get("NAME") == "layer_grad":
            line["NAME"] = "layer_backward"  # type: ignore[index]
    assert DtrLog(log.lines).forward_calls == 3  # `ones` is before it


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "START"),
        ([{"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"}], "backward"),
        ([{"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"}, {"INSTRUCTION": "JUMP"}], "JUMP"),
    ],
)
def test_what_is_no_log_of_a_step_is_refused(tmp_path: Path, lines: list[Line], said: str) -> None:
    path = tmp_path / "one.log"
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ValueError, match=said):
        read_log(path)


def test_a_logged_step_is_planned_and_runs_online_within_its_budget() -> None:
    profile = profile_of(DtrLog(layers(12).lines), "layers")
    budget_bytes = profile.peak_bytes * 6 // 10
    planned = dtr.planned(profile, budget_bytes, dtr.NO_TIER_BYTES, 10.0)
    assert isinstance(planned, float)
    assert 1 < planned < 1.5
    for rule in (None, DynamicRematerialization().rule):
        online = dtr.online(profile, budget_bytes, 0, rule)
        assert isinstance(online, float)
        assert planned <= online + 1e-9
    assert str(dtr.planned(profile, 7 * MB, dtr.NO_TIER_BYTES, 10.0)).startswith("needs ")


def test_an_instance_with_a_capacity_in_its_name_is_packed_up_to_it(tmp_path: Path) -> None:
    path = tmp_path / "Z.3.csv"
    path.write_text("id,lower,upper,size\n1,0,2,1\n2,1,3,1\n")
    result = minimalloc.measure(path, 1.0)
    assert (result["instance"], result["capacity_bytes"], result["published_s"]) == ("Z", 3, None)
    assert result["capacity"]["arena_bytes"] == result["smallest"]["arena_bytes"] == result["bound_bytes"] == 2


def test_a_plan_holds_where_the_public_instance_passes() -> None:
    public = knapsack.instances(0)[0]
    assert knapsack.planned_excess(public) <= 1
    profile = knapsack.profile_of(public)
    assert check_profile(profile) is None
    assert len(pooch.activation_costs(profile)) == 3


def test_stored_rows_say_what_was_measured() -> None:
    for module, document in STORED.items():
        assert module.rows_of(document["results"]) == document["rows"]
    packed = STORED[minimalloc]["results"]
    assert len(packed) == 11
    assert all(result["capacity"]["arena_bytes"] <= result["capacity_bytes"] for result in packed)
    assert all(result["plans"]["over"] == 0 for result in STORED[knapsack]["results"])
