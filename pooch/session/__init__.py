"""The only composition of the stages: profile -> plan -> simulate | apply -> measure.

Importing this imports no torch: what needs it is imported when it is called, so that saved profiles can be planned and
simulated on any laptop.
"""

from pooch.session.applying import apply
from pooch.session.comparison import ComparisonRow, compare, measure_rows, policy_names
from pooch.session.device_measuring import measure_device_model
from pooch.session.guarding import Guard, Repair, guard
from pooch.session.measuring import Optimized, TrainingReport, measure_training, optimize
from pooch.session.planning import plan, plan_from_decisions, smallest_budget
from pooch.session.profiling import measure_device_link, measure_devices, profile, profile_workload
from pooch.session.rescaling import rescale
from pooch.session.simulation import simulate, simulate_in_core
from pooch.session.sizes import MaxBatch
from pooch.session.sizing import SizedWorkload, max_batch

__all__ = [
    "ComparisonRow",
    "Guard",
    "MaxBatch",
    "Optimized",
    "Repair",
    "SizedWorkload",
    "TrainingReport",
    "apply",
    "compare",
    "guard",
    "max_batch",
    "measure_device_link",
    "measure_device_model",
    "measure_devices",
    "measure_rows",
    "measure_training",
    "optimize",
    "plan",
    "plan_from_decisions",
    "policy_names",
    "profile",
    "profile_workload",
    "rescale",
    "simulate",
    "simulate_in_core",
    "smallest_budget",
]
