"""Models to profile: built-in ones, and the loader for the user's own. Importing this does not import torch."""

from pooch.workloads.base import Workload
from pooch.workloads.loading import WorkloadFactory, load_workload, workload_factory
from pooch.workloads.registry import BUILT_IN, BuiltIn
from pooch.workloads.settings import Setting, parse_settings

__all__ = [
    "BUILT_IN",
    "BuiltIn",
    "Setting",
    "Workload",
    "WorkloadFactory",
    "load_workload",
    "parse_settings",
    "workload_factory",
]
