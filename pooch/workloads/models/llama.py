"""A Llama-style language model from the transformers package, built with random weights; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ..base import Workload
from .language_modelling import language_modelling


def build(
    batch_size: int = 1,
    device: str = "cpu",
    sequence_length: int = 1024,
    layers: int = 12,
    width: int = 768,
    inner_width: int = 2048,
    heads: int = 12,
    key_value_heads: int = 4,
    vocabulary: int = 32000,
    attention: str = "sdpa",
    dtype: str = "float32",
    seed: int = 0,
) -> Workload:
    """A Llama with random weights on random tokens; the model's own language-model loss; AdamW.

    The defaults are about as large as GPT-2 small.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner_width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=max(2048, sequence_length),
        use_cache=False,
        attn_implementation=attention,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.device(device), _default_dtype(getattr(torch, dtype)):
        model = LlamaForCausalLM(config).train()
    return language_modelling(model, "llama", batch_size, sequence_length, vocabulary, seed)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Parameters are made in this type, as transformers does it; `Module.to` cannot convert fake tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
