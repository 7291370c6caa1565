"""Deterministic algorithms: operators that may return other bits when they run again, and PyTorch's switches.

The operators are those that the documentation of `torch.use_deterministic_algorithms` (PyTorch 2.13) names, by their
names in ATen; what applies to CUDA is assumed to apply to other accelerators. Backward operators are included, since a
region may contain a backward pass. Added to what is documented are `index_reduce`, `kthvalue`, the attention and
embedding kernels and the transposed convolutions, whose kernels also accumulate with atomics.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_settings: Any = torch.utils.deterministic
_mutation_allowed: Any = getattr(torch.backends, "__allow_nonbracketed_mutation")
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_NO_DETERMINISTIC = re.compile(r"^(\S+) does not have a deterministic implementation")

# Deterministic after `torch.use_deterministic_algorithms(True)`.
_ON_REQUEST = {
    "_embedding_bag_backward", "_embedding_bag_dense_backward", "_flash_attention_backward", "_index_put_impl_",
    "_scaled_dot_product_flash_attention_backward", "_unsafe_index_put", "convolution_backward",
    "cudnn_convolution_transpose", "embedding_dense_backward", "index_add", "index_add_", "index_copy", "index_copy_",
    "index_put", "index_put_", "max_pool3d_with_indices_backward", "replication_pad1d_backward",
    "replication_pad2d_backward", "replication_pad3d_backward", "scatter", "scatter_", "scatter_add", "scatter_add_",
    "scatter_reduce", "scatter_reduce_",
}  # fmt: skip
# In deterministic mode these raise an error, or warn and run unchanged.
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
    """Returns whether an operator, such as "aten::scatter_add", is listed, whatever its arguments."""
    namespace, _, base = name.partition("::")
    return namespace == "aten" and base in _ON_REQUEST | _NEVER | _NEVER_OF_FLOATS


def varies_now(name: str, dtype: torch.dtype) -> str | None:
    """Returns why an operator with a result of this dtype may return other bits when it runs again on an accelerator as
    configured now, or None.
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


@contextmanager
def deterministic_algorithms() -> Iterator[list[str]]:
    """Context manager in which every operator uses a deterministic algorithm if it has one.

    Yields a list that, after the block, names the operators that were used and have none. cuBLAS reads its environment
    variable on first use, so it is unaffected in a process that has already computed on a GPU.
    """
    restore = _remembered()
    operators: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            use_deterministic_algorithms()
            yield operators
        finally:
            restore()
    for warning in caught:
        found = _NO_DETERMINISTIC.match(str(warning.message))
        if found is None:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        elif found.group(1) not in operators:
            operators.append(found.group(1))


def use_deterministic_algorithms() -> None:
    """Switches PyTorch, cuDNN and cuBLAS to deterministic algorithms; operators without one warn."""
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    _settings.fill_uninitialized_memory = False  # it costs time and changes no number that is read
    _set_cudnn(deterministic=True, benchmark=False)


def _set_cudnn(deterministic: bool, benchmark: bool) -> None:
    """Sets both flags, in a process that has called `torch.backends.disable_global_flags()` as well."""
    with _mutation_allowed():
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = deterministic, benchmark


def _remembered() -> Callable[[], None]:
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = _settings.fill_uninitialized_memory
    cudnn = (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)
    workspace = os.environ.get(_WORKSPACE)

    def restore() -> None:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        _settings.fill_uninitialized_memory = fill
        _set_cudnn(*cudnn)
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)
        else:
            os.environ[_WORKSPACE] = workspace

    return restore
