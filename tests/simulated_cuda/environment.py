"""The virtual environment with PyTorch's CUDA build, and the variables under which a process meets the device."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.simulated_cuda import libraries

ROOT = Path(__file__).parents[2]
DEVELOPED_WITH = "2.14.1"
VERSION = os.environ.get("SIMULATED_CUDA_TORCH", DEVELOPED_WITH)  # each in a folder of its own
BUILD = ROOT / "build" / ("simulated_cuda" if VERSION == DEVELOPED_WITH else f"simulated_cuda-{VERSION}")
VENV = Path(os.environ.get("SIMULATED_CUDA_VENV", BUILD / "venv"))
TORCH = f"torch=={VERSION}"
AUTOLOAD = "simulated_cuda_autoload"


class Unavailable(Exception):
    """The simulated device cannot be set up here; the message says what is missing."""


def set_up() -> None:
    """Create the environment and build the libraries, each where it is missing or out of date.

    Raises:
        Unavailable: A compiler or PyTorch's CUDA build is not to be had.
    """
    for tool in ("g++", "gcc", "nm"):
        if shutil.which(tool) is None:
            raise Unavailable(f"{tool} was not found")
    _once(VENV / ".installed", _requirements(), _install)
    sources = sorted(path for path in libraries.HERE.rglob("*") if path.suffix in (".h", ".cpp"))
    _once(
        BUILD / "lib" / ".built",
        _digest([*sources, Path(libraries.__file__)]),
        lambda: libraries.build(packages(), BUILD / "lib"),
    )
    _write_autoload(BUILD / "autoload")


def set_up_or_tell() -> bool:
    """`set_up`, and whether that went well; where it did not, the reason is told in one line."""
    try:
        set_up()
    except (Unavailable, subprocess.CalledProcessError) as error:
        sys.stdout.write(f"SKIPPED: the simulated CUDA device cannot be set up here: {error}\n")
        return False
    return True


def packages() -> Path:
    """The environment's `site-packages`."""
    return VENV / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def variables(
    numbers: bool,
    device_memory_mib: int = 4096,
    devices: int = 1,
    inherited: Mapping[str, str] = os.environ,
    expandable_segments: bool = False,
) -> dict[str, str]:
    """The variables of a process that is to meet the simulated device.

    Args:
        numbers: Whether kernels compute (and memory that is given back is poisoned), or only take their time.
        device_memory_mib: Memory of each device; a hard limit.
        devices: How many devices there are.
        inherited: Variables to add to.
        expandable_segments: Whether the caching allocator maps memory into segments that grow; otherwise it does what
            the inherited variables say.
    """
    preloaded = " ".join(str(BUILD / "lib" / library.name) for library in libraries.LIBRARIES)
    paths = [str(ROOT), str(BUILD / "autoload"), *inherited.get("PYTHONPATH", "").split(os.pathsep)]
    ours = {
        "LD_PRELOAD": preloaded,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path for path in paths if path)),
        "PATH": os.pathsep.join([str(VENV / "bin"), inherited.get("PATH", "")]),
        "VIRTUAL_ENV": str(VENV),
        "SIMULATED_CUDA_MEMORY_MIB": str(device_memory_mib),
        "SIMULATED_CUDA_DEVICES": str(devices),
        "SIMULATED_CUDA_NUMBERS": str(int(numbers)),
        "SIMULATED_CUDA_POISON": str(int(numbers)),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "USE_PYTORCH_KERNEL_CACHE": "0",  # what is compiled here must not lie where a GPU's is looked for
        "TORCH_DISABLE_NATIVE_JIT": "1",  # kernels in Triton need a driver
    }
    if expandable_segments:
        ours["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return {**inherited, **ours}


def _requirements() -> str:
    """What is to be installed, as one digest: other parts of pyproject.toml do not matter."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [project["dependencies"], project["optional-dependencies"], (ROOT / "constraints.txt").read_text(), TORCH]
    return hashlib.sha256(repr(wanted).encode()).hexdigest()


def _install() -> None:
    if sys.version_info[:2] != (3, 11):
        raise Unavailable(f"PyTorch's CUDA build is kept here for Python 3.11; this is {sys.version.split()[0]}")
    constraints = VENV.parent / "constraints.txt"
    VENV.parent.mkdir(parents=True, exist_ok=True)
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    constraints.write_text("\n".join(line for line in pinned if not line.startswith("torch==")) + "\n")
    if not (VENV / "bin/python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    wanted = ["-e", f"{ROOT}[dev]", "-c", str(constraints), TORCH]
    command = [str(VENV / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
    if subprocess.run(command).returncode:
        raise Unavailable(f"{TORCH} (its CUDA build for Linux) could not be installed")
    if not (packages() / "torch/lib/libtorch_cuda.so").exists():
        raise Unavailable(f"the {TORCH} that pip found is not a CUDA build")


def _write_autoload(folder: Path) -> None:
    """What PyTorch loads by itself when it is imported: a backend, by its entry point in the group `torch.backends`.

    It also makes a process wait a moment before it ends. A backward pass holds a copy of the context variables,
    and PyTorch's thread of the device lets go of it a little after `backward()` returned; if Python ends just then, the
    process is aborted ("terminate called without an active exception"). Of scripts that end with `backward()`, without
    Pooch, that were 9 in 200; with the wait, none.
    """
    metadata = folder / f"{AUTOLOAD}-1.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    kernels = str(BUILD / "lib" / libraries.KERNELS)
    (folder / f"{AUTOLOAD}.py").write_text(
        "import atexit\nimport time\n\nimport torch\n\n\ndef load():\n"
        f"    torch.ops.load_library({kernels!r})\n    atexit.register(time.sleep, 0.2)\n"
    )
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {AUTOLOAD}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[torch.backends]\nsimulated = {AUTOLOAD}:load\n")


def _digest(files: list[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _once(stamp: Path, digest: str, act: Callable[[], None]) -> None:
    if stamp.exists() and stamp.read_text() == digest:
        return
    act()
    stamp.write_text(digest)
