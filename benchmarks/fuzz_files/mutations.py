"""Changes by chance: of trees of fields and records, and of bytes."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from random import Random
from typing import Any

ODD_NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2, 7, 0.5, -0.0, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**60, 2**62, 2**63 - 1, 2**63, 10**30, -(10**30),
    -(2**63), 1e-320, 1e308, -1e308, float("nan"), float("inf"), -float("inf"), True, "12", "nan", "1e5",
)  # fmt: skip
ODD_TEXTS = (
    "", " ", "nan", "null", "\x00", "\x1b]0;owned\x07", "\u202etext", "line\nline\r\nline", "\ud800", "\U0001f600",
    "../../../etc/passwd", "/etc/passwd", "a/b:c", "${HOME}", "%s%n{0}", "<script>alert(1)</script>", "=1+1", "'\";--",
    "__class__", "None", "x" * 70_000, "\u0301" * 300, "e\u0301", "one of 4 modelled ranks, fsdp: x",
)  # fmt: skip
_OF_OTHER_TYPES: tuple[Any, ...] = (None, True, 3, -7, 0.5, "text", [], {}, [[]], {"a": 1}, [None], ["text"])
DEEP, TWICE = "@deep:", "@twice:"  # what JSON has and a tree has not: put into the text afterwards


def chosen_places(random: Random, tree: Any) -> tuple[Any, Any]:
    """Return a container somewhere in a tree and a key of it, deep places as likely as those near the top.

    Args:
        random: Decides.
        tree: A container that is not empty.
    """
    holder, key = tree, _some_key(random, tree)
    while isinstance(holder[key], dict | list) and holder[key] and random.random() < 0.85:
        holder = holder[key]
        key = _some_key(random, holder)
    return holder, key


def _some_key(random: Random, holder: Any) -> Any:
    return random.choice(list(holder)) if isinstance(holder, dict) else random.randrange(len(holder))


def change_tree(random: Random, tree: Any) -> None:
    """Change one to four things in a tree of dicts and lists.

    Args:
        random: Decides.
        tree: What JSON or TOML gives; changed in place.
    """
    for _ in range(random.choice((1, 1, 1, 2, 2, 4))):
        if tree:
            random.choice(_CHANGES)(random, *chosen_places(random, tree))


def _drop(random: Random, holder: Any, key: Any) -> None:
    del holder[key]


def _duplicate(random: Random, holder: Any, key: Any) -> None:
    """A record comes again, here or elsewhere; a field comes twice, as no dict can have it."""
    if isinstance(holder, list):
        holder.insert(random.randrange(len(holder) + 1), holder[key])
    else:
        holder[TWICE + str(key)] = random.choice((holder[key], *_OF_OTHER_TYPES))


def _retype(random: Random, holder: Any, key: Any) -> None:
    here = holder[key]
    around: list[Any] = [[here], {"a": here}, str(here)[:100], *_OF_OTHER_TYPES]
    holder[key] = random.choice(around)


def _odd_number(random: Random, holder: Any, key: Any) -> None:
    holder[key] = random.choice(ODD_NUMBERS)


def _near(random: Random, holder: Any, key: Any) -> None:
    """Another number that could be meant: a neighbour, an id or slot of something else."""
    here = holder[key]
    if isinstance(here, bool) or not isinstance(here, int | float):
        _swap(random, holder, key)
        return
    holder[key] = random.choice((here + 1, here - 1, -here, here * 2, random.randrange(-2, 60)))


def _refer_to_itself(random: Random, holder: Any, key: Any) -> None:
    """Some number of a record becomes the record's own, so that references may form a cycle."""
    record = holder[key]
    if isinstance(record, dict) and isinstance(holder, list):
        numbers = [name for name, field in record.items() if type(field) is int and name not in ("id", "index")]
        if numbers:
            record[random.choice(numbers)] = key
            return
    _near(random, holder, key)


