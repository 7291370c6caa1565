"""The published evaluations as something to run: their rows, their own figures, and what our methods make of them."""

from pooch.reproduction.claims import Verdict, claim_text
from pooch.reproduction.experiments import EXPERIMENTS, find_experiment
from pooch.reproduction.papers import PublishedFigure, published_figure, published_figures
from pooch.reproduction.rows import Answer, Claim, Experiment, Row
from pooch.reproduction.running import Reproduced, reproduce

__all__ = [
    "EXPERIMENTS",
    "Answer",
    "Claim",
    "Experiment",
    "PublishedFigure",
    "Reproduced",
    "Row",
    "Verdict",
    "claim_text",
    "find_experiment",
    "published_figure",
    "published_figures",
    "reproduce",
]
