"""Changed profiles and plans, and the commands that work with them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pooch
from benchmarks.fuzz_files.judging import ANSWERED, Defect, Kind, command, refusal
from benchmarks.fuzz_files.mutations import change_tree, changed_bytes, json_text
from pooch.analysis.dataflow import Dataflow
from pooch.api.manual import plan_from_decisions
from pooch.errors import PoochError
from pooch.ir import Plan, Profile, Split
from pooch.ir.files import checksum
from pooch.ir.modelled_ranks import ModelledRanks
from tests.api.altering import altered_text
from tests.toys import FAST_LINK, blocks, chain, ladder, random_profile, sharded, some_decisions

PROFILE, PLAN = "profile.json", "plan.json"
_POLICIES = ("ilp", "ilp", "ilp", "swap_all", "recompute_all", "ilp_swap", "ilp_recompute", "keep_all")


def _in_slices() -> Profile:
    split = Split(1, "loss", "cross_entropy", 4, 4, 4096, 1 << 22, 1 << 20, 2.0, 2.5)
    inner = replace(blocks(2, link=FAST_LINK), splits=(split,))
    return replace(blocks(2, link=FAST_LINK), split=inner)


@cache
def profiles() -> tuple[Profile, ...]:
    """Profiles in which every field is used by some."""
    ranks = ModelledRanks("fsdp", 4, 3, 1000, 1000, 500, 200, 0.5, 0.1, "toy link")
    return (
        blocks(3, link=FAST_LINK),
        ladder(4, size_bytes=1 << 16),
        chain(6, size_bytes=1 << 12, unsaved_between=1, gradient_bytes=64),
        blocks(2, link=FAST_LINK).with_in_flight(3),
        replace(blocks(2), ranks=ranks, notes=("a note",), accumulates=True),
        sharded(random_profile(Random(5), 12), Random(5)),
        random_profile(Random(9), 14),
        _in_slices(),
    )


@cache
def plans() -> tuple[tuple[Profile, Plan], ...]:
    """Plans with their profiles: searched for, of decisions, of both regions, with an arena."""
    made = []
    for profile in (profiles()[0], profiles()[1], profiles()[3]):
        for region, pattern in (("step", "ksr"), ("model", "sr")):
            dataflow = Dataflow(profile, region)  # type: ignore[arg-type]
            decisions = some_decisions(dataflow, pattern)
            made.append((profile, plan_from_decisions(profile, decisions, region=region)))  # type: ignore[arg-type]
    profile = profiles()[0]
    made.append((profile, pooch.plan(profile, "70%", effort="fast", region="step", explain=True)))
    made.append((profile, pooch.plan(profile, "80%", effort="fast", region="step", bound="arena", explain=False)))
    return tuple(made)


@cache
def text_of(document: int, is_plan: bool) -> str:
    """The file of one of these documents, as it is saved."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "saved.json"
        (plans()[document][1] if is_plan else profiles()[document]).save(path)
        return path.read_text()


def seal(content: dict[str, Any]) -> None:
    """Make a plan's checksum anew, so that the checks behind it are reached."""
    if "checksum" in content:
        fields = {key: value for key, value in content.items() if key not in ("format", "version", "checksum")}
        content["checksum"] = checksum(fields)


def changed(random: Random, text: str) -> bytes:
    """Return a document with changes of structure, of what it means, or of its bytes."""
    way = random.random()
    if way < 0.2:
        return changed_bytes(random, text.encode())
    if way < 0.5:
        return altered_text(random, text, sealed=random.random() < 0.9).encode()
    content = json.loads(text)
    change_tree(random, content)
    laid_out = json_text(random, content)
    if random.random() < 0.9:
        laid_out = _sealed(laid_out)
    return laid_out.encode("utf-8", "surrogatepass")


def _sealed(text: str) -> str:
    """The checksum is that of what a reader finds, not of what was meant."""
    try:
        content = json.loads(text)
        before = content.get("checksum")
        seal(content)
    except (ValueError, RecursionError, AttributeError):
        return text
    return text.replace(before, content["checksum"]) if isinstance(before, str) and before else text


def _write_profile(random: Random, folder: Path) -> None:
    (folder / PROFILE).write_bytes(changed(random, text_of(random.randrange(len(profiles())), False)))


def _judge_profile(random: Random, folder: Path) -> str:
    path, made = folder / PROFILE, folder / "made.json"
    try:
        profile = Profile.load(path)
    except PoochError as error:
        refusal(error, path)
        return "refused"
    if profile.fault() is not None:
        raise Defect(f"an accepted profile is inconsistent: {profile.fault()}")
    Profile.load(_saved_again(profile, folder))
    command("show", path, *(["--json"] if random.random() < 0.5 else ["--depth", random.randrange(1, 4)]))
    region, policy = random.choice(("model", "step")), random.choice(_POLICIES)
    options = ["--region", region, "--policy", policy, "--time-limit", 0.3]
    if policy.startswith("ilp"):
        options += ["--effort", "fast"]
    budget = random.choice(("30%", "60%", "85%", "min", "100%", 10**9))
    outcome = command("plan", path, "--budget", budget, *options, "-o", made)
    if outcome == ANSWERED:
        if command("simulate", path, made) != ANSWERED:
            raise Defect("the plan of an accepted profile cannot be simulated")
        command("show", made, "--profile", path, *(["--json"] if random.random() < 0.5 else []))
    if random.random() < 0.3:
        command("pack", path, "--policy", "sekiyama", *(["--inference"] if random.random() < 0.5 else []))
    return f"accepted, {outcome}"


def _saved_again(document: Profile | Plan, folder: Path) -> Path:
    """What was accepted can be saved, and is accepted again."""
    path = folder / "again.json"
    document.save(path)
    return path


def _write_plan(random: Random, folder: Path) -> None:
    chosen = random.randrange(len(plans()))
    (folder / PLAN).write_bytes(changed(random, text_of(chosen, True)))
    plans()[chosen][0].save(folder / PROFILE)


def _judge_plan(random: Random, folder: Path) -> str:
    path, profile = folder / PLAN, folder / PROFILE
    try:
        plan = Plan.load(path)
    except PoochError as error:
        refusal(error, path)
        return "refused"
    if plan.fault() is not None:
        raise Defect(f"an accepted plan cannot be executed: {plan.fault()}")
    Plan.load(_saved_again(plan, folder))
    command("show", path, *random.choice(([], ["--json"], ["--all"], ["--reasons"], ["--profile", profile])))
    outcome = command("simulate", profile, path)
    if random.random() < 0.3:
        command("pack", path, "--profile", profile, "--policy", "sekiyama")
    return f"accepted, {outcome}"


def _untouched_profile(folder: Path) -> None:
    (folder / PROFILE).write_text(text_of(0, False))


def _untouched_plan(folder: Path) -> None:
    (folder / PLAN).write_text(text_of(6, True))
    plans()[6][0].save(folder / PROFILE)


PROFILES = Kind("profile", _write_profile, _judge_profile, _untouched_profile)
PLANS = Kind("plan", _write_plan, _judge_plan, _untouched_plan)
