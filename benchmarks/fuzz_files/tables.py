"""Changed files of blocks (CSV) and of devices (TOML)."""

from __future__ import annotations

import csv
import io
import json
import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any

import tomli_w

from benchmarks.fuzz_files.judging import ANSWERED, Defect, Kind, command, refusal
from benchmarks.fuzz_files.mutations import DEEP, ODD_NUMBERS, ODD_TEXTS, TWICE, change_tree, changed_bytes
from benchmarks.packing_instances import random_blocks
from pooch.devices import find_device, read_catalogue, write_device
from pooch.errors import PoochError
from pooch.packing import POLICIES, pack, verify
from pooch.packing.files import load_blocks
from pooch.report.summaries import device_model_record

BLOCKS, DEVICES = "blocks.csv", "devices.toml"


@cache
def _block_rows() -> tuple[tuple[str, ...], ...]:
    rows = [("id", "lower", "upper", "size", "alignment")]
    for index, block in enumerate(random_blocks(24, seed=3, aligned=True)):
        rows.append((f"b{index}", *map(str, (block.lower, block.upper, block.size_bytes, block.alignment_bytes))))
    return tuple(rows)


def _csv_text(rows: list[list[Any]], random: Random) -> str:
    stream = io.StringIO()
    quoting = random.choice((csv.QUOTE_MINIMAL, csv.QUOTE_MINIMAL, csv.QUOTE_ALL))
    writer = csv.writer(stream, quoting=quoting)
    writer.writerows([str(cell) for cell in row] for row in rows)
    return stream.getvalue()


def _change_rows(random: Random, rows: list[list[Any]]) -> None:
    for _ in range(random.choice((1, 1, 1, 2, 3, 6))):
        one, other = random.randrange(len(rows)), random.randrange(len(rows))
        column = random.randrange(5)
        match random.randrange(9):
            case 0:
                del rows[one]
                rows = rows or [["id"]]
                return
            case 1:
                rows.insert(other, list(rows[one]))
            case 2:
                rows[one], rows[other] = rows[other], rows[one]
            case 3:
                rows[one].insert(column, random.choice(ODD_TEXTS))
            case 4 if len(rows[one]) > column:
                del rows[one][column]
            case 5 | 6 if len(rows[one]) > column:
                near = (1, -1, 0, 3, 63, 64, 100, 10**4)
                rows[one][column] = random.choice((*ODD_NUMBERS, *near, "9" * random.choice((19, 25, 5000))))
            case 7 if len(rows[one]) > column:
                rows[one][column] = random.choice((*ODD_TEXTS, "\u0663", "1_000", " 7 ", "0x10", "1e3", "+5", "\uff11"))
            case _:
                rows[one] = random.choice(([], [""] * 5, ["x"] * 3000, rows[one] * 2))


def _write_blocks(random: Random, folder: Path) -> None:
    rows = [list(row) for row in _block_rows()]
    if random.random() < 0.3:
        content = changed_bytes(random, _csv_text(rows, Random(0)).encode())
    else:
        _change_rows(random, rows)
        content = _csv_text(rows, random).encode("utf-8", "surrogatepass")
    (folder / BLOCKS).write_bytes(content)


def _judge_blocks(random: Random, folder: Path) -> str:
    path, offsets = folder / BLOCKS, folder / "offsets.csv"
    try:
        blocks = load_blocks(path)
    except PoochError as error:
        refusal(error, path)
        return "refused"
    for policy in POLICIES:
        try:
            layout = pack(blocks, policy=policy, time_limit_s=0.02, seed=random.randrange(9))
        except PoochError as error:
            refusal(error)
            continue
        verify(blocks, layout)
    outcome = command("pack", path, "--policy", random.choice(list(POLICIES)), "--time-limit", 0.02, "-o", offsets)
    if outcome == ANSWERED and load_blocks(offsets) != blocks:
        raise Defect("the blocks that were written are not those that were read")
    return f"accepted, {outcome}"


def _untouched_blocks(folder: Path) -> None:
    (folder / BLOCKS).write_text(_csv_text([list(row) for row in _block_rows()], Random(0)))


@cache
def _catalogue() -> str:
    whole = tomllib.loads(files("pooch.devices").joinpath("catalogue.toml").read_text())
    chosen = {name: whole[name] for name in ("defaults", "V100-PCIe", "A100-SXM-80GB") if name in whole}
    rest = [name for name in whole if name not in chosen][:2]
    return tomli_w.dumps(chosen | {name: whole[name] for name in rest})


def _plain(tree: Any) -> Any:
    """What TOML can say of a tree: no null, and nesting that is not made of text."""
    if isinstance(tree, dict):
        found = {str(key).removeprefix(TWICE): _plain(each) for key, each in tree.items() if each is not None}
        return {key.encode("utf-8", "replace").decode(): each for key, each in found.items()}
    if isinstance(tree, list):
        return [_plain(each) for each in tree if each is not None]
    if isinstance(tree, str):
        return tree.encode("utf-8", "replace").decode()
    return tree


def _toml_text(random: Random, tree: dict[str, Any]) -> str:
    text = tomli_w.dumps(_plain(tree))
    while (start := text.find(f'"{DEEP}')) >= 0:
        end = text.index('"', start + 1)
        depth = int(text[start + 2 + len(DEEP) : end])
        text = text[:start] + "[" * depth + "]" * depth + text[end + 1 :]
    if random.random() < 0.1:  # a table or a key that comes twice
        lines = text.splitlines()
        lines.insert(random.randrange(len(lines)), random.choice(lines))
        text = "\n".join(lines)
    return text


def _write_devices(random: Random, folder: Path) -> None:
    if random.random() < 0.3:
        content = changed_bytes(random, _catalogue().encode())
    else:
        tree = tomllib.loads(_catalogue())
        change_tree(random, tree)
        content = _toml_text(random, tree).encode("utf-8", "replace")
    (folder / DEVICES).write_bytes(content)


def _judge_devices(random: Random, folder: Path) -> str:
    path = folder / DEVICES
    try:
        models = read_catalogue(path)
    except PoochError as error:
        refusal(error, path)
        return "refused"
    outcome = "without a question"
    for name, model in models.items():
        device, link = model.as_device({}), model.as_link()
        times = [model.op_ms(1e9, 1e6, dtype, "convolution") for dtype in ("float32", "float16", "odd")]
        times += [link.out_ms(1 << 30), link.in_ms(1 << 30)]
        if not all(0 <= time_ms < float("inf") for time_ms in times) or device.memory_bytes <= 0:
            raise Defect(f"device {name!r} takes {times} ms")
        json.dumps(device_model_record(model), allow_nan=False)
        try:
            outcome = "found" if find_device(f"{path}:{name}") == model else "another was found"
        except PoochError as error:
            refusal(error)
            outcome = "not found by its name"
        if outcome == "another was found":
            raise Defect(f"by the name {name!r} another device is found")
    copy = folder / "copy.toml"
    copy.write_bytes(path.read_bytes())
    added = next(iter(models.values()))
    write_device(added, copy)
    if read_catalogue(copy)[added.name] != added:
        raise Defect("a device that was written reads as another")
    return f"accepted, {outcome}"


def _untouched_devices(folder: Path) -> None:
    (folder / DEVICES).write_text(_catalogue())


PACKING = Kind("packing", _write_blocks, _judge_blocks, _untouched_blocks)
CATALOGUES = Kind("devices", _write_devices, _judge_devices, _untouched_devices)
