"""Networks that Pooch was not tuned on, with random weights and data, and what methods need to know of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class PeerWorkload:
    """A model and one batch.

    Attributes:
        model: The model, in training mode.
        forward: Computes the loss.
        blocks: What block-wise checkpointing wraps, in the order of the forward pass.
        stages: What stage-wise checkpointing wraps; empty if there are none.
        sequence: A chain of modules with one argument, for `checkpoint_sequential`; None if there is none.
        set_sequence: Replaces the call of that chain.
        switch: Turns the library's own checkpointing on (True) or off; None if it has none.
    """

    model: nn.Module
    forward: Callable[[], Tensor]
    blocks: Sequence[nn.Module]
    stages: Sequence[nn.Module] = ()
    sequence: nn.Sequential | None = None
    switch: Callable[[bool], None] | None = field(default=None)


def _of_class(model: nn.Module, name: str) -> list[nn.Module]:
    found = [module for module in model.modules() if type(module).__name__ == name]
    assert found, f"no module of class {name} in the model"
    return found


def _transformers_switch(model: Any) -> Callable[[bool], None]:
    def switch(on: bool) -> None:
        if on:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            model.gradient_checkpointing_disable()

    return switch


def _pictures(model: Any, batch: int, size: int, block: str, stage: str = "") -> PeerWorkload:
    pixels, labels = torch.rand(batch, 3, size, size), torch.randint(0, 10, (batch,))
    return PeerWorkload(
        model,
        lambda: model(pixel_values=pixels, labels=labels).loss,
        _of_class(model, block),
        _of_class(model, stage) if stage else (),
        switch=_transformers_switch(model) if model.supports_gradient_checkpointing else None,
    )


def vit() -> PeerWorkload:
    """Vision transformer: 8 layers of 256, pictures of 128 x 128 in patches of 8, batch 8."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=256, num_hidden_layers=8, num_attention_heads=4, intermediate_size=1024, image_size=128,
        patch_size=8, num_labels=10, attn_implementation="eager",
    )  # fmt: skip
    return _pictures(ViTForImageClassification(config), 8, 128, "ViTLayer")


def swin() -> PeerWorkload:
    """Swin transformer: 2, 2, 4, 2 layers from width 48, pictures of 128 x 128, batch 8."""
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=128, patch_size=4, embed_dim=48, depths=[2, 2, 4, 2], num_heads=[3, 6, 12, 24], window_size=4,
        num_labels=10,
    )  # fmt: skip
    return _pictures(SwinForImageClassification(config), 8, 128, "SwinLayer", "SwinStage")


def convnext() -> PeerWorkload:
    """ConvNeXt: 2, 2, 6, 2 layers from width 48, pictures of 128 x 128, batch 8."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[48, 96, 192, 384], depths=[2, 2, 6, 2], image_size=128, num_labels=10)
    return _pictures(ConvNextForImageClassification(config), 8, 128, "ConvNextLayer", "ConvNextStage")


def _language(model: Any, batch: int, length: int, words: int, block: str) -> PeerWorkload:
    tokens = torch.randint(0, words, (batch, length))
    return PeerWorkload(
        model,
        lambda: model(input_ids=tokens, labels=tokens).loss,
        _of_class(model, block),
        switch=_transformers_switch(model),
    )


def llama(words: int = 4000) -> PeerWorkload:
    """Llama-like: 8 layers of 256, vocabulary of 4,000, sequences of 256, batch 4."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=words, hidden_size=256, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=768, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    return _language(LlamaForCausalLM(config), 4, 256, words, "LlamaDecoderLayer")


