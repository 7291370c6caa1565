"""The page of a run under `pooch.auto`, with its plans."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pooch
from pooch.autopilot import AutoSummary, PlannedShape
from pooch.report.page.run import write_run_report
from tests.toys import FAST_LINK, blocks


def test_the_page_of_a_run_holds_every_plan(tmp_path: Path) -> None:
    profile = blocks(4, link=FAST_LINK)
    plans = [pooch.plan(profile, share) for share in ("80%", "60%")]
    shapes = tuple(PlannedShape(name, "recorded", "plan", 7, 9, 5, 1.25, "<why>") for name in ("1x2", "3x4"))
    summary = AutoSummary(
        steps_on_plan=14,
        peak_bytes=98,
        between_peak_bytes=5,
        lost_ms=1.0,
        swapped_bytes=6,
        budget_bytes=99,
        shapes=shapes,
        events=("planned",),
        verified=pooch.Verified(recipes=3, proven=3, compared=6),
    )
    path = tmp_path / "run.html"
    write_run_report(summary, [("1x2", profile, plans[0]), ("3x4", profile, plans[1])], path, title="train.py")
    page = path.read_text()
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    pages = json.loads(found.group(1))["pages"]
    assert [each["name"] for each in pages] == ["1x2", "3x4"]
    assert [each["plans"][0]["budget_bytes"] for each in pages] == [plan.budget_bytes for plan in plans]
    assert '<select id="pages">' in page
    assert "<td>1x2</td><td>7</td>" in page
    for line in summary.totals:
        assert f"<p>{html.escape(line)}</p>" in page
    assert "3 recipes, all proven" in page
    assert "&lt;why&gt;" in page
    assert "<why>" not in page
