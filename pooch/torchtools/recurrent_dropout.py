"""How PyTorch begins the dropout state of cuDNN's recurrent layers.

It does so in the first training step, and again whenever the generator of the device was seeded or set, in the middle
of the layer's call: it draws a seed (`torch.empty((), dtype=int64).random_(generator).item()`) and gives it to
`_cudnn_init_dropout_state`. So the ops of one step are not those of the next. None of them is an op of the plan: what
they make is read by the host, or outlives the step.
"""

from __future__ import annotations

import torch

INITIALISER = "aten._cudnn_init_dropout_state.default"
_SEED_OPS = ("aten.empty.memory_format", "aten.random_.default")
_OPS = (*_SEED_OPS, INITIALISER)
SEED_FINGERPRINTS = [f"{name}(int64[])" for name in _SEED_OPS]


class InitialisationWatch:
    """Follows the ops of such an initialisation as they come."""

    def __init__(self) -> None:
        self._position = 0

    def takes(self, name: str, made: tuple[torch.Tensor, ...]) -> bool:
        """Whether an op that the plan does not expect may be the next of an initialisation.

        Args:
            name: of the operator. made: what it made.
        """
        is_next = name == _OPS[self._position] and (name == INITIALISER or _is_seed(made))
        self._position = (self._position + 1) % len(_OPS) if is_next else 0
        return is_next


def _is_seed(made: tuple[torch.Tensor, ...]) -> bool:
    return len(made) == 1 and made[0].dtype is torch.int64 and made[0].dim() == 0
