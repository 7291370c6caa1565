"""Profiles and plans as files: what is written is what is read, and every bad file is told in one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pydantic
import pytest
from hypothesis import given, settings

import pooch
from pooch.api.manual import plan_from_decisions
from pooch.devices.catalogue import read_catalogue
from pooch.errors import FileFormatError
from pooch.ir import Plan, Profile
from pooch.ir.files import FORMATS, load_document, replace_file
from pooch.packing.files import load_blocks
from tests.toys import blocks, chain, in_full, profiles


@pytest.fixture
def profile() -> Profile:
    return blocks(3)


@pytest.fixture
def plan(profile: Profile) -> Plan:
    return plan_from_decisions(profile, {profile.activations[0].id: "swap"})


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Rewrite a saved file with one thing changed."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


def failure(cls: type[Profile] | type[Plan], path: Path) -> str:
    with pytest.raises(FileFormatError) as caught:
        cls.load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


@given(profiles())
@settings(max_examples=30, deadline=None)
def test_a_profile_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, profile: Profile) -> None:
    path = tmp_path_factory.mktemp("profiles") / "p.json"
    profile.save(path)
    assert Profile.load(path) == profile
    assert load_document(path, Profile, Plan) == profile


def test_a_plan_comes_back_as_it_was_also_with_costs_that_are_no_numbers(profile: Profile, tmp_path: Path) -> None:
    plan = plan_from_decisions(profile, {})
    assert any(choice.replay_ms != choice.replay_ms for choice in plan.choices)  # nan: dropout cannot be replayed
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert in_full(loaded) == in_full(plan)
    json.loads((tmp_path / "plan.json").read_text(), parse_constant=pytest.fail)  # strict JSON: no bare NaN


def test_the_header_comes_first(profile: Profile, tmp_path: Path) -> None:
    profile.save(tmp_path / "p.json")
    assert list(json.loads((tmp_path / "p.json").read_text()))[:2] == ["format", "version"]


def test_saving_replaces_the_file_and_leaves_nothing_beside_it(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text("old")
    profile.save(path)
    assert Profile.load(path) == profile
    assert [entry.name for entry in tmp_path.iterdir()] == ["p.json"]


def test_saving_through_a_link_keeps_the_link(profile: Profile, tmp_path: Path) -> None:
    target, link = tmp_path / "real.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    profile.save(link)
    assert link.is_symlink()
    assert Profile.load(target) == profile


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.json"
    path.write_text("old")

    def disk_full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(FileFormatError, match="no space left on device"):
        replace_file(path, b"new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["p.json"]


@pytest.mark.parametrize("place", ["missing/p.json", "."])
def test_places_that_cannot_be_written_to(profile: Profile, tmp_path: Path, place: str) -> None:
    with pytest.raises(FileFormatError, match="cannot write"):
        profile.save(tmp_path / place)
    assert not list(tmp_path.iterdir())


def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path) -> None:
    """As root, a file could be renamed to /dev/null, and would then be there instead of the device."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link):
        with pytest.raises(FileFormatError, match="it is not a regular file"):
            replace_file(path, b"new")
    assert pipe.is_fifo()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link", "pipe"]


def test_a_link_that_somebody_put_beside_the_target_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    beside: list[str] = []
    real = os.open

    def plant(path: str, flags: int, *rest: int) -> int:
        if str(path).endswith(".part"):
            Path(path).symlink_to(victim)
            beside.append(Path(path).name)
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", plant)
    with pytest.raises(FileFormatError, match="cannot write"):
        replace_file(tmp_path / "plan.json", b"new")
    with pytest.raises(FileFormatError, match="cannot write"):
        replace_file(tmp_path / "plan.json", b"new")
    assert victim.read_text() == "precious"
    assert len(set(beside)) == 2, "nobody can know the name before"


def test_threads_that_write_one_file_at_once_disturb_none(tmp_path: Path) -> None:
    contents = [bytes([65 + number]) * 200_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda content: replace_file(tmp_path / "p.json", content), contents * 5))
    assert (tmp_path / "p.json").read_bytes() in contents
    assert [entry.name for entry in tmp_path.iterdir()] == ["p.json"]


def test_missing(tmp_path: Path) -> None:
    assert "does not exist" in failure(Profile, tmp_path / "none.json")


def test_unreadable(tmp_path: Path) -> None:
    assert "cannot read" in failure(Profile, tmp_path)  # a folder


