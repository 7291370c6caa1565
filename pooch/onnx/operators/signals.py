"""Fourier transforms and the windows of signals."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..operation import HostNumbers, Operation, number
from ..registry import UnsupportedVariant, operator
from ..types import torch_type


def _complex(x: Tensor) -> Tensor:
    """A last axis of one is the real part, one of two the real and the imaginary part."""
    return x[..., 0] if x.shape[-1] == 1 else torch.view_as_complex(x.contiguous())


@operator("DFT", host=(1, 2))
def _dft(op: Operation, x: Tensor, length: HostNumbers | None = None, axis: HostNumbers | None = None) -> Tensor:
    along = int(number(axis, op.get("axis", 1) if op.opset < 20 else -2)) % x.dim()
    count = None if length is None else int(number(length, 0))
    one_sided, inverse = bool(op.get("onesided", 0)), bool(op.get("inverse", 0))
    if one_sided and inverse:
        raise UnsupportedVariant("an inverse transform of one side")
    given = _complex(x)
    if one_sided:
        result = torch.fft.rfft(given, count, along)
    else:
        result = (torch.fft.ifft if inverse else torch.fft.fft)(given, count, along)
    return torch.view_as_real(result)


@operator("STFT", host=(1, 3))
def _stft(
    op: Operation, x: Tensor, step: HostNumbers, window: Tensor | None = None, length: HostNumbers | None = None
) -> Tensor:
    signal = x if x.dim() == 2 else _complex(x)
    width = int(number(length, 0 if window is None else window.shape[0]))
    if window is None:
        window = torch.ones(width, dtype=x.dtype, device=x.device)
    one_sided = bool(op.get("onesided", 1))
    if signal.is_complex() and one_sided:
        raise UnsupportedVariant("one side of a complex signal")
    result = torch.stft(
        signal, width, int(number(step, 0)), window=window, center=False, onesided=one_sided, return_complex=True
    )
    return torch.view_as_real(result.transpose(1, 2))


def _window(make: Callable[[int, bool], Tensor]) -> Callable[..., Tensor]:
    def run(op: Operation, size: HostNumbers) -> Tensor:
        return make(int(number(size, 0)), bool(op.get("periodic", 1))).to(torch_type(op.get("output_datatype", 1)))

    return run


operator("HannWindow", host=(0,))(_window(lambda size, periodic: torch.hann_window(size, periodic)))
operator("BlackmanWindow", host=(0,))(_window(lambda size, periodic: torch.blackman_window(size, periodic)))
operator("HammingWindow", host=(0,))(
    _window(lambda size, periodic: torch.hamming_window(size, periodic, 25 / 46, 21 / 46))
)
