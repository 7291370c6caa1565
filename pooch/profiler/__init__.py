"""Turns a training step into a `Profile`: measured ops, values, lifetimes and memory."""

from .profiler import profile_step
from .session import ProfileOptions

__all__ = ["ProfileOptions", "profile_step"]