def test_empty(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text("")
    assert "is empty" in failure(Profile, path)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_truncated(profile: Profile, tmp_path: Path, share: float) -> None:
    path = tmp_path / "p.json"
    profile.save(path)
    whole = path.read_bytes().rstrip()
    path.write_bytes(whole[: int(len(whole) * share)])
    message = failure(Profile, path)
    assert "is truncated" in message
    assert "pooch profile" in message


def test_truncated_wherever_it_ends(tmp_path: Path) -> None:
    text = '{"format": "pooch-profile", "a": [true, false, null, -1.5e-3, "n\\u00e9 \\"q\\""], "b": {"c": {}}}'
    path = tmp_path / "p.json"
    for length in range(1, len(text)):
        path.write_text(text[:length])
        assert "is truncated" in failure(Profile, path), text[:length]


def test_not_json(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text("hello: world\n")
    assert "is not JSON" in failure(Profile, path)


def test_a_byte_order_mark_is_no_part_of_a_profile(profile: Profile, tmp_path: Path) -> None:
    profile.save(tmp_path / "profile.json")
    (tmp_path / "marked.json").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "profile.json").read_bytes())
    assert Profile.load(tmp_path / "marked.json") == profile


def test_binary(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(b"\x80\x02}q\x00.")
    assert "binary" in failure(Profile, path)


def test_nested_beyond_all_measure(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text("[" * 200_000)
    failure(Profile, path)


@pytest.mark.parametrize("content", ["[1, 2]", "3", '{"a": 1}', '{"format": ["x"], "version": 1}'])
def test_foreign_json(tmp_path: Path, content: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(content)
    assert "not a Pooch profile or plan" in failure(Profile, path)


def test_a_plan_where_a_profile_is_wanted_and_the_other_way_round(profile: Profile, plan: Plan, tmp_path: Path) -> None:
    profile.save(tmp_path / "p.json")
    plan.save(tmp_path / "plan.json")
    assert "is a pooch-plan file" in failure(Profile, tmp_path / "plan.json")
    assert "is a pooch-profile file" in failure(Plan, tmp_path / "p.json")


def test_newer_version(profile: Profile, tmp_path: Path) -> None:
    profile.save(tmp_path / "p.json")
    path = changed(
        tmp_path / "p.json", lambda content: content.update(version=FORMATS["pooch-profile"].newest_version + 1)
    )
    message = failure(Profile, path)
    assert "newer Pooch" in message
    assert "upgrade" in message


@pytest.mark.parametrize("version", [0, -1, None, "1", True])
def test_unreadable_version(profile: Profile, tmp_path: Path, version: object) -> None:
    profile.save(tmp_path / "p.json")
    assert "version" in failure(Profile, changed(tmp_path / "p.json", lambda content: content.update(version=version)))


def test_a_version_that_is_endless_is_told_in_a_line_that_can_be_read(profile: Profile, tmp_path: Path) -> None:
    profile.save(tmp_path / "p.json")
    message = failure(Profile, changed(tmp_path / "p.json", lambda content: content.update(version=[{}] * 70_000)))
    assert "unreadable version" in message
    assert message.endswith("record it again with `pooch profile`")
    assert len(message) < 1500


def test_a_field_of_another_type(profile: Profile, tmp_path: Path) -> None:
    profile.save(tmp_path / "p.json")
    path = changed(tmp_path / "p.json", lambda content: content["ops"][3].update(time_ms="soon"))
    message = failure(Profile, path)
    assert "is damaged" in message
    assert "ops.3.time_ms" in message


def test_a_missing_field(profile: Profile, tmp_path: Path) -> None:
    profile.save(tmp_path / "p.json")
    assert "values" in failure(Profile, changed(tmp_path / "p.json", lambda content: content.pop("values")))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda c: c["ops"][2].update(index=7), "op 2 has index 7"),
        (lambda c: c["values"][1].update(id=0), "value 1 has id 0"),
        (lambda c: c["ops"][0]["reads"].append(10_000), "op 0 names a value"),
        (lambda c: c["values"][4].update(producer=10_000), "value 4 names an op"),
        (lambda c: c["values"][4].update(size_bytes=-1), "negative size"),
        (lambda c: c["values"][4].update(death=10_000), "beyond the end"),
        (lambda c: c["anchors"].reverse(), "ascending order"),
        (lambda c: c["anchors"][0].__setitem__(0, 0), "outside the backward pass"),
        (lambda c: c["anchors"][0][1].append(10_000), "an anchor names a value"),
        (lambda c: c.update(forward_ops=10_000), "forward_ops"),
        (lambda c: c.update(model_begin=5, model_end=3), "not within the forward pass"),
        (lambda c: c["link"].update(out_bytes_per_ms=0), "rate of the link"),
        (lambda c: c["ops"][1].update(entry_bytes=10**15), "at its entry"),
        (lambda c: c["ops"][1].update(time_ms="nan"), "has the time"),
        (lambda c: c["ops"][1].update(phase="backward"), "marked backward"),
        (lambda c: c.update(ops=[], values=[], anchors=[], forward_ops=0, model_end=0), "no ops"),
        (lambda c: c["values"][4].update(overwrites=4), "value 4 overwrites value 4"),
        (lambda c: c["values"][2].update(overwrites=4), "value 2 overwrites value 4"),
        (lambda c: c["values"][4].update(overwrites=1), "does not overwrite"),
        (lambda c: c["ops"][1]["writes"].clear(), "is not written by its producer"),
        (lambda c: c["ops"][4]["writes"].append(2), "whose producer is op 0"),
        (lambda c: c["ops"][1]["writes"].append(3), "writes a value twice"),
        (lambda c: c["ops"][0]["reads"].append(7), "op 0 reads value 7 before it is made"),
        (lambda c: c["ops"][2]["reads"].append(2), "op 2 reads value 2 after it was overwritten"),
        (lambda c: c["ops"][-2]["reads"].append(2), "of the backward pass lists what it reads"),
        (lambda c: c["values"][4].update(producer=-1), "op 2 writes value 4, whose producer is op -1"),
        (lambda c: c["values"][6].update(release=0), "released before it is made"),
        (lambda c: c["values"][3].update(touches=[0]), "touched before it is made"),
        (lambda c: c["values"][0].update(fixed=None, producer=-1), "dies before it is made"),
        (lambda c: c["values"][3].update(saved=False), "autograd does not save"),
        (lambda c: c["values"][3].update(first_unpack=c["forward_ops"]), "and its anchor is"),
        (lambda c: c["anchors"].pop(), "and its anchor is -1"),
        (lambda c: c["anchors"][0][1].append(c["anchors"][1][1][0]), "at two anchors"),
        (lambda c: c.update(peak_bytes=c["peak_bytes"] + 1), "the highest peak of an op"),
        (lambda c: c.update(peak_bytes=-1), "negative or too large"),
        (lambda c: c["values"][4].update(size_bytes=10**18 * 2), "too large"),
        (lambda c: [v.update(allocated_bytes=2**59) for v in c["values"]], "too large together"),
        (lambda c: c["device"].update(memory_bytes=10**30), "too large"),
        (lambda c: c["ops"][1].update(time_ms=-1), "has the time"),
        (lambda c: c["ops"][1].update(hooked_bytes=-1), "-1 more under hooks"),
        (lambda c: c["ops"][1].update(time_ms="inf"), "has the time"),
        (lambda c: c.update(step_ms="nan"), "step_ms"),
        (lambda c: c.update(time_factor=-1), "time_factor"),
        (lambda c: c["link"].update(in_bytes_per_ms="inf"), "rate of the link"),
        (lambda c: c["link"].update(in_bytes_per_ms=1e-320), "the link would take inf s"),
        (lambda c: c["link"].update(in_bytes_per_ms="nan"), "rate of the link"),
        (lambda c: c["link"].update(out_latency_ms=-1), "latencies"),
        (lambda c: c["link"].update(in_latency_ms="nan"), "latencies"),
        (lambda c: c["link"].update(in_compute_share=-0.5), "shares"),
        (lambda c: c["link"].update(ranks=0), "ranks share the link"),
        (lambda c: c["hooks"].update(op_ms="nan"), "the hooks cost"),
        (lambda c: c.update(batch_size=-3), "batch size"),
    ],
)
def test_inconsistent_profiles(
    profile: Profile, tmp_path: Path, change: Callable[[dict[str, Any]], None], told: str
) -> None:
    profile.save(tmp_path / "p.json")
    message = failure(Profile, changed(tmp_path / "p.json", change))
    assert "is inconsistent" in message
    assert told in message


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda c: c["choices"].append(c["choices"][0]), "decided on twice"),
        (lambda c: c["choices"][0].update(value=-1), "negative value"),
        (lambda c: c["schedule"]["actions"].reverse(), "ascending order of slots"),
        (lambda c: c["schedule"]["actions"][0].update(target=-4), "negative target"),
        (lambda c: c["schedule"].update(host_offsets=[]), "tier's layout"),
        (lambda c: c["schedule"].update(host_bytes=-1), "room in the tier is negative"),
        (lambda c: c["schedule"].update(host_bytes=0), "outside the tier"),
        (lambda c: c["anchors"].reverse(), "anchors"),
        (lambda c: c.update(persistent_bytes=-1), "too large"),
    ],
)
def test_inconsistent_plans(plan: Plan, tmp_path: Path, change: Callable[[dict[str, Any]], None], told: str) -> None:
    assert plan.schedule.swapped  # else half of these changes would change nothing
    plan.save(tmp_path / "plan.json")
    message = failure(Plan, changed(tmp_path / "plan.json", change))
    assert "is inconsistent" in message
    assert told in message


