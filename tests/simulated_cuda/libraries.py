"""Build the libraries that stand in for CUDA's (runtime, driver, cuBLAS, cuBLASLt, NVRTC, NVML), and the kernels.

Each has the name, the symbols and the symbol versions of the installed one, read from it with `nm`: those that
`runtime/*.cpp` defines do what they say, all others are generated and refuse, by name. Nothing of NVIDIA's is copied;
its public headers are compiled against where pip put them.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
RUNTIME = HERE / "runtime"
FLAGS = ("-std=c++20", "-fPIC", "-pthread", f"-I{RUNTIME}")
KERNELS = "libsimulated_kernels.so"


@dataclass(frozen=True)
class Library:
    """One stand-in: its file name, its own sources, and what its generated functions do."""

    name: str
    sources: tuple[str, ...]
    generated: str
    needs: tuple[str, ...] = ()


REFUSE = 'int {name}() {{ return simulated_cuda_refuse("{name}"); }}'
CUDART = Library(
    "libcudart.so.13",
    ("settings.cpp", "memory.cpp", "pools.cpp", "races.cpp", "streams.cpp", "work.cpp", "cudart.cpp"),
    REFUSE,
)
DRIVER = Library("libcuda.so.1", ("driver.cpp",), REFUSE, (CUDART.name,))
CUBLAS = Library(
    "libcublas.so.13",
    ("cublas.cpp",),
    'int {name}(void *handle) {{ return simulated_cublas_product(handle, "{name}"); }}',
    (CUDART.name,),
)
CUBLASLT = Library("libcublasLt.so.13", ("cublaslt.cpp",), REFUSE, (CUDART.name,))
NVRTC = Library("libnvrtc.so.13", ("nvrtc.cpp",), REFUSE, (CUDART.name,))
NVML = Library("libnvidia-ml.so.1", ("nvml.cpp",), REFUSE, (CUDART.name,))
LIBRARIES = (CUDART, DRIVER, CUBLAS, CUBLASLT, NVRTC, NVML)
DECLARATIONS = "int simulated_cuda_refuse(const char *);\nint simulated_cublas_product(void *, const char *);\n"


def build(packages: Path, output: Path) -> None:
    """Compile all libraries.

    Args:
        packages: The `site-packages` with PyTorch's CUDA build.
        output: Folder for the libraries.

    Raises:
        subprocess.CalledProcessError: A compiler failed; it has said why.
    """
    (output / "objects").mkdir(parents=True, exist_ok=True)
    for library in LIBRARIES:
        _build_library(library, packages, output)
    _build_kernels(packages, output)


def _build_library(library: Library, packages: Path, output: Path) -> None:
    own = _compiled(
        [RUNTIME / source for source in library.sources],
        ("-O2", "-Wall", "-Wextra", "-Wno-unused-parameter", f"-I{packages / 'nvidia/cu13/include'}"),
        output,
    )
    stubs, versions = output / f"{library.name}.stubs.c", output / f"{library.name}.version"
    missing = sorted(_wanted(library, packages) - set(_symbols(own)))
    stubs.write_text(DECLARATIONS + "\n".join(library.generated.format(name=name) for name in missing) + "\n")
    versions.write_text(f"{library.name.replace('-', '_')} {{ global: *; }};\n")
    compiled_stubs = output / "objects" / f"{stubs.name}.o"
    _run("gcc", "-O1", "-fPIC", "-w", "-c", str(stubs), "-o", str(compiled_stubs))
    _run(
        *("g++", "-shared", "-pthread", f"-Wl,-soname,{library.name}", f"-Wl,--version-script={versions}"),
        *("-o", str(output / library.name), *map(str, own), str(compiled_stubs)),
        *(str(output / needed) for needed in library.needs),
    )


def _build_kernels(packages: Path, output: Path) -> None:
    torch = packages / "torch"
    includes = (torch / "include", torch / "include/torch/csrc/api/include", packages / "nvidia/cu13/include")
    objects = _compiled(
        sorted((HERE / "kernels").glob("*.cpp")), ("-O1", "-w", *(f"-I{folder}" for folder in includes)), output
    )
    _run(
        *("g++", "-shared", "-o", str(output / KERNELS), *map(str, objects), f"-L{torch / 'lib'}"),
        *("-ltorch_cpu", "-ltorch_cuda", "-lc10", "-lc10_cuda", str(output / CUDART.name)),
    )


def _compiled(sources: list[Path], options: tuple[str, ...], output: Path) -> list[Path]:
    def compiled(source: Path) -> Path:
        target = output / "objects" / f"{source.name}.o"
        _run("g++", *FLAGS, *options, "-c", str(source), "-o", str(target))
        return target

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compiled, sources))


def _wanted(library: Library, packages: Path) -> set[str]:
    """The symbols of the installed library; of the driver's, which pip does not carry, those that PyTorch looks for."""
    if library in (DRIVER, NVML):
        linked = _symbols(sorted((packages / "torch/lib").glob("*.so")), undefined=True)
        by_name = re.findall(rb"(?<=\0)\w+(?=\0)", (packages / "torch/lib/libc10_cuda.so").read_bytes())
        prefix = r"cu(?!File)[A-Z]" if library is DRIVER else "nvml[A-Z]"
        return {name for name in (*linked, *(name.decode() for name in by_name)) if re.match(prefix, name)}
    return set(_symbols([packages / "nvidia/cu13/lib" / library.name]))


def _symbols(files: Iterable[Path], undefined: bool = False) -> Iterable[str]:
    for file in files:
        dynamic = ["-D"] if ".so" in file.name else []
        which = "--undefined-only" if undefined else "--defined-only"
        listed = subprocess.run(["nm", *dynamic, which, str(file)], check=True, capture_output=True, text=True).stdout
        for line in listed.splitlines():
            *_, kind, symbol = line.split()
            name = symbol.partition("@")[0]
            if kind in "TUW" and name.isidentifier():
                yield name


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
