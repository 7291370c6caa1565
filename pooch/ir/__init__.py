"""Frozen data that the stages pass on, and its files."""

from .consistency import check_profile
from .executable import check_plan
from .persistent import PersistentMove, PersistentPlan, PersistentTensor
from .plan import Choice, Decision, Decisions, ExpectedOp, Plan, Region
from .profile import Device, GatheredUnit, HookCosts, Link, Op, Profile, Value
from .schedule import Action, Schedule
from .split import Split
from .timeline import Interval, OnlineStep, Timeline

__all__ = [
    "Action",
    "Choice",
    "Decision",
    "Decisions",
    "Device",
    "ExpectedOp",
    "GatheredUnit",
    "HookCosts",
    "Interval",
    "Link",
    "OnlineStep",
    "Op",
    "PersistentMove",
    "PersistentPlan",
    "PersistentTensor",
    "Plan",
    "Profile",
    "Region",
    "Schedule",
    "Split",
    "Timeline",
    "Value",
    "check_plan",
    "check_profile",
]
