"""Operators whose kernels on an accelerator may give other bits when they run again: no replay repeats them.

Source: the documentation of `torch.use_deterministic_algorithms` (PyTorch 2.13), by the names that ATen gives the
operators; what holds for CUDA is taken to hold for other accelerators. Backward operators are listed too, since a
region may contain a backward pass. Added to what is documented: `index_reduce`, `kthvalue`, the attention and embedding
kernels and the transposed convolutions, whose kernels add up with atomics as well.
"""

from __future__ import annotations

import torch

# Repeatable after `torch.use_deterministic_algorithms(True)`.
_ON_REQUEST = {
    "_embedding_bag_backward", "_embedding_bag_dense_backward", "_flash_attention_backward", "_index_put_impl_",
    "_scaled_dot_product_flash_attention_backward", "_unsafe_index_put", "convolution_backward",
    "cudnn_convolution_transpose", "embedding_dense_backward", "index_add", "index_add_", "index_copy", "index_copy_",
    "index_put", "index_put_", "max_pool3d_with_indices_backward", "replication_pad1d_backward",
    "replication_pad2d_backward", "replication_pad3d_backward", "scatter", "scatter_", "scatter_add", "scatter_add_",
    "scatter_reduce", "scatter_reduce_",
}  # fmt: skip
# In deterministic mode these raise an error, or warn and run as they are.
_NEVER = {
    "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward", "_ctc_loss_backward", "_cudnn_ctc_loss",
    "_efficient_attention_backward", "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_efficient_attention_backward", "_upsample_bicubic2d_aa_backward",
    "_upsample_bilinear2d_aa_backward", "adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward",
    "avg_pool3d_backward", "bincount", "fractional_max_pool2d_backward", "fractional_max_pool3d_backward",
    "grid_sampler_2d_backward", "grid_sampler_3d_backward", "histc", "index_reduce", "index_reduce_", "kthvalue",
    "max_pool2d_with_indices_backward", "max_unpool2d", "max_unpool3d", "median", "nanmedian",
    "nll_loss2d_backward", "nll_loss2d_forward", "put", "put_", "reflection_pad1d_backward",
    "reflection_pad2d_backward", "reflection_pad3d_backward", "upsample_bicubic2d_backward",
    "upsample_bilinear2d_backward", "upsample_linear1d_backward", "upsample_trilinear3d_backward",
}  # fmt: skip
_NEVER_OF_FLOATS = {"cumsum", "cumsum_"}


def may_vary(name: str) -> bool:
    """Whether an operator is listed, whatever its arguments. `name`: such as "aten::scatter_add"."""
    namespace, _, base = name.partition("::")
    return namespace == "aten" and base in _ON_REQUEST | _NEVER | _NEVER_OF_FLOATS


def varies_now(name: str, dtype: torch.dtype) -> str | None:
    """Why an operator may give other bits when it runs again on an accelerator, as things are set now; or None.

    Args:
        name: such as "aten::scatter_add". dtype: of its result.
    """
    base = name.removeprefix("aten::")
    if base in _NEVER or (base in _NEVER_OF_FLOATS and (dtype.is_floating_point or dtype.is_complex)):
        return f"{base} adds up in any order on an accelerator, and PyTorch has no deterministic kernel for it"
    if base in _ON_REQUEST and not torch.are_deterministic_algorithms_enabled():
        return (
            f"{base} may give other bits each time it runs on an accelerator, unless "
            "torch.use_deterministic_algorithms(True) was called before"
        )
    return None
