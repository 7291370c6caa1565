"""`model.onnx`: a workload from an ONNX file. Importing this imports neither torch nor the onnx package."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from ..ground.errors import UnknownWorkload, WorkloadError
from ..ground.wording import why_no_file
from ..workloads.base import Workload

REMEDY = "pip install onnx onnxruntime onnxscript"  # an extra has no name that pip finds in every environment


def onnx_function(name: str) -> Callable[..., Workload]:
    """Return the builder for a file.

    Raises:
        UnknownWorkload: the file is missing, or a folder.
        WorkloadError: the onnx package is not installed.
    """
    if not Path(name).is_file():
        raise UnknownWorkload(f"the ONNX file {name!r} {why_no_file(Path(name))}: check the path")
    require("onnx", f"the workload {name!r}")
    from .workload import onnx_builder

    return onnx_builder(name)


def require(package: str, what: str) -> None:
    """Check that a package of the `onnx` extra is installed.

    Args:
        package: name of the package.
        what: what needs it, for the message.

    Raises:
        WorkloadError: it is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise WorkloadError(f"{what} needs the package {package!r}, which is not installed: {REMEDY}")
