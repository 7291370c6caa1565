"""What `profile` leaves as it was, around all of its passes, and how often it called the user's forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

from pooch.ir import Profile

Profiling = TypeVar("Profiling", bound=Callable[..., Profile])


def leaving_the_model_alone(profiling: Profiling) -> Profiling:
    """A `profile` that puts attributes of modules and random states back, and notes how often it called forward."""

    @functools.wraps(profiling)
    def profile(forward: Any, model: Any, *args: Any, **options: Any) -> Profile:
        import torch

        from pooch.torchtools.module_attributes import attributes_kept, has_lazy_parameters
        from pooch.torchtools.training_state import model_device, random_state_kept

        if not callable(forward) or not isinstance(model, torch.nn.Module) or has_lazy_parameters(model):
            return profiling(forward, model, *args, **options)  # which says what is wrong
        calls = 0

        def counted() -> Any:
            nonlocal calls
            calls += 1
            return forward()

        with attributes_kept(model), random_state_kept(model_device(model)):
            made = profiling(counted, model, *args, **options)
        return replace(made, notes=(*made.notes, f"profiling called forward {calls} times"))

    return cast(Profiling, profile)
