"""Networks of x-transformers: decoders and encoders with features that papers have proposed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.architectures.made import Table
from benchmarks.architectures.network import Network

NETWORKS = Table()
names, network = NETWORKS.names, NETWORKS.network
WORDS, LENGTH, WIDTH, DEPTH, HEADS = 128, 64, 64, 3, 4
VARIANTS: dict[str, dict[str, Any]] = {
    "rotary": {"rotary_pos_emb": True}, "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 2},
    "relative": {"rel_pos_bias": True}, "dynamic-positions": {"dynamic_pos_bias": True},
    "glu": {"ff_glu": True, "ff_swish": True, "ff_no_bias": True}, "flash": {"attn_flash": True},
    "one-kv-head": {"attn_one_kv_head": True}, "grouped-kv-heads": {"attn_kv_heads": 2},
    "qk-norm": {"attn_qk_norm": True}, "sandwich": {"sandwich_norm": True}, "macaron": {"macaron": True},
    "talking-heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "gated-values": {"attn_gate_values": True}, "on-attention": {"attn_on_attn": True},
    "shifted-tokens": {"shift_tokens": 1}, "residual-attention": {"residual_attn": True},
    "stochastic-depth": {"layer_dropout": 0.2, "attn_dropout": 0.1, "ff_dropout": 0.1},
    "deep-norm": {"scale_residual": True}, "memory-key-values": {"attn_num_mem_kv": 8},
    "topk-attention": {"attn_sparse_topk": 8}, "rms-norm": {"use_rmsnorm": True},
    "squared-relu": {"ff_relu_squared": True},
    "value-residual": {"add_value_residual": True},
    "hyper-connections": {"num_residual_streams": 2}, "gated-residual": {"gate_residual": True},
}  # fmt: skip


def _decoder(**options: Any) -> nn.Module:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=WIDTH, depth=DEPTH, heads=HEADS, attn_dim_head=16, **options)
    return AutoregressiveWrapper(TransformerWrapper(num_tokens=WORDS, max_seq_len=LENGTH, attn_layers=layers))


def texts(size: int) -> tuple[Tensor]:
    return (torch.randint(WORDS, (size, LENGTH)),)


def _add(name: str, options: dict[str, Any]) -> None:
    NETWORKS.update({f"decoder-{name}": lambda: Network(_decoder(**options).train(), texts)})


for _name, _options in VARIANTS.items():
    _add(_name, _options)


@NETWORKS.build
def encoder_decoder() -> Network:
    from x_transformers import XTransformer

    model = XTransformer(
        dim=WIDTH, enc_num_tokens=WORDS, enc_depth=2, enc_heads=HEADS, enc_max_seq_len=LENGTH, dec_num_tokens=WORDS,
        dec_depth=2, dec_heads=HEADS, dec_max_seq_len=LENGTH, tie_token_emb=True,
    )  # fmt: skip
    return Network(model.train(), lambda size: (*texts(size), *texts(size)))


@NETWORKS.build
def picture_encoder() -> Network:
    from x_transformers import Encoder, ViTransformerWrapper

    layers = Encoder(dim=WIDTH, depth=DEPTH, heads=HEADS)
    model = ViTransformerWrapper(image_size=64, patch_size=8, num_classes=10, attn_layers=layers)
    return Network(model.train(), lambda size: (torch.randn(size, 3, 64, 64),))


@NETWORKS.build
def continuous() -> Network:
    from x_transformers import ContinuousTransformerWrapper, Encoder

    layers = Encoder(dim=WIDTH, depth=DEPTH, heads=HEADS)
    model = ContinuousTransformerWrapper(dim_in=16, dim_out=16, max_seq_len=LENGTH, attn_layers=layers)
    return Network(model.train(), lambda size: (torch.randn(size, LENGTH, 16),))
