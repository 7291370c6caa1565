"""Runs operators and draws again as replays do, and compares bytes: what differs on this machine is found, not assumed.

Operators that PyTorch documents as varying are in `determinism`. Here a catalogue of those that networks use runs
several times on the same inputs, in the thread of the program and in another one, as replays run in autograd's.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as functional

from .accelerators import called_drawing_from, random_snapshot, synchronize

Call = Callable[[], object]

RUNS = 4
_DRAWN = 4096


def draws_repeat(device: torch.device) -> bool:
    """Whether a draw that is repeated from a snapshot gives the same numbers, and leaves the generator as it was.

    Args:
        device: Its default generator is tried, and left as it was.
    """

    def draw() -> torch.Tensor:
        return torch.rand(_DRAWN, device=device)

    begin = random_snapshot(device)

    def draws() -> bool:
        snapshot = random_snapshot(device)
        first, second = draw(), draw()
        # Again from the snapshot, in between: what is drawn next must not notice.
        middle = random_snapshot(device)
        again = called_drawing_from(device, snapshot, draw)
        third = draw()
        after = called_drawing_from(device, middle, draw)
        return torch.equal(first, again) and torch.equal(third, after) and not torch.equal(first, second)

    return called_drawing_from(device, begin, draws)


def varying_operators(device: torch.device, among: Mapping[str, Call] | None = None) -> list[str]:
    """Names of the operators whose results differ from run to run on the same inputs.

    Args:
        device: Where they run.
        among: Calls by the operators' names. None: the catalogue.
    """
    calls = catalogue(device) if among is None else among
    return [name for name, call in calls.items() if _varies(call, device)]


def _varies(call: Call, device: torch.device) -> bool:
    first = _result_bytes(call, device)
    for run in range(1, RUNS):
        again: list[bytes] = []
        if run % 2:
            thread = threading.Thread(target=lambda found=again: found.extend(_result_bytes(call, device)))
            thread.start()
            thread.join()
        else:
            again = _result_bytes(call, device)
        if again != first:
            return True
    return False


def _result_bytes(call: Call, device: torch.device) -> list[bytes]:
    with torch.no_grad():
        result = call()
    synchronize(device)
    # The elements alone: some results lie in a larger storage, whose rest nobody has written.
    return [each.cpu().reshape(-1).clone().view(torch.uint8).numpy().tobytes() for each in _tensors(result)]


def _tensors(result: object) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for each in result:
            yield from _tensors(each)


def catalogue(device: torch.device) -> dict[str, Call]:
    """Calls of operators that networks save or recompute, by their names; large enough to be split among threads."""
    generator = torch.Generator(device).manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        # In the default dtype of PyTorch, not of the program.
        return torch.rand(shape, generator=generator, dtype=torch.float32, device=device) - 0.5

    def indices(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(most, shape, generator=generator, device=device)

    calls: dict[str, Call] = {}
    for group in (_products, _convolutions, _normalizations, _reductions, _elementwise, _gathers, _losses, _recurrent):
        calls |= group(numbers, indices)
    return calls


_Make = Callable[..., torch.Tensor]


def _products(numbers: _Make, indices: _Make) -> dict[str, Call]:
    left, right, batches = numbers(384, 512), numbers(512, 256), numbers(8, 128, 64)
    heads = numbers(2, 4, 128, 32)
    return {
        "aten::mm": lambda: left @ right,
        "aten::addmm": lambda: torch.addmm(right[0], left, right),
        "aten::bmm": lambda: batches @ batches.transpose(1, 2),
        "aten::baddbmm": lambda: torch.baddbmm(batches[:, :, :1], batches, batches.transpose(1, 2)),
        "aten::mv": lambda: left @ right[:, 0],
        "aten::scaled_dot_product_attention": lambda: functional.scaled_dot_product_attention(heads, heads, heads),
        "aten::scaled_dot_product_attention (causal)": lambda: functional.scaled_dot_product_attention(
            heads, heads, heads, is_causal=True
        ),
        "aten::_cdist_forward": lambda: torch.cdist(left, left),
    }


def _convolutions(numbers: _Make, indices: _Make) -> dict[str, Call]:
    row, image, volume = numbers(4, 8, 256), numbers(4, 8, 32, 32), numbers(2, 8, 12, 12, 12)
    narrow, square, cube = numbers(16, 8, 3), numbers(16, 8, 3, 3), numbers(16, 8, 3, 3, 3)
    depthwise, back = numbers(8, 1, 3, 3), numbers(8, 16, 4, 4)
    return {
        "aten::convolution (1d)": lambda: functional.conv1d(row, narrow),
        "aten::convolution (2d)": lambda: functional.conv2d(image, square, padding=1),
        "aten::convolution (strided)": lambda: functional.conv2d(image, square, stride=2),
        "aten::convolution (depthwise)": lambda: functional.conv2d(image, depthwise, groups=8),
        "aten::convolution (3d)": lambda: functional.conv3d(volume, cube),
        "aten::convolution (transposed)": lambda: functional.conv_transpose2d(image, back, stride=2),
        "aten::max_pool2d_with_indices": lambda: functional.max_pool2d(image, 2, return_indices=True),
        "aten::avg_pool2d": lambda: functional.avg_pool2d(image, 2),
        "aten::_adaptive_avg_pool2d": lambda: functional.adaptive_avg_pool2d(image, 5),
        "aten::upsample_bilinear2d": lambda: functional.interpolate(image, scale_factor=2.0, mode="bilinear"),
        "aten::upsample_nearest2d": lambda: functional.interpolate(image, scale_factor=2.0),
        "aten::im2col": lambda: functional.unfold(image, 3),
        "aten::col2im": lambda: functional.fold(functional.unfold(image, 3), 32, 3),
        "aten::reflection_pad2d": lambda: functional.pad(image, (1, 1, 1, 1), "reflect"),
    }


def _normalizations(numbers: _Make, indices: _Make) -> dict[str, Call]:
    image, words, gain = numbers(8, 16, 24, 24), numbers(64, 256), numbers(256)
    return {
        "aten::native_batch_norm": lambda: functional.batch_norm(image, None, None, training=True),
        "aten::native_group_norm": lambda: functional.group_norm(image, 4),
        "aten::native_layer_norm": lambda: functional.layer_norm(words, (256,), gain, gain),
        "aten::rms_norm": lambda: functional.rms_norm(words, (256,), gain),
        "aten::instance_norm": lambda: functional.instance_norm(image),
        "aten::_softmax": lambda: functional.softmax(words, dim=-1),
        "aten::_log_softmax": lambda: functional.log_softmax(words, dim=-1),
    }


def _reductions(numbers: _Make, indices: _Make) -> dict[str, Call]:
    many, words, counted = numbers(2**18), numbers(512, 256), indices(64, 2**16)
    return {
        "aten::sum": many.sum,
        "aten::mean": lambda: words.mean(dim=0),
        "aten::var": lambda: words.var(dim=1),
        "aten::linalg_vector_norm": many.norm,
        "aten::logsumexp": lambda: words.logsumexp(dim=0),
        "aten::amax": lambda: words.amax(dim=0),
        "aten::prod": lambda: (1 + words / 256).prod(dim=0),
        "aten::cumsum": lambda: words.cumsum(dim=0),
        "aten::sort": lambda: words.sort(dim=1),
        "aten::topk": lambda: words.topk(8, dim=1),
        "aten::median": lambda: words.median(dim=1),
        "aten::kthvalue": lambda: words.kthvalue(8, dim=1),
        "aten::histc": lambda: many.histc(64),
        "aten::bincount": lambda: torch.bincount(counted, many[: counted.numel()]),
    }


def _elementwise(numbers: _Make, indices: _Make) -> dict[str, Call]:
    many = numbers(2**17)
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "gelu": functional.gelu,
        "silu": functional.silu,
        "relu": functional.relu,
        "leaky_relu": functional.leaky_relu,
        "elu": functional.elu,
        "mish": functional.mish,
        "softplus": functional.softplus,
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
        "exp": torch.exp,
        "sin": torch.sin,
        "erf": torch.erf,
        "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
        "log": lambda x: torch.log(x.abs() + 1),
        "pow": lambda x: torch.pow(x.abs() + 1, 1.7),
        "div": lambda x: x / (x.abs() + math.pi),
        "native_dropout (scaled mask)": lambda x: torch.where(x > 0, x * 2, 0.0),
    }
    return {f"aten::{name}": lambda each=each: each(many) for name, each in functions.items()}  # type: ignore[misc]


def _gathers(numbers: _Make, indices: _Make) -> dict[str, Call]:
    table, picked = numbers(64, 64), indices(64, 2**13)
    rows, places = numbers(2**13, 64), indices(64, 2**13, 64)
    return {
        "aten::embedding": lambda: functional.embedding(picked, table),
        "aten::index_select": lambda: table.index_select(0, picked),
        "aten::gather": lambda: table.gather(0, places),
        "aten::index_add": lambda: table.index_add(0, picked, rows),
        "aten::scatter_add": lambda: table.scatter_add(0, places, rows),
        "aten::index_put": lambda: table.index_put((picked,), rows, accumulate=True),
        "aten::_embedding_bag": lambda: functional.embedding_bag(picked.view(-1, 64), table),
    }


def _losses(numbers: _Make, indices: _Make) -> dict[str, Call]:
    scores, classes = numbers(2**11, 64), indices(64, 2**11)
    image, labels = numbers(4, 8, 32, 32), indices(8, 4, 32, 32)
    return {
        "aten::nll_loss_forward": lambda: functional.cross_entropy(scores, classes),
        "aten::nll_loss2d_forward": lambda: functional.cross_entropy(image, labels),
        "aten::mse_loss": lambda: functional.mse_loss(scores, scores.flip(0)),
        "aten::binary_cross_entropy_with_logits": lambda: functional.binary_cross_entropy_with_logits(
            scores, scores.sigmoid()
        ),
        "aten::smooth_l1_loss": lambda: functional.smooth_l1_loss(scores, scores.flip(0)),
    }


def _recurrent(numbers: _Make, indices: _Make) -> dict[str, Call]:
    words = numbers(16, 8, 32)
    zero = torch.zeros(1, 8, 64, device=words.device)
    weights = {gates: [numbers(gates * 64, 32), numbers(gates * 64, 64)] for gates in (3, 4)}
    rest = (False, 1, 0.0, False, False, False)
    return {
        "aten::lstm": lambda: torch.lstm(words, [zero, zero], weights[4], *rest),
        "aten::gru": lambda: torch.gru(words, zero, weights[3], *rest),
    }