def bert() -> PeerWorkload:
    """BERT with its language head: 6 layers of 256, vocabulary of 4,000, sequences of 256, batch 4, dropout."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=4000, hidden_size=256, num_hidden_layers=6, num_attention_heads=4, intermediate_size=1024,
        attn_implementation="eager",
    )  # fmt: skip
    return _language(BertForMaskedLM(config), 4, 256, 4000, "BertLayer")


def segresnet() -> PeerWorkload:
    """SegResNet of MONAI: 16 filters, one volume of 48 x 48 x 48."""
    from monai.networks.nets import SegResNet

    model = SegResNet(init_filters=16, in_channels=1, out_channels=2, blocks_down=(1, 2, 2, 4), blocks_up=(1, 1, 1))
    voxels, labels = torch.rand(1, 1, 48, 48, 48), torch.randint(0, 2, (1, 48, 48, 48))
    stages = [*model.down_layers, *model.up_layers]
    return PeerWorkload(
        model, lambda: functional.cross_entropy(model(voxels), labels), _of_class(model, "ResBlock"), stages
    )


def swin_unetr() -> PeerWorkload:
    """SwinUNETR of MONAI: 12 features, one volume of 64 x 64 x 64."""
    from monai.networks.nets import SwinUNETR

    model = SwinUNETR(in_channels=1, out_channels=2, feature_size=12, spatial_dims=3)
    voxels, labels = torch.rand(1, 1, 64, 64, 64), torch.randint(0, 2, (1, 64, 64, 64))

    def switch(on: bool) -> None:
        for module in model.modules():
            if hasattr(module, "use_checkpoint"):
                module.use_checkpoint = on

    blocks = [*_of_class(model, "SwinTransformerBlock"), *_of_class(model, "UnetResBlock")]
    return PeerWorkload(
        model, lambda: functional.cross_entropy(model(voxels), labels), blocks, _of_class(model, "BasicLayer"),
        switch=switch,
    )  # fmt: skip


class _DenseLayer(nn.Sequential):
    def __init__(self, width: int, growth: int) -> None:
        super().__init__(
            nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth), nn.ReLU(), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, super().forward(x)], 1)


class _DenseStage(nn.Sequential):
    def __init__(self, width: int, growth: int, layers: int) -> None:
        super().__init__(*[_DenseLayer(width + number * growth, growth) for number in range(layers)])


def densenet() -> PeerWorkload:
    """DenseNet: stages of 4, 6 and 6 layers with a growth of 24, pictures of 64 x 64, batch 16."""
    growth, width = 24, 48
    parts: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False)]
    for layers in (4, 6, 6):
        parts.append(_DenseStage(width, growth, layers))
        width += layers * growth
        parts += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)]
        width //= 2
    features, head = nn.Sequential(*parts), nn.Linear(width, 10)
    model = nn.ModuleList([features, head])
    pixels, labels = torch.rand(16, 3, 64, 64), torch.randint(0, 10, (16,))

    def forward() -> Tensor:
        return functional.cross_entropy(head(features(pixels).mean((2, 3))), labels)

    return PeerWorkload(
        model, forward, _of_class(model, "_DenseLayer"), _of_class(model, "_DenseStage"), sequence=features
    )


class _Gate(nn.Module):
    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.wide = nn.Conv1d(width, 2 * width, 2, dilation=dilation)
        self.mixed = nn.Conv1d(width, width, 1)
        self.dilation = dilation

    def forward(self, x: Tensor) -> Tensor:
        signal, gate = self.wide(functional.pad(x, (self.dilation, 0))).chunk(2, 1)
        return x + self.mixed(torch.tanh(signal) * torch.sigmoid(gate))


def wavenet() -> PeerWorkload:
    """WaveNet-like: two stacks of 9 dilated gates of width 48, 4,096 samples, batch 4."""
    gates = nn.Sequential(*[_Gate(48, 2**level) for _ in range(2) for level in range(9)])
    first, last = nn.Conv1d(1, 48, 1), nn.Conv1d(48, 256, 1)
    model = nn.ModuleList([first, gates, last])
    waves, levels = torch.rand(4, 1, 4096), torch.randint(0, 256, (4, 4096))

    def forward() -> Tensor:
        return functional.cross_entropy(last(torch.relu(gates(first(waves)))), levels)

    return PeerWorkload(model, forward, list(gates), sequence=gates)


WORKLOADS: dict[str, Callable[[], PeerWorkload]] = {
    "vit": vit,
    "llama": llama,
    "bert": bert,
    "swin": swin,
    "convnext": convnext,
    "segresnet": segresnet,
    "swin-unetr": swin_unetr,
    "densenet": densenet,
    "wavenet": wavenet,
}
