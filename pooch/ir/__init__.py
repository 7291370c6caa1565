"""Frozen data that the stages pass on, and its files."""

from pooch.ir.plan import Choice, Decision, Decisions, ExpectedOp, Plan, Region
from pooch.ir.profile import Device, HookCosts, Link, Op, Profile, Value
from pooch.ir.schedule import Action, Schedule
from pooch.ir.timeline import Interval, Timeline

__all__ = [
    "Action",
    "Choice",
    "Decision",
    "Decisions",
    "Device",
    "ExpectedOp",
    "HookCosts",
    "Interval",
    "Link",
    "Op",
    "Plan",
    "Profile",
    "Region",
    "Schedule",
    "Timeline",
    "Value",
]
