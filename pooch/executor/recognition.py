"""Knowing the ops of a step again."""

from __future__ import annotations

from typing import Any

import torch

from pooch.ir import ExpectedOp
from pooch.torchtools.tensors import fingerprint


class OpRecogniser:
    """Compares ops with those that a plan expects, by fingerprint.

    A fingerprint is text, and writing it costs more than many an op. So what matched at a position is remembered as it
    was (operator, shapes, dtypes), and from the second step on it is compared with that first.
    """

    def __init__(self, expected: tuple[ExpectedOp, ...]) -> None:
        self._expected = expected
        self._matched: list[tuple[Any, list[tuple[torch.Size, torch.dtype]]] | None] = [None] * len(expected)

    def is_expected(self, position: int, func: Any, name: str, outputs: list[torch.Tensor]) -> bool:
        """Whether the op at a position of the region is the planned one.

        Args:
            position: number of the op in the region; must be one that the plan knows.
            func: the operator. name: its name, as in fingerprints.
            outputs: tensors among its results.
        """
        matched = self._matched[position]
        if matched is not None and matched[0] is func and len(outputs) == len(matched[1]):
            for tensor, (shape, dtype) in zip(outputs, matched[1], strict=True):
                if tensor.shape != shape or tensor.dtype is not dtype:
                    return False  # the text would differ in the same place
            return True
        if fingerprint(name, outputs) != self._expected[position].fingerprint:
            return False
        self._matched[position] = (func, [(tensor.shape, tensor.dtype) for tensor in outputs])
        return True
