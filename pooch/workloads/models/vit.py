"""Vision transformer from the transformers package, built with random weights; nothing is downloaded."""

from __future__ import annotations

import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from ..base import Workload
from .classification import classification

try:
    from transformers.initialization import no_init_weights
except ImportError:  # transformers 4
    from transformers.modeling_utils import no_init_weights


def _initialize(model: nn.Module, deviation: float) -> None:
    """Initialize weights from a normal distribution.

    The package truncates it by drawing again, which depends on the contents and so does not work with fake tensors.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, nn.LayerNorm) and name == "weight":
                nn.init.ones_(parameter)
            elif parameter.ndim > 1:
                nn.init.normal_(parameter, 0.0, deviation)
            else:
                nn.init.zeros_(parameter)


def _loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(pixel_values=images).logits, labels)


def build(
    batch_size: int = 8,
    device: str = "cpu",
    image_size: int = 224,
    patch_size: int = 16,
    layers: int = 12,
    width: int = 768,
    inner_width: int = 3072,
    heads: int = 12,
    classes: int = 1000,
    dropout: float = 0.1,
    attention: str = "sdpa",
    seed: int = 0,
) -> Workload:
    """A ViT with random weights on random images; cross entropy; AdamW."""
    torch.manual_seed(seed)
    config = ViTConfig(
        image_size=image_size,
        patch_size=patch_size,
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=inner_width,
        num_attention_heads=heads,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=classes,
        attn_implementation=attention,
    )
    with torch.device(device):
        with no_init_weights():
            model = ViTForImageClassification(config).train()
        _initialize(model, config.initializer_range)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return classification(
        "vit", model, (batch_size, 3, image_size, image_size), classes, device, seed, _loss, optimizer
    )
