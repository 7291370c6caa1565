"""README.md and the pages in docs/ say what the stored results say, and nothing measured that is not stored."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.pages import PAGES, RESULTS, filled, stored_in, up_to_date
from benchmarks.sentences import first_number, main_job_times, page_faults
from benchmarks.tables import results_page
from tests.benchmarks.test_samples import main_job_result, samples_of

ROOT = Path(__file__).parents[2]
STORED = stored_in(ROOT / RESULTS)
WITH_TABLES = sorted(
    path.name for path in (ROOT / RESULTS).glob("*.json") if "rows" in json.loads(path.read_text())
)  # fmt: skip
MEASURED = re.compile(r"\d[\d,.]*\d?\s?(?:GiB|MiB|KiB|us|ms|s|min|%|page faults|times)(?![\w/])")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_figures_of_the_stored_results(page: str) -> None:
    text = (ROOT / page).read_text()
    assert text == up_to_date(text, page, STORED), f"{page} is not what `python -m benchmarks.pages` makes of it"


@pytest.mark.parametrize("page", PAGES)
def test_a_figure_that_was_edited_by_hand_is_noticed_in_every_part_of_a_page(page: str) -> None:
    text = (ROOT / page).read_text()
    for name in PAGES[page]:
        before, begin, after = text.partition(f"<!-- {name}: begin -->")
        part, end, rest = after.partition(f"<!-- {name}: end -->")
        sign = r"\d" if re.search(r"\d", part) else "[a-z]"  # a part may have no figures
        changed = re.sub(sign, lambda found: str(9 - int(found[0])) if found[0].isdigit() else "#", part, count=1)
        edited = before + begin + changed + end + rest
        assert edited != text
        assert up_to_date(edited, page, STORED) != edited, name


@pytest.mark.parametrize("name", WITH_TABLES)
def test_the_file_of_a_table_is_what_its_results_say(name: str) -> None:
    path = ROOT / RESULTS / name
    assert path.with_suffix(".md").read_text() == results_page(json.loads(path.read_text()))


@pytest.mark.parametrize(("page", "least"), [("README.md", 15), ("docs/measurements.md", 100)])
def test_a_page_tells_no_measured_figure_outside_of_what_is_made_from_results(page: str, least: int) -> None:
    told = (ROOT / page).read_text()
    assert len(MEASURED.findall(told)) > least
    for name in PAGES[page]:
        told = filled(told, name, "")
    told = re.sub(r"```.*?```|`[^`]*`", "", told, flags=re.DOTALL)  # budgets in examples are nobody's measurement
    assert [figure for figure in MEASURED.findall(told) if figure != "60%"] == []


@pytest.mark.parametrize("page", PAGES)
def test_marks_do_not_break_a_paragraph_or_a_list(page: str) -> None:
    text = (ROOT / page).read_text()
    for name in PAGES[page]:
        place = re.search(rf"^(.*)<!-- {re.escape(name)}: begin -->(.?)", text, re.MULTILINE)
        assert place is not None
        stands_alone = place[2] == ""
        assert bool(place[1].strip()) != stands_alone, f"{page}: a comment that begins a line of text hides that line"


def test_marks_that_are_missing_or_there_twice_are_refused() -> None:
    once = "<!-- one: begin -->old<!-- one: end -->"
    assert filled(f"a {once} b", "one", "new") == "a <!-- one: begin -->new<!-- one: end --> b"
    for text in ("no marks", once + once):
        with pytest.raises(ValueError, match="'one'"):
            filled(text, "one", "new")


def test_what_the_page_claims_in_words_is_what_is_stored() -> None:
    readme = (ROOT / "docs" / "measurements.md").read_text()
    assert "none fails" in readme
    fails = re.findall(r"^\| float\d+ \| .* \| (\d+) \|$", (ROOT / RESULTS / "operators-cpu.md").read_text(), re.M)
    assert fails == ["0", "0"]
    assert "1,000 steps" in readme
    assert STORED("soak-cpu")["title"] == "1000 planned steps that swap and recompute: nothing grew"
    assert "10,000 activations" in readme
    assert round(first_number(STORED("planner-growth")["rows"][-1]["activations"]), -3) == 10_000
    steps = {result["steps"] for result in STORED("main-job-cpu")["results"]}
    assert "three steps with the optimizer each" in readme
    assert "Three training steps" in (ROOT / "README.md").read_text()
    assert steps == {3}
    assert all(row["same bits"] == "yes" and row["within"] == "yes" for row in STORED("main-job-cpu")["rows"])


def with_faults(plain: int, planned: int, **changes: object) -> dict[str, object]:
    """Twelve turns of samples, whose planned steps take 7 s and whose plain ones take 8 s."""
    samples = samples_of(plain=[8000.0] * 12, planned=[7000.0] * 12)
    for sample in samples:
        faults = plain if sample["kind"] == "plain" else planned
        sample |= {"minor_faults": faults, "system_s": faults / 200_000, "user_s": 12.0, **changes}
    return {**main_job_result(), "workload": "gpt2", "samples": samples}


def test_page_faults_are_told_with_their_figures_where_the_samples_show_them() -> None:
    (sentence,) = page_faults([with_faults(760_000, 120_000)])
    assert sentence == (
        "gpt2 is faster under its plan at 60%: such a step has 120,000 (120,000-120,000) minor page faults instead of "
        "760,000 (760,000-760,000), and takes 0.60 s (0.60-0.60) of system time instead of 3.80 s (3.80-3.80); its "
        "user time is 12.00 s (12.00-12.00) instead of 12.00 s (12.00-12.00)."
    )


def test_page_faults_are_not_told_where_the_samples_do_not_show_them() -> None:
    assert page_faults([with_faults(760_000, 760_000)]) == []
    assert page_faults([with_faults(760_000, 120_000, wall_ms=8000.0)]) == []  # no faster for it
    assert page_faults([with_faults(760_000, 120_000, system_s=1.0)]) == []
    assert page_faults([{"workload": "recorded before there were samples"}]) == []


def test_the_paragraph_names_how_many_turns_its_medians_are_of() -> None:
    stored = {"rows": [{"budget": "100% = 1 GiB", "slowdown": "0.990 (0.95-1.02)"}], "results": [with_faults(2, 2)]}
    told = main_job_times(lambda name: stored)
    assert told.startswith("Times are medians of 12 turns")
    assert "the slowdown is 0.990 to 0.990" in told