@pytest.mark.parametrize("text", ['"step_ms":1,', '"ops":[],'])
def test_a_key_that_comes_twice(profile: Profile, tmp_path: Path, text: str) -> None:
    profile.save(tmp_path / "p.json")
    path = tmp_path / "twice.json"
    path.write_text("{" + text + (tmp_path / "p.json").read_text().lstrip()[1:])
    assert "twice" in failure(Profile, path)


def test_a_number_of_thousands_of_digits(profile: Profile, tmp_path: Path) -> None:
    profile.save(tmp_path / "p.json")
    path = changed(tmp_path / "p.json", lambda content: content.update(batch_size="DIGITS"))
    path.write_text(path.read_text().replace('"DIGITS"', "9" * 10_000))
    assert "too large" in failure(Profile, path)


def test_a_plan_that_was_changed_says_so(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    path = changed(tmp_path / "plan.json", lambda content: content.update(budget_bytes=1 << 40))
    message = failure(Plan, path)
    assert "was changed since it was made" in message
    assert "plan_from_decisions" in message


@pytest.mark.parametrize("value", [None, "", 3])
def test_a_plan_without_its_checksum(plan: Plan, tmp_path: Path, value: object) -> None:
    plan.save(tmp_path / "plan.json")
    path = changed(tmp_path / "plan.json", lambda content: content.update(checksum=value))
    assert "was changed since it was made" in failure(Plan, path)


def test_the_layout_of_a_plan_may_change(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    content = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(content.items())), indent=4))
    assert in_full(Plan.load(path)) == in_full(plan)


