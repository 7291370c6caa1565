"""Policies by name: each turns a `PlanningRequest` into a `PolicyOutcome`. One file per policy."""

from pooch.planner.contract import Policy
from pooch.planner.policies.capuchin import capuchin
from pooch.planner.policies.chen_sqrt import chen_sqrt
from pooch.planner.policies.ilp import ilp
from pooch.planner.policies.ilp_recompute import ilp_recompute
from pooch.planner.policies.ilp_swap import ilp_swap
from pooch.planner.policies.keep_all import keep_all
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

policies: dict[str, Policy] = {
    "ilp": ilp,
    "keep_all": keep_all,
    "in_core": keep_all,
    "recompute_all": recompute_all,
    "swap_all": swap_all,
    "swap_all_no_scheduling": swap_all_no_scheduling,
    "swap_opt": swap_opt,
    "pooch_2018": pooch_2018,
    "pooch_exhaustive": pooch_exhaustive,
    "superneurons": superneurons,
    "vdnn": vdnn,
    "tflms": tflms,
    "tflms_auto": tflms_auto,
    "tflms_tuned": tflms_tuned,
    "meng_lifetime": meng_lifetime,
    "tf_latest_first": tf_latest_first,
    "tf_earliest_first": tf_earliest_first,
    "capuchin": capuchin,
    "chen_sqrt": chen_sqrt,
    "ilp_recompute": ilp_recompute,
    "ilp_swap": ilp_swap,
}

__all__ = ["policies"]
