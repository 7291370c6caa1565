"""Changes files as people, editors and disks do: numbers, entries, kinds, references, keys, the end of the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from pooch.ir.files import checksum

ODD_NUMBERS = (
    0,
    -1,
    1,
    7,
    0.5,
    2**31,
    2**62,
    10**18,
    10**30,
    -(10**30),
    1e308,
    float("nan"),
    float("inf"),
    -float("inf"),
)
WORDS = (
    "copy_out", "free", "empty", "refill", "copy_in", "wait", "replay", "drop", "keep", "swap", "recompute", "model",
    "step", "forward", "backward", "made", "parameter", "transient", "cuda", "", "nan", "\u0000", "x" * 10_000,
)  # fmt: skip
# What is executed and what is counted with is changed more often than what is for people.
OFTEN = {"schedule", "expected", "anchors", "first_slot", "ops", "values", "link"}


def altered_text(random: Random, text: str, *, sealed: bool) -> str:
    """The text of a saved profile or plan with one thing changed, or a few.

    Args:
        sealed: a plan's checksum is made again, so that the change is seen by what it does alone.
    """
    if random.random() < 0.05:
        return _broken_text(random, text)
    content = json.loads(text)
    known = [change for key, change in _KNOWN if key in content]
    times = random.choice([1, 1, 1, 2, 3])
    on_purpose = sum(random.random() < 0.4 for _ in range(times))
    for _ in range(on_purpose):  # first, as these need the file's structure
        random.choice(known)(random, content)
    for _ in range(times - on_purpose):
        _alter_anything(random, content)
    if sealed and "checksum" in content:
        fields = {key: value for key, value in content.items() if key not in ("format", "version", "checksum")}
        content["checksum"] = checksum(fields)
    return json.dumps(content)


def _broken_text(random: Random, text: str) -> str:
    place = random.randrange(1, len(text))
    if random.random() < 0.3:
        return text[:place]
    if random.random() < 0.5:
        return text[:place] + random.choice('{}[],:"0a\n') + text[place + 1 :]
    key = random.choice(['"format": "pooch-plan"', '"forward_ops": 3', '"schedule": null', '"ops": []'])
    return "{" + key + "," + text.lstrip()[1:] if random.random() < 0.5 else text.rstrip()[:-1] + "," + key + "}"


def _alter_anything(random: Random, content: dict[str, Any]) -> None:
    fields = [key for key in content if key not in ("format", "version", "checksum")]
    field = random.choices(fields, [8 if key in OFTEN else 1 for key in fields])[0]
    _descend(random, content, field)


def _descend(random: Random, holder: Any, key: Any) -> None:
    """Walk down by chance and change something there."""
    here = holder[key]
    if isinstance(here, dict) and here and random.random() < 0.95:
        _descend(random, here, random.choice(list(here)))
    elif isinstance(here, list) and here and random.random() < 0.75:
        _descend(random, here, random.randrange(len(here)))
    elif isinstance(here, dict):
        holder[key] = (
            random.choice([None, 3, "text", []]) if random.random() < 0.5 or not here else _without(random, here)
        )
    elif isinstance(here, list):
        _alter_list(random, holder, key)
    else:
        holder[key] = _other(random, here)


def _without(random: Random, entries: dict[str, Any]) -> dict[str, Any]:
    lost = random.choice(list(entries))
    return {key: value for key, value in entries.items() if key != lost}


def _alter_list(random: Random, holder: Any, key: Any) -> None:
    entries = holder[key]
    if not entries:
        entries.append(random.choice([0, 1, 5, "text", []]))
        return
    one, other = random.randrange(len(entries)), random.randrange(len(entries))
    change = random.choice(["swap", "delete", "duplicate", "reverse", "copy", "clear", "type"])
    if change == "swap":
        entries[one], entries[other] = entries[other], entries[one]
    elif change == "delete":
        del entries[one]
    elif change == "duplicate":
        entries.insert(other, entries[one])
    elif change == "reverse":
        entries.reverse()
    elif change == "copy":
        entries[one] = entries[other]
    elif change == "clear":
        entries.clear()
    else:
        holder[key] = random.choice([None, 3, "text", {}, {"a": 1}])


def _other(random: Random, value: Any) -> Any:
    if random.random() < 0.1:
        return random.choice([None, "text", [], {}, True, 3])
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        near = [value + 1, value - 1, value * 2, value + random.randint(-9, 9), random.randint(0, 40), -value]
        return random.choice([*near, *near, random.choice(ODD_NUMBERS)])
    if isinstance(value, float):
        return random.choice([value * 2, value * 1e-6, value + 1, -value, random.choice(ODD_NUMBERS)])
    return random.choice(WORDS)


def _exchange_writes(random: Random, content: dict[str, Any]) -> None:
    """Two ops of one fingerprint, where there are any, make each other's values."""
    ops = content["expected"]
    one = random.choice(ops)
    alike = [op for op in ops if op["fingerprint"] == one["fingerprint"] and op is not one]
    other = random.choice(alike or ops)
    one["writes"], other["writes"] = other["writes"], one["writes"]


