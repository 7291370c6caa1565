"""Workloads to profile: built-in ones and those in the user's files. Importing this does not import torch."""

from .base import Workload
from .catalogue import built_in_workloads
from .loading import WorkloadFactory, built_in, load_workload, workload_growth
from .registry import BuiltIn, Growth, Preset
from .settings import Setting, parse_settings

__all__ = [
    "BuiltIn",
    "Growth",
    "Preset",
    "Setting",
    "Workload",
    "WorkloadFactory",
    "built_in",
    "built_in_workloads",
    "load_workload",
    "parse_settings",
    "workload_growth",
]
