"""Changed directories of kept plans: files in them, their notes, and what stands in the place of a file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from random import Random

from benchmarks.fuzz_files.documents import changed, plans
from benchmarks.fuzz_files.judging import Defect, Kind
from benchmarks.fuzz_files.mutations import change_tree, changed_bytes, json_text
from pooch.api.simulation import simulate
from pooch.autopilot.cache import NOTE, PLAN, PROFILE, Cached, PlanCache, Purpose
from pooch.autopilot.signature import StepKey
from pooch.errors import PoochError
from pooch.executor.table import ActionTable

PURPOSE = Purpose("a model, a budget")
KEY, OTHER = StepKey((("float32", 2),), (8, 4)), StepKey((("float32", 2),), (9, 4))
_SAVED: dict[int, dict[str, bytes]] = {}


def _fill(directory: Path, chosen: int) -> Path:
    """Keep a plan, and another one beside it; the files are made once. Returns the folder of the first."""
    other = (chosen + 1) % len(plans())
    for key, which in ((KEY, chosen), (OTHER, other)):
        cache = PlanCache(directory, PURPOSE)
        folder = cache._folder(cache._name(key))
        if which not in _SAVED or key is OTHER:
            cache.keep(key, Cached(*plans()[which], is_recorded=True))
            if key is KEY:
                _SAVED[which] = {path.name: path.read_bytes() for path in folder.iterdir()}
            continue
        folder.mkdir(mode=0o700)
        for name, content in _SAVED[which].items():
            (folder / name).write_bytes(content)
    cache = PlanCache(directory, PURPOSE)
    return cache._folder(cache._name(KEY))


def _write(random: Random, folder: Path) -> None:
    (folder / "secret").write_text("precious")
    mine = _fill(folder / "plans", random.randrange(len(plans())))
    others = [path for path in mine.parent.iterdir() if path != mine]
    for _ in range(random.choice((1, 1, 2, 3))):
        _change(random, mine, others[0])
    if random.random() < 0.7 and mine.is_dir() and not mine.is_symlink():
        _note_anew(mine)


def _change(random: Random, mine: Path, other: Path) -> None:
    if mine.is_symlink() or not mine.is_dir():
        return
    path = mine / random.choice((PROFILE, PLAN, NOTE))
    _make_way(path)
    here = path.read_bytes() if path.is_file() and path.stat().st_size else b"{}"
    match random.randrange(10):
        case 0 | 1 | 2 | 3 if path.name != NOTE and len(here) > 2:
            path.write_bytes(changed(random, here.decode("utf-8", "replace")) if _is_json(here) else here)
        case 4 if path.name == NOTE and _is_json(here):
            note = json.loads(here)
            change_tree(random, note)
            path.write_bytes(json_text(random, note).encode("utf-8", "surrogatepass"))
        case 5:
            path.write_bytes(changed_bytes(random, here))
        case 6:
            if (other / path.name).is_file():
                path.write_bytes((other / path.name).read_bytes())
        case 7:
            _make_way(path, also_files=True)
            # Links lead to files of the case alone, since what follows one writes over what it leads to.
            target = random.choice(("../../../canary", "../../secret", path.name, "nowhere"))
            random.choice((path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to(target), lambda: None))()
        case 8:
            mine.chmod(random.choice((0o777, 0o770, 0o700, 0o755)))
        case _:
            shutil.rmtree(mine)
            if other.is_dir():
                random.choice((lambda: other.rename(mine), lambda: mine.symlink_to(other), mine.touch))()


def _make_way(path: Path, *, also_files: bool = False) -> None:
    """Take away what an earlier change has put in the place of a file: this process must not wait at a pipe."""
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    elif path.is_symlink() or path.is_fifo() or (also_files and path.exists()):
        path.unlink()


def _is_json(content: bytes) -> bool:
    try:
        return isinstance(json.loads(content), dict)
    except (ValueError, RecursionError):
        return False


def _note_anew(mine: Path) -> None:
    """The note says what the files hold now, so that the checks behind it are reached."""
    note = mine / NOTE
    if not note.is_file() or note.is_symlink() or not _is_json(note.read_bytes()):
        return
    told = json.loads(note.read_bytes())
    for field, name in (("profile", PROFILE), ("plan", PLAN)):
        path = mine / name
        if path.is_file() and not path.is_symlink() and told.get(field) is not None:
            told[field] = hashlib.sha256(path.read_bytes()).hexdigest()
    note.write_text(json.dumps(told))


def _judge(random: Random, folder: Path) -> str:
    cache, secret = PlanCache(folder / "plans", PURPOSE), folder / "secret"
    cache.told_of_others()
    found = cache.find(KEY)
    if found is None:
        outcome = "refused"
    else:
        outcome = "accepted"
        if found.profile.fault() is not None or (found.plan is not None and found.plan.fault() is not None):
            raise Defect("it has found a profile or plan that is none")
        if found.plan is not None:
            ActionTable.of(found.plan)
            try:
                simulate(found.profile, found.plan)
            except PoochError as error:
                outcome = f"accepted, {type(error).__name__}"
    cache.keep(KEY, Cached(*plans()[0], is_recorded=True))
    again = cache.find(KEY)
    if again is not None and found is not None and repr(again) != repr(Cached(*plans()[0], is_recorded=True)):
        raise Defect("what was kept is not what is found")
    if secret.read_text() != "precious":
        raise Defect("it has written over a file that a link leads to")
    return outcome


def _untouched(folder: Path) -> None:
    (folder / "secret").write_text("precious")
    _fill(folder / "plans", 0)


CACHES = Kind("cache", _write, _judge, _untouched)