def test_a_plan_of_an_older_version(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    path = changed(
        tmp_path / "plan.json", lambda content: content.update(version=FORMATS["pooch-plan"].newest_version - 1)
    )
    message = failure(Plan, path)
    assert "older Pooch" in message
    assert "pooch plan" in message


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[2].glob("profiles/*.json")), ids=lambda path: path.stem)
def test_recorded_profiles_are_consistent(path: Path) -> None:
    assert Profile.load(path).activations


def test_files_are_small_and_read_line_by_line(tmp_path: Path) -> None:
    profile = replace(chain(4), notes=("a note",))
    profile.save(tmp_path / "p.json")
    lines = (tmp_path / "p.json").read_text().splitlines()
    assert len([line for line in lines if line.startswith('{"index"')]) == len(profile.ops)


def test_the_public_names_are_these_classes() -> None:
    assert pooch.Profile is Profile
    assert pooch.Plan is Plan


READERS = {"profile": Profile.load, "blocks": load_blocks, "devices": read_catalogue}


@pytest.mark.parametrize("kind", READERS)
def test_what_never_ends_is_not_read(kind: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(FileFormatError, match="it is not a regular file"):
            READERS[kind](path)  # type: ignore[operator]


@pytest.mark.parametrize("kind", READERS)
def test_what_is_larger_than_any_such_file_is_not_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(FileFormatError, match="it is larger than any such file"):
        READERS[kind](path)  # type: ignore[operator]


@pytest.mark.parametrize("value", ["x" * 10**6, ["a note"] * 10**6])
def test_endless_texts_are_refused(value: object, profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile.save(path)
    content = json.loads(path.read_text())
    content["notes" if isinstance(value, list) else "workload"] = value
    path.write_text(json.dumps(content))
    with pytest.raises(FileFormatError, match="is too long"):
        Profile.load(path)


@pytest.mark.parametrize("name", ["notes", "splits", "expected"])
def test_a_file_with_endless_faults_is_refused_at_the_first_one(name: str, plan: Plan, tmp_path: Path) -> None:
    """Each fault would be a text of its own, which takes far more memory than what it is about."""
    plan.save(path := tmp_path / "plan.json")
    with pytest.raises(FileFormatError, match="is damaged") as caught:
        Plan.load(changed(path, lambda content: content.update({name: [{}] * 1000})))
    assert isinstance(caught.value.__cause__, pydantic.ValidationError)
    assert caught.value.__cause__.error_count() < 20


def test_an_object_with_endless_keys_is_refused_at_the_first_fault(profile: Profile, tmp_path: Path) -> None:
    profile.save(path := tmp_path / "profile.json")
    software: dict[str, object] = {f"library {number}": [] for number in range(1000)}
    with pytest.raises(FileFormatError, match="is damaged") as caught:
        Profile.load(changed(path, lambda content: content["device"].update(software=software)))
    assert isinstance(caught.value.__cause__, pydantic.ValidationError)
    assert caught.value.__cause__.error_count() < 20


def test_a_catalogue_with_endless_faults_is_refused_at_the_first_one(tmp_path: Path) -> None:
    path = tmp_path / "devices.toml"
    figures = ", ".join(f"type{number} = 'fast'" for number in range(1000))
    path.write_text(f"[card]\nmemory_gib = 1\ntflops = {{ {figures} }}\n")
    with pytest.raises(FileFormatError, match="card") as caught:
        read_catalogue(path)
    assert isinstance(caught.value.__cause__, pydantic.ValidationError)
    assert caught.value.__cause__.error_count() < 20