def _exchange_values(random: Random, content: dict[str, Any]) -> None:
    """Everywhere in the schedule, one value stands for another."""
    values = [choice["value"] for choice in content["choices"]]
    one, other = random.choice(values), random.choice(values)
    names = {one: other, other: one}
    schedule = content["schedule"]
    for action in schedule["actions"]:
        if action["kind"] != "replay":
            action["target"] = names.get(action["target"], action["target"])
    for key in ("sources", "swapped", "recomputed"):
        schedule[key] = [names.get(value, value) for value in schedule[key]]
    schedule["host_offsets"] = [[names.get(value, value), offset] for value, offset in schedule["host_offsets"]]
    if random.random() < 0.7:
        chosen = {choice["value"]: choice for choice in content["choices"]}
        chosen[one]["choice"], chosen[other]["choice"] = chosen[other]["choice"], chosen[one]["choice"]


def _share_a_room(random: Random, content: dict[str, Any]) -> None:
    rooms = content["schedule"]["host_offsets"]
    if rooms:
        random.choice(rooms)[1] = random.choice(rooms)[1] + random.choice([0, 0, 4096, -4096, 1, 8])


def _move_an_action(random: Random, content: dict[str, Any]) -> None:
    actions = content["schedule"]["actions"]
    if actions:
        random.choice(actions)["slot"] = random.choice(actions)["slot"] + random.choice([0, 0, 1, -1])
        if random.random() < 0.8:
            actions.sort(key=lambda action: action["slot"])


def _exchange_targets(random: Random, content: dict[str, Any]) -> None:
    actions = content["schedule"]["actions"]
    if actions:
        one = random.choice(actions)
        other = random.choice([action for action in actions if action["kind"] == one["kind"]])
        key = random.choice(["target", "slot", "outputs", "in_place", "kind"])
        one[key], other[key] = other[key], one[key]


def _lose_an_action(random: Random, content: dict[str, Any]) -> None:
    actions = content["schedule"]["actions"]
    if actions:
        del actions[random.randrange(len(actions))]


def _shift_slots(random: Random, content: dict[str, Any]) -> None:
    by = random.choice([1, -1, 2])
    content["first_slot"] += by
    if random.random() < 0.5:
        for action in content["schedule"]["actions"]:
            action["slot"] += by
    if random.random() < 0.5:
        for anchor in content["anchors"]:
            anchor[0] += by


def _hold_another(random: Random, content: dict[str, Any]) -> None:
    """Another value is held for replays, or written over by one."""
    written = [value for op in content["expected"] for value in op["writes"]]
    schedule = content["schedule"]
    replays = [action for action in schedule["actions"] if action["kind"] == "replay"]
    if replays and random.random() < 0.5:
        random.choice(replays)[random.choice(["in_place", "outputs"])] = [random.choice(written)]
    elif schedule["sources"]:
        old, new = random.choice(schedule["sources"]), random.choice(written)
        schedule["sources"] = [new if value == old else value for value in schedule["sources"]]
        for action in schedule["actions"]:
            if action["kind"] == "drop" and action["target"] == old:
                action["target"] = new


def _overwrite_oneself(random: Random, content: dict[str, Any]) -> None:
    value = random.choice(content["values"])
    value["overwrites"] = random.choice([value["id"], random.randrange(len(content["values"]))])


def _change_a_life(random: Random, content: dict[str, Any]) -> None:
    value, end = random.choice(content["values"]), len(content["ops"])
    key = random.choice(["producer", "release", "death", "first_unpack", "overwritten_at", "touches"])
    value[key] = random.choice([None, [random.randrange(end)]]) if key == "touches" else random.randint(-1, end)


def _decide_on_another(random: Random, content: dict[str, Any]) -> None:
    value = random.choice(content["values"])
    value["fixed"] = None if value["fixed"] else "because"
    value["saved"] = value["saved"] or random.random() < 0.5


def _change_what_is_read(random: Random, content: dict[str, Any]) -> None:
    op = random.choice(content["ops"][: content["forward_ops"]] or content["ops"])
    key = random.choice(["reads", "reads", "writes", "refusal", "random", "fingerprint"])
    if key in ("reads", "writes"):
        op[key] = random.sample(range(len(content["values"])), k=min(len(content["values"]), random.randint(0, 2)))
    else:
        op[key] = random.choice(content["ops"])[key]


_KNOWN: list[tuple[str, Callable[[Random, dict[str, Any]], None]]] = [
    ("schedule", _exchange_writes),
    ("schedule", _exchange_values),
    ("schedule", _share_a_room),
    ("schedule", _move_an_action),
    ("schedule", _exchange_targets),
    ("schedule", _lose_an_action),
    ("schedule", _shift_slots),
    ("schedule", _hold_another),
    ("values", _overwrite_oneself),
    ("values", _change_a_life),
    ("values", _decide_on_another),
    ("values", _change_what_is_read),
]
