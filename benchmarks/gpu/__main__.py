"""Everything that can only be shown on a GPU, in one command and at most twenty minutes.

    python -m benchmarks.gpu [--output build/gpu] [--minutes 20] [--part NAME ...] [--device cuda|cpu] [--small]

From a source tree, without a network: packages that are missing are taken from the folder .whl, if there is one
(`make gpu-wheels` fills it). Each part runs in a process of its own, so that none can take another one down. Writes
gpu.json, gpu.md and the recorded profiles. Where time on a machine is short, `--part` and `--minutes` divide the run.
What was not run is reported as not run, never as passed. Exit codes: 0 all parts ran and passed, 1 a part failed, 2
wrong usage, 3 nothing failed but not every part was run (no GPU, no time left, a package missing). `--device cpu
--small` rehearses every part on the CPU with tiny workloads.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.account import Account, Part, Result, exit_code
from benchmarks.gpu.report import write_report
from benchmarks.gpu.surroundings import EVERY_PART
from benchmarks.gpu.wheels import FOLDER, ROOT

# Seconds as they were on a machine with an H100, where importing PyTorch for the first time takes 20 of them.
PARTS = (
    Part("tests:gpu", 40, 170, ("pytest",)),
    Part("race", 30, 120),
    Part("links", 15, 40),
    Part("hooks", 15, 40),
    Part("auto:activations", 60, 180, ("transformers",)),
    Part("auto:state", 60, 180, ("transformers",)),
    Part("workload:resnet50", 60, 170),
    Part("workload:gpt2", 60, 170, ("transformers",)),
    Part("workload:unet3d", 60, 170, ("monai",)),
    Part("workload:lstm", 60, 170),
    Part("doctor", 40, 120),
    # Tests of either device, with their tensors on this one. They may take longer than what is left by now: then
    # `--part tests:either-device` runs them alone.
    Part("tests:two-devices", 15, 30, ("pytest",)),
    Part("tests:either-device", 60, 400, ("pytest", "expecttest")),
)
LOG_TAIL = 3000


def tell(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def child_environment(site: Path | None) -> dict[str, str]:
    """Deterministic cuBLAS, an allocator that splits exactly, the source tree and the carried packages."""
    path = [str(ROOT), *([str(site)] if site else []), os.environ.get("PYTHONPATH", "")]
    fixed = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        fixed["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return {"KINETO_LOG_LEVEL": "99", **os.environ, **fixed}


def unpack_wheels(folder: Path, site: Path) -> tuple[Path | None, str]:
    """Carried packages, installed beside; and a note where there are none or they do not fit this Python."""
    wheels = sorted(map(str, folder.glob("*.whl")))
    if not wheels:
        return None, f"no wheels in {folder.name}/"
    options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(site), *wheels]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return site, f"{len(wheels)} packages from {folder.name}/"
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return None, f"the wheels in {folder.name}/ were left alone: {last}"


def look_around(environment: dict[str, str]) -> dict[str, Any]:
    """Read in a process with the carried packages; this one has none of them."""
    command = [sys.executable, "-m", "benchmarks.gpu.surroundings"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def obstacle(part: Part, around: dict[str, Any], device: str) -> str:
    """Why the part cannot be begun here, or ""."""
    if device == "cuda" and not around["gpu"]:
        return "no CUDA device here" if "torch" not in around["missing"] else "torch is not installed"
    missing = [name for name in (*EVERY_PART, *part.needs) if name in around["missing"]]
    return f"not installed: {', '.join(missing)} (see make gpu-wheels)" if missing else ""


def run_part(part: Part, seconds: float, folder: Path, environment: dict[str, str], options: list[str]) -> Result:
    """Run one part in a process; what it has written by the time it is stopped still counts as data."""
    out, log = folder / "part.json", folder / "part.log"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu.part", part.name, "--out", str(out), *options]
    command += ["--seconds", f"{seconds - 3:.1f}"]  # the part itself stops a little earlier, in good order
    start = time.monotonic()
    with log.open("w") as stream:
        child = subprocess.Popen(
            command, stdout=stream, stderr=stream, env=environment, cwd=ROOT, start_new_session=True
        )
        try:
            code: int | None = child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
            child.wait()
            code = None
    took = time.monotonic() - start
    told: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    data = told.get("data", {})
    if code == 0 and "status" in told:
        return Result(part.name, told["status"], told.get("why", ""), took, data)
    why = f"stopped after {seconds:.0f} s" if code is None else f"its process ended with {code}"
    return Result(part.name, "failed", why, took, {**data, "log": log.read_text(errors="replace")[-LOG_TAIL:]})


def run_all(
    parts: list[Part], account: Account, arguments: argparse.Namespace, scratch: Path
) -> tuple[Any, list[Result]]:
    """Every part in turn, as far as time, packages and the machine go."""
    site, note = unpack_wheels(ROOT / FOLDER, scratch / "site")
    environment = child_environment(site)
    around = {**look_around(environment), "carried": note}
    tell(f"{around.get('device', 'no CUDA device here')}; {note}; missing: {', '.join(around['missing']) or 'nothing'}")
    options = ["--device", arguments.device, *(["--small"] if arguments.small else [])]
    options += ["--profiles", str(arguments.output)]
    results: list[Result] = []
    for part in parts:
        why, seconds = obstacle(part, around, arguments.device), account.grant_s(part)
        if not why and seconds is None:
            why = f"{account.left_s:.0f} s were left, it needs {part.least_s:.0f} s"
        if why or seconds is None:
            results.append(Result(part.name, "not run", why))
        else:
            tell(f"{part.name}: at most {seconds:.0f} s")
            results.append(run_part(part, seconds, scratch, environment, options))
        tell(f"{part.name}: {results[-1].status} {results[-1].why} ({results[-1].seconds:.0f} s)")
        write_report(arguments.output, around, results, arguments.device, arguments.small)
    return around, results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/gpu"), help="folder for the report")
    parser.add_argument("--minutes", type=float, default=20.0, help="time for everything")
    parser.add_argument("--part", action="append", choices=[part.name for part in PARTS], help="default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny workloads")
    arguments = parser.parse_args()
    arguments.output = arguments.output.absolute()
    account = Account(arguments.minutes * 60)
    chosen = [part for part in PARTS if not arguments.part or part.name in arguments.part]
    if arguments.small:
        chosen = [replace(part, least_s=1.0, most_s=240.0) for part in chosen]  # the machine may be a slow one
    scratch = Path(tempfile.mkdtemp(prefix="pooch-gpu-"))
    try:
        _, results = run_all(chosen, account, arguments, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    sys.stdout.write((arguments.output / "gpu.md").read_text())
    return exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
