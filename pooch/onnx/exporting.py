"""Exports a trained model to an ONNX file, and checks that onnxruntime computes the same outputs."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..ground.errors import FileFormatError, PoochError, UsageError, WorkloadError
from ..ground.folders import TemporaryFolder
from ..ground.wording import error_text
from .file import require

if TYPE_CHECKING:
    import torch

    from ..workloads import Workload

_TOLERANCES = {"float64": 1e-6, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
_MOST_INLINE_BYTES = 3 * 2**29  # 1.5 GiB; a protobuf message holds at most 2 GiB


@dataclass(frozen=True, slots=True)
class ExportReport:
    """A comparison of a written file with PyTorch.

    Attributes:
        path: the file.
        size_bytes: size of the file and its external data.
        outputs: number of outputs compared.
        largest_difference: between elements of PyTorch's and onnxruntime's outputs.
        largest_output: the largest magnitude among PyTorch's outputs.
        tolerance: the largest difference that is accepted, as a share of the largest output.
        is_random: whether outputs differ more, but so do those of two runs in onnxruntime: the model draws numbers.
    """

    path: str
    size_bytes: int
    outputs: int
    largest_difference: float
    largest_output: float
    tolerance: float
    is_random: bool = False

    @property
    def relative_difference(self) -> float:
        """The difference as a share of the largest output."""
        return self.largest_difference / self.largest_output if self.largest_output else self.largest_difference

    @property
    def is_same(self) -> bool:
        """Whether the outputs agree within the tolerance."""
        return self.relative_difference <= self.tolerance

    def record(self) -> dict[str, object]:
        """Return the report for `--json`."""
        return asdict(self) | {"same": self.is_same}

    def line(self) -> str:
        """Return the report in one line."""
        if self.is_random:
            return (
                f"wrote {self.path}: its outputs are random, as two runs in onnxruntime differ: they were not compared"
            )
        return (
            f"wrote {self.path}: its {self.outputs} output(s) in onnxruntime differ by at most "
            f"{self.largest_difference:.1e}, {self.relative_difference:.1e} of the largest output "
            f"(tolerance: {self.tolerance:.0e})"
        )

    def refuse_different(self) -> None:
        """Check that the outputs agree.

        Raises:
            PoochError: they differ by more than the tolerance.
        """
        if not self.is_same and not self.is_random:
            raise PoochError(
                f"{self.path} gives different outputs in onnxruntime: they differ by {self.relative_difference:.1e} of "
                f"the largest output, more than the tolerance of {self.tolerance:.0e}: do not use the file"
            )


def onnx_exporter(path: Path, workload_name: str) -> Callable[[Workload], ExportReport]:
    """Return a function that exports a trained workload, after checking before training that it can.

    Args:
        path: file to write.
        workload_name: as typed on the command line.

    Raises:
        UsageError: the file is the model to train.
        WorkloadError: a package is missing.
    """
    if workload_name.endswith(".onnx") and Path(workload_name).resolve() == path.resolve():
        raise UsageError(f"{path} is the model to be trained: give --export another name")
    for package in ("onnx", "onnxruntime", "onnxscript"):
        require(package, "--export")
    return partial(export_trained, path=path)


def export_trained(workload: Workload, path: Path) -> ExportReport:
    """Write the model in inference mode, run the file in onnxruntime on the workload's own data, and compare.

    A model that came from an ONNX file is written back into its graph; any other is exported by `torch.onnx.export`.

    Args:
        workload: whose model is exported.
        path: file to write.

    Raises:
        WorkloadError: the model cannot be exported, or the file cannot be run.
        FileFormatError: the file cannot be written.
    """
    with _inferring(workload.model):
        call = _captured_call(workload)
        try:
            with TemporaryFolder(beside=path.resolve()) as folder:
                written = folder / path.name
                _write(workload.model, call, written)
                report = _compared(call, written, path)
                _move(folder, path)
        except OSError as error:
            raise FileFormatError(f"cannot write {path}: {error.strerror or error}: give another name") from error
    return report


@dataclass(frozen=True)
class _Call:
    """The only call of the model in a step: its arguments, and the tensors that it returned."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    outputs: list[torch.Tensor]

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors among the arguments, in order."""
        import torch
        from torch.utils import _pytree

        leaves = _pytree.tree_leaves((self.arguments, self.keywords))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


@contextmanager
def _inferring(model: torch.nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _captured_call(workload: Workload) -> _Call:
    """Run the forward pass of the step once without gradients, and record the call of its model."""
    import torch
    from torch.utils import _pytree

    calls: list[_Call] = []

    def remember(module: torch.nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], made: Any) -> None:
        outputs = [leaf for leaf in _pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        calls.append(_Call(arguments, dict(keywords), outputs))

    handle = workload.model.register_forward_hook(remember, with_kwargs=True)
    try:
        with torch.no_grad(), torch.random.fork_rng():
            workload.forward()
    finally:
        handle.remove()
    if len(calls) != 1:
        raise WorkloadError(
            f"the step calls its model {len(calls)} times, so it is unclear what to export: leave --export out"
        )
    return calls[0]


def _write(model: torch.nn.Module, call: _Call, path: Path) -> None:
    from .model import OnnxModel

    if isinstance(model, OnnxModel):
        _write_proto(model, path)
    else:
        _write_traced(model, call, path)


def _write_proto(model: Any, path: Path) -> None:
    import onnx

    from .writing import trained_proto

    proto = trained_proto(model)
    outside = proto.ByteSize() > _MOST_INLINE_BYTES
    onnx.save_model(proto, str(path), save_as_external_data=outside, location=f"{path.name}.data")


def _write_traced(model: torch.nn.Module, call: _Call, path: Path) -> None:
    import torch

    stored_bytes = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    try:
        with _quietly():
            torch.onnx.export(
                model, call.arguments, str(path), kwargs=call.keywords, dynamo=True, verbose=False,
                external_data=stored_bytes > _MOST_INLINE_BYTES,
            )  # fmt: skip
    except Exception as error:  # the exporter raises many types, with long texts
        kind = type(error).__name__
        raise WorkloadError(
            f"PyTorch cannot export the model to ONNX: {kind}: {error_text(error, 'no message')}"
        ) from error


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence the exporter, which writes to stdout, warnings and logs even when it succeeds."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _compared(call: _Call, written: Path, path: Path) -> ExportReport:
    (results,) = _run_file(call, written)
    if len(results) != len(call.outputs):
        raise WorkloadError(
            f"{path} gives {len(results)} outputs, but the model {len(call.outputs)}: leave --export out"
        )
    expected = [output.detach().cpu() for output in call.outputs]
    differences, magnitudes = [0.0], [0.0]
    for ours, theirs in zip(expected, results, strict=True):
        if ours.shape != theirs.shape:
            raise WorkloadError(f"{path} gives an output of shape {tuple(theirs.shape)} instead of {tuple(ours.shape)}")
        if ours.numel():
            differences.append(float((ours.double() - theirs.double()).abs().max()))
            magnitudes.append(float(ours.double().abs().max()))
    if any(value != value or value == float("inf") for value in magnitudes):
        raise WorkloadError(
            "the outputs of the trained model are not finite, so they cannot be compared: train fewer steps"
        )
    size = sum(each.stat().st_size for each in written.parent.iterdir())
    tolerance = max((_tolerance(each) for each in expected), default=0.0)
    report = ExportReport(str(path), size, len(results), max(differences), max(magnitudes), tolerance)
    return report if report.is_same else replace(report, is_random=_is_random(call, written))


def _is_random(call: _Call, path: Path) -> bool:
    first, second = _run_file(call, path, runs=2)
    return any(not one.equal(other) for one, other in zip(first, second, strict=True))


def _tolerance(output: torch.Tensor) -> float:
    return _TOLERANCES.get(str(output.dtype).removeprefix("torch."), 0.0)


def _run_file(call: _Call, path: Path, runs: int = 1) -> list[list[torch.Tensor]]:
    """Return the outputs of each run."""
    import onnxruntime
    import torch

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised as exceptions
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        names = [value.name for value in session.get_inputs()]
        given = {name: each.detach().cpu().numpy() for name, each in zip(names, call.tensors(), strict=True)}
        return [[torch.as_tensor(result) for result in session.run(None, given)] for _ in range(runs)]
    except Exception as error:  # onnxruntime's own types, which it does not export
        raise WorkloadError(f"onnxruntime cannot run the exported model: {error_text(error, 'no message')}") from error


def _move(folder: Path, path: Path) -> None:
    """Move the data first, so that the model never refers to missing data."""
    for written in sorted(folder.iterdir(), key=lambda each: each.name == path.name):
        written.replace(path.resolve().parent / written.name)
