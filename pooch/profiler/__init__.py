"""A training step -> a `Profile`: measured ops, values, lifetimes, and memory."""

from pooch.profiler.profiler import ProfileOptions, profile_step

__all__ = ["ProfileOptions", "profile_step"]
