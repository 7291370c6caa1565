"""A workload from `model.onnx`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..ground.errors import PoochError, UsageError, WorkloadError
from ..ground.wording import error_text
from ..workloads.base import Workload
from ..workloads.settings import Setting
from .building import build_model
from .dimensions import input_shapes
from .inputs import index_bounds, random_inputs
from .loss import loss_for
from .model import OnnxModel
from .reading import opset_of, read_model
from .trainable import trained_names

MODES = ("exported", "train", "eval")


def onnx_builder(name: str) -> Callable[..., Workload]:
    """Return the function that builds the workload of a file."""

    def build(
        batch_size: int | None = None,
        device: str = "cpu",
        loss: str = "auto",
        mode: str = "exported",
        output: str = "",
        freeze: str = "",
        learning_rate: float = 0.01,
        momentum: float = 0.0,
        seed: int = 0,
        **dimensions: Setting,
    ) -> Workload:
        if mode not in MODES:
            raise UsageError(f"there is no mode {mode!r}: --set mode= takes {', '.join(MODES)}")
        path = Path(name)
        with _told_of(path):
            proto = read_model(path)
            shapes = input_shapes(proto.graph, batch_size, dimensions)
            trained = trained_names(proto.graph, freeze)
            if not trained:
                remedy = "check what --set freeze= matches" if freeze else "give a model with weights"
                raise WorkloadError(f"{path} has no weights to train: {remedy}")
            model = build_model(proto.graph, opset_of(proto, path), shapes, trained, mode, path).to(device)
            inputs = tuple(each.to(device) for each in random_inputs(proto.graph, shapes, seed))
        position = _output_position(model, output)
        takes_tokens = not index_bounds(proto.graph).keys().isdisjoint(model.input_names)
        result_like = model.outputs_like[position]
        compute_loss = loss_for(loss, result_like, takes_tokens, seed, torch.device(device))

        def forward() -> torch.Tensor:
            result = model(*inputs)
            return compute_loss(result[position] if isinstance(result, tuple) else result)

        optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=momentum)
        batch = next((shape.sizes[0] for shape in shapes if shape.sizes), 0)
        return Workload(model, forward, optimizer, path.name, batch)

    return build


@contextmanager
def _told_of(path: Path) -> Iterator[None]:
    """What a library raises over a file that it cannot understand, in one line about the file."""
    try:
        yield
    except PoochError:
        raise
    except Exception as error:
        text = error_text(error, type(error).__name__)
        raise WorkloadError(f"{path} cannot be built: {text}: export it again") from error


def _output_position(model: OnnxModel, wanted: str) -> int:
    """Return the position of the output for the loss: the named one, or the first of floating point numbers."""
    if wanted:
        if wanted not in model.output_names:
            raise UsageError(f"the model has no output {wanted!r}: it has {', '.join(model.output_names)}")
        return model.output_names.index(wanted)
    for position, output in enumerate(model.outputs_like):
        if output.is_floating_point():
            return position
    raise WorkloadError("the model has no output of floating point numbers, so there is nothing to train")
