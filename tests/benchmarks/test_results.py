"""docs/results.md is what the recorded answers say."""

from __future__ import annotations

from pathlib import Path

from benchmarks.results import FOLDER, OUTPUT, page
from pooch.published.experiments import EXPERIMENTS
from pooch.published.running import reproduce

ROOT = Path(__file__).parents[2]


def test_the_page_is_made_from_the_recorded_answers() -> None:
    assert (ROOT / OUTPUT).read_text() == page(ROOT / FOLDER)


def test_every_experiment_has_recorded_answers_within_their_budgets() -> None:
    for experiment in EXPERIMENTS.values():
        answers = reproduce(experiment, folder=ROOT / FOLDER, only_recorded=True).answers
        assert answers, experiment.name
        for answer in answers:
            if answer.fits and answer.budget_bytes:
                assert answer.peak_bytes is not None
                assert answer.peak_bytes <= answer.budget_bytes
