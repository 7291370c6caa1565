"""Turns a training step into a `Profile`: measured ops, values, lifetimes and memory."""

from pooch.profiler.profiler import profile_step
from pooch.profiler.session import ProfileOptions

__all__ = ["ProfileOptions", "profile_step"]
