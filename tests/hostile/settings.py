"""PyTorch's settings and random states that a case may change: what they are, and putting them back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def settings() -> dict[str, Any]:
    """Return the settings of the process that results may depend on."""
    return {
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill uninitialized memory": torch.utils.deterministic.fill_uninitialized_memory,
        "oneDNN": torch.backends.mkldnn.enabled,
        "oneDNN deterministic": torch.backends.mkldnn.deterministic,
        "flush denormals": float(torch.tensor([1e-40]).mul(2.0)) == 0.0,
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "gradients": torch.is_grad_enabled(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
    }


def put_back(wanted: dict[str, Any]) -> None:
    """Set them to what `settings` returned."""
    torch.set_default_dtype(wanted["default dtype"])
    if torch.get_num_threads() != wanted["threads"]:
        torch.set_num_threads(wanted["threads"])
    torch.set_float32_matmul_precision(wanted["matmul precision"])
    torch.use_deterministic_algorithms(wanted["deterministic algorithms"], warn_only=wanted["warn only"])
    torch.utils.deterministic.fill_uninitialized_memory = wanted["fill uninitialized memory"]
    torch.backends.mkldnn.set_flags(wanted["oneDNN"], wanted["oneDNN deterministic"])
    torch.set_flush_denormal(wanted["flush denormals"])
    torch.set_autocast_enabled("cpu", wanted["autocast"])
    torch.set_autocast_dtype("cpu", wanted["autocast dtype"])
    torch.set_autocast_cache_enabled(wanted["autocast cache"])
    torch.set_grad_enabled(wanted["gradients"])
    torch.backends.mha.set_fastpath_enabled(wanted["fast path"])


@contextmanager
def settings_kept() -> Iterator[None]:
    """Put the settings back at the end, whatever is done to them inside."""
    before = settings()
    try:
        yield
    finally:
        put_back(before)


def seed_everything(seed: int) -> None:
    """Seed the generators of PyTorch, NumPy and Python."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed looks at the stack for the sake of a GPU
    np.random.seed(seed)  # noqa: NPY002  # the state that programs share is what may go wrong
    random.seed(seed)


def random_states(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of the process's generators, and of each that a module holds."""
    numpy_state = np.random.get_state(legacy=False)["state"]  # noqa: NPY002
    numpy_words = np.append(numpy_state["key"], numpy_state["pos"]).astype(np.int64)
    states = {
        "random state": torch.get_rng_state(),
        "NumPy's random state": torch.from_numpy(numpy_words),
        "Python's random state": torch.tensor(random.getstate()[1]),
    }
    for path, module in model.named_modules():
        held = ((name, value) for name, value in vars(module).items() if isinstance(value, torch.Generator))
        states |= {f"generator {path}.{name}": generator.get_state() for name, generator in held}
    return states
