"""Attention and rotary position embeddings as single operators (opset 23)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..operation import Operation
from ..registry import UnsupportedVariant, operator


@operator("Attention")
def _attention(
    op: Operation,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    if past_key is not None or past_value is not None or lengths is not None or any(map(op.reads, (1, 2, 3))):
        raise UnsupportedVariant("a cache of keys and values, or outputs after the first")
    if op.get("softcap", 0.0) or op.get("qk_matmul_output_mode", 0):
        raise UnsupportedVariant("softcap or qk_matmul_output_mode")
    is_flat = query.dim() == 3
    if is_flat:
        query = _heads(query, op.get("q_num_heads"))
        key, value = (_heads(each, op.get("kv_num_heads")) for each in (key, value))
    result = functional.scaled_dot_product_attention(
        query, key, value, mask, 0.0, bool(op.get("is_causal", 0)),
        scale=op.get("scale"), enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return result.transpose(1, 2).flatten(2) if is_flat else result


def _heads(x: Tensor, count: int) -> Tensor:
    """(batch, length, heads x width) to (batch, heads, length, width)."""
    return x.reshape(x.shape[0], x.shape[1], count, -1).transpose(1, 2)


@operator("RotaryEmbedding")
def _rotary(op: Operation, x: Tensor, cosines: Tensor, sines: Tensor, positions: Tensor | None = None) -> Tensor:
    is_flat = x.dim() == 3
    heads = _heads(x, op.get("num_heads")) if is_flat else x
    if positions is not None:
        cosines, sines = functional.embedding(positions, cosines), functional.embedding(positions, sines)
    cosines, sines = cosines.unsqueeze(1), sines.unsqueeze(1)  # the same for every head
    width = op.get("rotary_embedding_dim", 0) or heads.shape[-1]
    turned, rest = heads[..., :width], heads[..., width:]
    interleaved = bool(op.get("interleaved", 0))
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    real, imaginary = first * cosines - second * sines, first * sines + second * cosines
    joined = torch.stack((real, imaginary), -1).flatten(-2) if interleaved else torch.cat((real, imaginary), -1)
    result = torch.cat((joined, rest), -1) if rest.shape[-1] else joined
    return result.transpose(1, 2).flatten(2) if is_flat else result
