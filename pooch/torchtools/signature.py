"""A digest that tells one model from another: names, shapes and dtypes of parameters and buffers."""

from __future__ import annotations

import hashlib

import torch

from pooch.torchtools.tensors import describe


def model_signature(model: torch.nn.Module) -> str:
    """Hexadecimal digest; equal for two models that a plan cannot tell apart before the step runs."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"p {name} {describe(parameter)} {parameter.requires_grad}\n".encode())
    for name, buffer in model.named_buffers():
        digest.update(f"b {name} {describe(buffer)}\n".encode())
    return digest.hexdigest()[:32]
