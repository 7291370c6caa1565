"""GPT-2 small from the transformers package, built with random weights; nothing is downloaded."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from ..base import Workload
from .language_modelling import language_modelling


def build(
    batch_size: int = 1,
    device: str = "cpu",
    sequence_length: int = 1024,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    vocabulary: int = 50257,
    dropout: float = 0.1,
    attention: str = "sdpa",
    seed: int = 0,
) -> Workload:
    """GPT-2 with random weights on random tokens; the model's own language-model loss; AdamW."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=max(1024, sequence_length),
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
        attn_implementation=attention,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.device(device):
        model = GPT2LMHeadModel(config).train()
    return language_modelling(model, "gpt2", batch_size, sequence_length, vocabulary, seed)
