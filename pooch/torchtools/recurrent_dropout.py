"""How PyTorch initializes the dropout state of cuDNN's recurrent layers.

It does so in the first training step, and again whenever the device's generator was seeded or set, within the call of
the layer: it draws a seed (`torch.empty((), dtype=int64).random_(generator).item()`) and passes it to
`_cudnn_init_dropout_state`. One step therefore runs other ops than the next. None of them belongs to the plan: what
they create is read by the host or outlives the step.
"""

from __future__ import annotations

import torch

INITIALISER = "aten._cudnn_init_dropout_state.default"
_SEED_OPS = ("aten.empty.memory_format", "aten.random_.default")
_OPS = (*_SEED_OPS, INITIALISER)
SEED_FINGERPRINTS = [f"{name}(int64[])" for name in _SEED_OPS]


class InitialisationWatch:
    """Follows the ops of such an initialization as they run."""

    def __init__(self) -> None:
        self._position = 0

    def takes(self, name: str, made: tuple[torch.Tensor, ...]) -> bool:
        """Returns whether an op that the plan does not expect may be the next one of an initialization."""
        is_next = name == _OPS[self._position] and (name == INITIALISER or _is_seed(made))
        self._position = (self._position + 1) % len(_OPS) if is_next else 0
        return is_next


def _is_seed(made: tuple[torch.Tensor, ...]) -> bool:
    return len(made) == 1 and made[0].dtype is torch.int64 and made[0].dim() == 0
