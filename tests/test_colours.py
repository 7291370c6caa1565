"""One map of colours, whose bars and lines stand out from what they are drawn on."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import pytest

from pooch import report
from pooch.ground import colours

BARS = {**colours.CHOICES, **{f"kind {name}": colour for name, colour in colours.KINDS.items()}}
LINES = ("planned", "in-core", "budget", "bound")


def luminance(colour: str) -> float:
    """The relative luminance of WCAG 2.2."""
    shares = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return sum(weight * share for weight, share in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted(map(luminance, (one, other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_the_ratio_is_that_of_the_standard() -> None:
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21)
    assert contrast("#777777", "#FFFFFF") == pytest.approx(4.48, abs=0.01)  # the known example of what just fails 4.5


@pytest.mark.parametrize("scheme", [colours.LIGHT, colours.DARK], ids=["light", "dark"])
@pytest.mark.parametrize("ground", ["paper", "panel"])
def test_bars_and_lines_stand_out_from_the_page_and_text_can_be_read(scheme: dict[str, str], ground: str) -> None:
    shown = BARS | {name: scheme[name] for name in LINES}
    assert not [name for name, colour in shown.items() if contrast(colour, scheme[ground]) < 3]
    for name in ("ink", "quiet", "warning"):
        assert contrast(scheme[name], scheme[ground]) >= 4.5, name


def test_choices_differ_without_colour() -> None:
    assert colours.CHOICES.keys() == colours.HATCHES.keys() == colours.LETTERS.keys()
    assert colours.KINDS.keys() == colours.KIND_HATCHES.keys()
    for told in (colours.CHOICES, colours.HATCHES, colours.LETTERS, colours.KINDS):
        assert len(set(told.values())) == len(told)
    on_compute = [colours.KIND_HATCHES[kind] for kind in ("op", "replay", "stall")]
    assert all(one != other for one, other in combinations(on_compute, 2))


def test_reports_and_notebooks_have_no_colours_of_their_own() -> None:
    folders = [Path(report.__file__).parent, Path(__file__).parents[1] / "notebooks"]
    endings = (".py", ".js", ".css", ".ipynb")
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in endings]
    assert len(files) > 20
    own = {path.name: re.findall(r"[\"']#[0-9a-fA-F]{6}\b|: #[0-9a-fA-F]{6}\b", path.read_text()) for path in files}
    assert not {name: found for name, found in own.items() if found}
