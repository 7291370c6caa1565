"""The errors that Pooch raises, by their public names: `except pooch.errors.InfeasibleBudget`."""

from .ground.errors import *  # noqa: F403
