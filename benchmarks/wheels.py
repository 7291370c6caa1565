"""Build the wheel with its native parts, and try it under each version of PyTorch.

    python -m benchmarks.wheels PYTHON... [--ready-made build/ready_made] [--wheels build/wheels]

Each PYTHON is the interpreter of an environment with one version of PyTorch and all else that Pooch requires. Parts are
built for each. Then the wheel is installed into an empty folder for each of them, where there is no compiler and no
cache, and README's script is trained plainly and under a budget of 60%. Fills the marked table of docs/install.md.
Times are those of the CPU, in medians of several processes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.tables import markdown_table, surroundings, tell
from pooch.ir.files import replace_file

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/wheels-cpu.json"
PAGE = ROOT / "docs/install.md"
IMPORTS = 3
LOADED = """
import json, time
def timed(act):
    begin = time.process_time()
    act()
    return time.process_time() - begin
def pooch():
    import pooch_planner
    pooch_planner.auto
def torch():
    import torch
def parts():
    from pooch_planner.ground import native
    from pooch_planner.packing import kernels
    from pooch_planner.torchtools import copier, watch
    from pooch_planner.torchtools.cpu_allocator import building
    from pooch_planner.torchtools.cuda_allocator import allocator
    assert watch.LIBRARY.get() is not None and copier.LIBRARY.get() is not None and kernels.kernels() is not None
    built = (watch.built_library, copier.built_library, building.built_library, building.built_observer)
    for library in (*built, allocator.built_library):
        assert library().parent == native.READY_MADE, library
def first():
    import pooch_planner
ours = timed(first)
print(json.dumps({"pooch": ours, "torch": timed(torch), "auto": timed(pooch), "parts": timed(parts)}))
"""


def run(command: Sequence[object], folder: Path = ROOT, **environment: str) -> str:
    finished = subprocess.run(
        [str(each) for each in command], cwd=folder, env=os.environ | environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if finished.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{finished.stdout}")
    return finished.stdout


def built_wheel(folder: Path, ready_made: Path | None) -> Path:
    """Build the wheel, with the parts of a folder or without any."""
    with tempfile.TemporaryDirectory() as made:
        environment = {} if ready_made is None else {"POOCH_READY_MADE": str(ready_made.resolve())}
        run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", made, "."], **environment)
        (wheel,) = Path(made).glob("*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        return wheel.replace(folder / wheel.name)


def script() -> str:
    """README's script, with a smaller batch and fewer steps."""
    text: str = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    assert "4096" in text
    assert "range(40)" in text
    return text.replace("4096", "1024").replace("range(40)", "range(12)")


def tried(python: Path, wheel: Path) -> dict[str, object]:
    """What happens where the wheel is installed for an interpreter."""
    version = run([python, "-c", "import torch; print(torch.__version__)"]).split()[-1]
    tell(f"{version}: {wheel.name}")
    with tempfile.TemporaryDirectory() as made:
        site, folder = Path(made, "site"), Path(made, "empty")
        folder.mkdir()
        run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel])
        (folder / "train.py").write_text(script())
        alone = {"PYTHONPATH": str(site), "CXX": "/nonexistent/c++", "POOCH_CACHE_DIRECTORY": str(folder / "cache")}
        times = [json.loads(run([python, "-c", LOADED], folder, **alone)) for _ in range(IMPORTS)]
        plain = run([python, "train.py"], folder, **alone)
        budgeted = run([python, "-m", "pooch_planner", "exec", "--budget", "60%", "train.py"], folder, **alone)
    lines = budgeted.splitlines()
    return {
        "torch": version,
        "parts_bytes": sum(each.file_size for each in ready_made_in(wheel, version)),
        "compressed_bytes": sum(each.compress_size for each in ready_made_in(wheel, version)),
        "same_loss": plain.strip() in lines,
        "verdict": next(line for line in lines if line.startswith("pooch: Budget")),
        "said": [line for line in lines if line.startswith("pooch: ")],
        "cpu_s": {name: [each[name] for each in times] for name in times[0]},
    }


def ready_made_in(wheel: Path, version: str) -> list[zipfile.ZipInfo]:
    """The parts in a wheel that a version of PyTorch uses: its own, and those that fit each of them."""
    public = version.partition("+")[0]
    files = [each for each in zipfile.ZipFile(wheel).infolist() if "/ready_made/" in each.filename]
    return [each for each in files if f"-{public}+" in each.filename or "+official" not in each.filename]


def row(result: dict) -> dict[str, object]:  # type: ignore[type-arg]
    times = {name: statistics.median(samples) for name, samples in result["cpu_s"].items()}
    return {
        "PyTorch": result["torch"],
        "parts": f"{result['parts_bytes'] / 2**20:.2f} MiB",
        "in the wheel": f"{result['compressed_bytes'] / 2**20:.2f} MiB",
        "same loss": "yes" if result["same_loss"] else "NO",
        "README's script at 60%": result["verdict"].removeprefix("pooch: ").partition(";")[0],
        "`import pooch_planner`": f"{1000 * times['pooch']:.0f} ms",
        "`import torch`": f"{times['torch']:.2f} s",
        "loading `pooch.auto`": f"{times['auto']:.2f} s",
        "loading the parts": f"{1000 * times['parts']:.0f} ms",
    }


def page(text: str, results: Sequence[dict], wheels: dict[str, int]) -> str:  # type: ignore[type-arg]
    """The page with its table."""
    sizes = "\n".join(f"- `{name}`: {size / 2**20:.2f} MiB" for name, size in wheels.items())
    middle = f"\n{markdown_table([row(each) for each in results])}\n\n{sizes}\n"
    begin, end = "<!-- wheels: begin -->", "<!-- wheels: end -->"
    before, _, rest = text.partition(begin)
    return f"{before}{begin}{middle}{end}{rest.partition(end)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="+", type=Path)
    parser.add_argument("--ready-made", type=Path, default=ROOT / "build/ready_made")
    parser.add_argument("--wheels", type=Path, default=ROOT / "build/wheels")
    parser.add_argument("--as-built", action="store_true", help="take the folder of ready-made parts as it is")
    options = parser.parse_args()
    for python in () if options.as_built else options.pythons:
        tell(run([python, "packaging/ready_made.py", options.ready_made], PYTHONPATH=str(ROOT)))
    wheels = [built_wheel(options.wheels, None), built_wheel(options.wheels, options.ready_made)]
    results = [tried(python, wheels[1]) for python in options.pythons]
    sizes = {wheel.name: wheel.stat().st_size for wheel in wheels}
    document = {"surroundings": surroundings(), "wheels": sizes, "results": results}
    replace_file(RESULT, f"{json.dumps(document, indent=1)}\n".encode())
    replace_file(PAGE, page(PAGE.read_text(), results, sizes).encode())
    assert all(each["same_loss"] for each in results), "a loss differs"


if __name__ == "__main__":
    main()
