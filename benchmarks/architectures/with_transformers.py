"""Networks of transformers, each from a small configuration alone."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.architectures.network import Network
from benchmarks.architectures.small_configs import FIRST_SPECIAL, PIXELS, small

TOKENS, SAMPLES, FRAMES = 48, 4000, 64
KINDS = (
    "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "SPEECH_SEQ_2_SEQ", "CTC", "AUDIO_CLASSIFICATION",
    "IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "SEMANTIC_SEGMENTATION", "DEPTH_ESTIMATION",
    "MASKED_IMAGE_MODELING", "IMAGE_TO_IMAGE", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION",
    "QUESTION_ANSWERING", "MULTIPLE_CHOICE", "IMAGE_TEXT_TO_TEXT", "BACKBONE",
)  # fmt: skip
"""Kinds of classes, in the order in which one of them stands for an architecture."""

SMALL_BY_TYPE: dict[str, dict[str, Any]] = {
    "reformer": {"axial_pos_embds_dim": (32, 32), "axial_pos_shape": (8, 6), "is_decoder": True, "num_buckets": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 16},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "nemotron": {"num_key_value_heads": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "esm": {"vocab_size": 128, "mask_token_id": 4, "pad_token_id": 1},
    "xmod": {"languages": ("en_XX",), "default_language": "en_XX"},
    "wav2vec2-bert": {"vocab_size": 64}, "wav2vec2-conformer": {"vocab_size": 64},
    "hunyuan_v1_dense": {"head_dim": 16}, "hunyuan_v1_moe": {"head_dim": 16}, "ministral": {"head_dim": 16},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2}, "bit": {"num_groups": 4},
    "informer": {"prediction_length": 8}, "autoformer": {"prediction_length": 8},
}  # fmt: skip
"""Fields of configurations whose names do not tell what they decide about, by the type of the model."""


def names() -> list[str]:
    """The classes: first one of each type of model, then all others."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    first: dict[str, str] = {}
    others: dict[str, None] = {}
    mappings = [getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES") for kind in KINDS]
    for mapping in [*mappings, modeling_auto.MODEL_MAPPING_NAMES]:
        for model_type, found in mapping.items():
            for name in (found,) if isinstance(found, str) else found:
                if model_type in CONFIG_MAPPING_NAMES and first.setdefault(model_type, name) != name:
                    others[name] = None
    chosen = dict.fromkeys(sorted(first.values(), key=_mixed))
    return [*chosen, *sorted((name for name in others if name not in chosen), key=_mixed)]


def _mixed(name: str) -> int:
    """An order in which kinds of networks take turns, so that a part of the sweep is a sample of all."""
    return zlib.crc32(name.encode())


def network(name: str) -> Network:
    """The network of a class."""
    import transformers

    model_class = getattr(transformers, name)
    config_class = model_class.config_class
    config = small(config_class, **SMALL_BY_TYPE.get(config_class.model_type, {}))
    for each in (config, *(getattr(config, part, None) for part in config_class.sub_configs)):
        if each is not None and hasattr(each, "use_cache"):
            each.use_cache = False  # what it keeps for generating is of no use in training
    model = model_class(config).train()
    inputs = _Inputs(model, config, name)
    return Network(model, inputs.batch)


class _Inputs:
    """Random arguments for a model, by the names that its call takes.

    Args:
        model: of transformers.
        config: its configuration.
        name: of its class.
    """

    def __init__(self, model: nn.Module, config: Any, name: str) -> None:
        self._takes = set(inspect.signature(model.forward).parameters)
        self._main = model.main_input_name
        self._config, self._name = config, name
        self._text = config.get_text_config() if hasattr(config, "get_text_config") else config

    def batch(self, size: int) -> dict[str, Tensor]:
        """Arguments of one call."""
        found = dict(self._inputs(size))
        found |= self._labels(size, found)
        return found

    def _words(self) -> int:
        return min(FIRST_SPECIAL, int(getattr(self._text, "vocab_size", None) or FIRST_SPECIAL))

    def _tokens(self, *shape: int) -> Tensor:
        return torch.randint(3, self._words(), shape)

    def _inputs(self, size: int) -> Iterator[tuple[str, Tensor]]:
        if self._name.endswith("MultipleChoice"):
            yield "input_ids", self._tokens(size, 2, TOKENS)
            return
        if "input_ids" in self._takes and self._main in ("input_ids", "pixel_values"):
            yield "input_ids", self._tokens(size, TOKENS)
            if self._main == "pixel_values" and self._name.endswith("Model"):
                yield "pixel_values", self._pixels(size)
        elif self._main == "pixel_values":
            yield "pixel_values", self._pixels(size)
        elif self._main == "input_values":
            yield "input_values", self._sound(size)
        elif self._main == "input_features":
            yield "input_features", self._spectrum(size)
        else:
            yield self._main, self._tokens(size, TOKENS)
        if "decoder_input_ids" in self._takes:
            yield "decoder_input_ids", self._tokens(size, TOKENS)
        if "bbox" in self._takes:
            yield "bbox", torch.randint(0, 30, (size, TOKENS, 4)).cumsum(-1)

    def _pixels(self, size: int) -> Tensor:
        vision = getattr(self._config, "vision_config", None) or self._config
        channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
        side = getattr(vision, "image_size", None) or PIXELS
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        frames = getattr(vision, "num_frames", None) or getattr(vision, "frames_per_clip", None)
        if frames and "pixel_values_videos" not in self._takes:
            return torch.randn(size, frames, channels, height, width)
        return torch.randn(size, channels, height, width)

    def _sound(self, size: int) -> Tensor:
        bins = getattr(self._config, "num_mel_bins", None)
        if bins and hasattr(self._config, "patch_size"):
            return torch.randn(size, self._config.max_length, bins)
        return torch.randn(size, SAMPLES)

    def _spectrum(self, size: int) -> Tensor:
        bins = getattr(self._config, "num_mel_bins", None) or getattr(self._config, "feature_size", 80)
        if hasattr(self._config, "input_feat_per_channel"):
            return torch.randn(size, FRAMES, self._config.input_feat_per_channel)
        if hasattr(self._config, "max_source_positions"):
            return torch.randn(size, bins, 2 * self._config.max_source_positions)
        return torch.randn(size, FRAMES, bins)

    def _labels(self, size: int, found: dict[str, Tensor]) -> dict[str, Tensor]:
        if "start_positions" in self._takes:
            return {name: torch.randint(TOKENS, (size,)) for name in ("start_positions", "end_positions")}
        if "labels" not in self._takes:
            return {}
        classes = int(getattr(self._config, "num_labels", 2))
        if self._name.endswith("MultipleChoice"):
            return {"labels": torch.randint(2, (size,))}
        if self._name.endswith(("TokenClassification",)):
            return {"labels": torch.randint(classes, (size, TOKENS))}
        if self._name.endswith("Classification"):
            return {"labels": torch.randint(classes, (size,))}
        if self._name.endswith("SemanticSegmentation"):
            return {"labels": torch.randint(classes, (size, *found["pixel_values"].shape[-2:]))}
        if "decoder_input_ids" in found:
            return {"labels": found["decoder_input_ids"]}
        if self._name.endswith("CTC"):
            return {"labels": torch.randint(3, 30, (size, 6))}
        if "input_ids" in found and self._name.endswith(("LM", "LMHeadModel", "ConditionalGeneration")):
            return {"labels": found["input_ids"]}
        return {}