def _nest(random: Random, holder: Any, key: Any) -> None:
    depth = random.choice((3, 60, 300, 700, 900, 970, 1000, 1100, 3000, 100_000))
    holder[key] = f"{DEEP}{random.choice('[{')}{depth}"


def _enormous(random: Random, holder: Any, key: Any) -> None:
    here, count = holder[key], random.choice((70_000, 300_000))
    if len(json.dumps(here)) > _MOST_TEXT:
        return  # an earlier change has made it so: its square would take all memory of the machine
    if isinstance(here, list) and here:
        again = random.choice(here)
        copies = (copy.deepcopy(again) for _ in range(random.choice((1000, 20_000))))
        holder[key] = [*here, *copies]  # each its own: a later change of one must not change all
    elif isinstance(here, str):
        holder[key] = (here or "x") * max(1, count // max(1, len(here)))
    else:
        holder[key] = [copy.copy(each) for each in random.choice((["a"], [0], [[]], [{}], [None])) * count]


_MOST_TEXT = 100_000  # characters of what is multiplied


def _odd_text(random: Random, holder: Any, key: Any) -> None:
    holder[key] = random.choice(ODD_TEXTS)


def _odd_key(random: Random, holder: Any, key: Any) -> None:
    if isinstance(holder, dict):
        name = random.choice((*ODD_TEXTS, str(key).upper(), f"{key} "))
        holder[name] = holder.pop(key) if random.random() < 0.5 else holder[key]


def _swap(random: Random, holder: Any, key: Any) -> None:
    other = _some_key(random, holder)
    holder[key], holder[other] = holder[other], holder[key]


def _reorder(random: Random, holder: Any, key: Any) -> None:
    if isinstance(holder, list):
        random.choice((holder.reverse, lambda: random.shuffle(holder)))()
    else:
        _swap(random, holder, key)


def _empty(random: Random, holder: Any, key: Any) -> None:
    here = holder[key]
    holder[key] = type(here)() if isinstance(here, dict | list | str) else 0


_CHANGES: tuple[Callable[[Random, Any, Any], None], ...] = (
    _drop, _duplicate, _retype, _odd_number, _odd_number, _near, _near, _near, _refer_to_itself, _nest, _enormous,
    _odd_text, _odd_text, _odd_key, _swap, _reorder, _empty,
)  # fmt: skip


def json_text(random: Random, tree: Any) -> str:
    """Return a tree as JSON, with keys that come twice and nesting that is deeper than Python can make.

    Args:
        random: Decides how it is laid out.
        tree: The tree.
    """
    text = json.dumps(tree, ensure_ascii=random.random() < 0.5, indent=random.choice((None, None, 1)))
    text = _DEEP.sub(_nested, text, count=8)
    return text.replace(f'"{TWICE}', '"')


# A later change may have made a long text of it, or another number.
_DEEP = re.compile(rf'"{DEEP}([\[{{])(\d{{1,6}})"')


def _nested(found: re.Match[str]) -> str:
    depth = int(found[2])
    return "[" * depth + "]" * depth if found[1] == "[" else '{"a":' * depth + "0" + "}" * depth


def changed_bytes(random: Random, content: bytes) -> bytes:
    """Return bytes as disks, transfers and editors change them.

    Args:
        random: Decides.
        content: What was there.
    """
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 2, 5, 20))):
        place, length = random.randrange(len(changed) + 1), random.choice((1, 1, 3, 16, 200))
        match random.randrange(8):
            case 0:
                del changed[place:]
            case 1 | 2 if place < len(changed):
                changed[place] ^= 1 << random.randrange(8)
            case 3 if place < len(changed):
                changed[place] = random.randrange(256)
            case 4:
                changed[place:place] = random.randbytes(length)
            case 5:
                del changed[place : place + length]
            case 6:
                changed[place:place] = changed[place : place + length]
            case _:
                changed[place : place + length] = bytes(length)
    if random.random() < 0.03:
        return random.choice((b"", b"\xef\xbb\xbf" + content, b"\xff\xfe" + content, content * 2, b"\n" * 100_000))
    return bytes(changed)
