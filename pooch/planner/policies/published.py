"""The published methods as starting points of the integer program, so that it is never worse than any of them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from pooch.planner.contract import Policy, PolicyOutcome
from pooch.planner.evaluators import OutOfTime, Timed
from pooch.planner.policies.capuchin import capuchin
from pooch.planner.policies.chen_sqrt import chen_sqrt
from pooch.planner.policies.fitting import or_none
from pooch.planner.policies.meng_lifetime import meng_lifetime
from pooch.planner.policies.pooch_2018 import pooch_2018
from pooch.planner.policies.pooch_exhaustive import pooch_exhaustive
from pooch.planner.policies.recompute_all import recompute_all
from pooch.planner.policies.superneurons import superneurons
from pooch.planner.policies.swap_all import swap_all
from pooch.planner.policies.swap_all_no_scheduling import swap_all_no_scheduling
from pooch.planner.policies.swap_opt import swap_opt
from pooch.planner.policies.tensorflow_loops import tf_earliest_first, tf_latest_first
from pooch.planner.policies.tflms import tflms
from pooch.planner.policies.tflms_auto import tflms_auto
from pooch.planner.policies.tflms_tuned import tflms_tuned
from pooch.planner.policies.vdnn import vdnn
from pooch.planner.trials import Trials

# A handful of evaluations each; the others need several per activation.
QUICK: tuple[Policy, ...] = (
    capuchin,
    superneurons,
    meng_lifetime,
    tflms,
    vdnn,
    tf_latest_first,
    tf_earliest_first,
    tflms_auto,
    chen_sqrt,
    swap_all,
    swap_all_no_scheduling,
    recompute_all,
)
THOROUGH: tuple[Policy, ...] = (tflms_tuned, swap_opt, pooch_2018, pooch_exhaustive)
MOST_FOR_QUICK = 2000  # activations; beyond that an evaluation takes a large part of a second
MOST_FOR_THOROUGH = 600
LEAST_GAIN_MS = 1e-6
SHARE_OF_TIME = 0.25  # of the time limit that they may take; a safety, as counts decide otherwise


def offer_published(trials: Trials) -> None:
    """Add what the published methods make of the request to the plans to choose and to start from."""
    request = trials.request
    activations = len(trials.candidates.items)
    methods = QUICK * (activations <= MOST_FOR_QUICK) + THOROUGH * (activations <= MOST_FOR_THOROUGH)
    until_s = request.started_s + SHARE_OF_TIME * request.time_limit_s
    timed = replace(request, progress=None, evaluator=Timed(request.evaluator, until_s))
    with suppress(OutOfTime):
        for method in methods:
            outcome = or_none(method, timed)
            if outcome is not None:
                _take(trials, outcome)


def _take(trials: Trials, outcome: PolicyOutcome) -> None:
    """Its decisions, lowered as all are; with its own slots of copies only where that is faster than all else."""
    trials.run(outcome.decisions)
    best = trials.best
    if best is None or outcome.evaluation.timeline.step_ms < best.step_ms - LEAST_GAIN_MS:
        trials.offer(outcome.decisions, outcome.evaluation)
