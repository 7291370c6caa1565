"""Training in processes that the system stops, limits or leaves no room: right steps, one clear line, and no more."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.children import child_environment

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("copied_by")]
PATIENCE_S = 60

SCRIPT = """
import errno, hashlib, json, os, resource, sys, threading, time, warnings
import torch
import pooch
from pooch.executor.engines import spill_file
from torch.nn import functional
from tests.executor.copiers import copy_through_python
from tests.executor.online.zoo import Layers, rows
from tests.executor.support import all_of, quick_profile, tight_plan

torch.set_num_threads(1)
copy_through_python()
pooch.profiler.assembly.SMALLEST_ACTIVATION_BYTES = 1
ROWS, MIB = 1024, 2**20
way, told, failed, digests = sys.argv[1], [], [], []

def a_model():
    torch.manual_seed(1)
    return Layers(lambda hidden: functional.dropout(torch.tanh(hidden).sin(), 0.1), depth=8)

def digest(model):
    found = hashlib.blake2b(digest_size=8)
    for tensor in model.state_dict().values():
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()

def forward(model, inputs):
    return model(inputs).square().mean()

def train(model, steps, before=lambda number: None, after=lambda number: None):
    torch.manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for number in range(steps):
        inputs, state = rows(ROWS), torch.get_rng_state()
        while True:
            try:
                before(number)
                loss = forward(model, inputs)
                loss.backward()
                break
            except (pooch.PoochError, RuntimeError, MemoryError) as error:
                failed.append(f"{type(error).__name__}: {error}")
                loss = None
                optimizer.zero_grad()
                torch.set_rng_state(state)
            finally:
                after(number)
        del loss
        optimizer.step()
        optimizer.zero_grad()
        yield digest(model)

def train_under(model, steps, **options):
    \"\"\"Train under `pooch.auto`, or under a plan that swaps everything.\"\"\"
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, *_, **__: told.append(str(message))
    if way == "auto":
        held = pooch.auto(model, options.pop("budget", "70%"), cache=options.pop("cache", None), tell=told.append)
    else:
        inputs = rows(ROWS)
        profile = quick_profile(lambda: forward(model, inputs), model)
        model.zero_grad()
        held = pooch.apply(tight_plan(profile, all_of(profile, "swap", "model"), "model"), model)
    with held:
        digests.extend(train(model, steps, **options))
    return held

def only_copy():
    \"\"\"Have whatever leaves copied, in steps that no plan knows.\"\"\"
    from pooch.autopilot.requests import PlanRequests
    from pooch.executor.recording import CallRecorder
    CallRecorder._keep = lambda *_: None
    PlanRequests.ask = lambda *_: None

def report(**more):
    print(json.dumps({"digests": digests, "told": told, "failed": failed, **more}), flush=True)

"""
PLAIN = "model = a_model()\ndigests.extend(train(model, 8))\nreport()\n"


def started(body: str, *arguments: str, before: tuple[str, ...] = (), **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*before, sys.executable, "-c", SCRIPT + body, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=child_environment(OMP_NUM_THREADS="1", **environment),
    )  # fmt: skip


def finished(child: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 0, errors
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert all("\n" not in line for line in found["told"])
    return found


@pytest.fixture(scope="module")
def plain() -> list[str]:
    """What plain training gives after each step."""
    digests: list[str] = finished(started(PLAIN, "plain"))["digests"]
    assert len(set(digests)) == 8
    return digests


def of_the_tier(found: dict[str, Any], directory: Path) -> list[str]:
    return [line for line in found["told"] if str(directory) in line]


# Files that may not grow, and a disk that is full -------------------------------------------------------------------

FILE_LIMIT = """
real, wrote = os.pwrite, []

def noted(*given):
    written = real(*given)
    wrote.append((given[2], written, len(given[1])))
    if limited == [4] and len(wrote) % 5 == 0:  # in the middle of a step
        limited.append("now")
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB + 1000, resource.RLIM_INFINITY))
    return written

spill_file.os.pwrite = noted
limited = []

def before(number):
    if number == 4 and not limited:
        limited.append(4)
    if number == 6:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

only_copy()
model = a_model()
train_under(model, 8, before=before)
report(limited=limited, short=sum(written < asked for _, written, asked in wrote))
"""


@pytest.mark.parametrize("way", ["auto", "apply"])
def test_a_limit_of_file_sizes_in_mid_step(way: str, plain: list[str], tmp_path: Path) -> None:
    found = finished(started(FILE_LIMIT, way, POOCH_SPILL_DIRECTORY=str(tmp_path)))
    assert found["limited"] == [4, "now"]
    assert found["digests"] == plain
    assert found["failed"] == []
    lines = of_the_tier(found, tmp_path)
    assert len([line for line in lines if "takes no file as large as needed" in line and "over the" not in line]) == 1
    assert "files are limited to 1.00 MiB" in lines[0]
    assert "raise that with `ulimit -f`" in lines[0]


FULL_DISK = """
directory = os.environ["POOCH_SPILL_DIRECTORY"]
filled = []

def before(number):
    if number == 3 and not filled:
        if way == "auto":
            held[0].engine._free["step"].clear()  # as if the step before had needed none
        with open(os.path.join(directory, "other"), "wb") as other:
            try:
                while True:
                    filled.append(other.write(b"x" * 65536))
                    other.flush()
            except OSError as error:
                assert error.errno == errno.ENOSPC
                filled.append("full")
            try:
                other.close()
            except OSError:
                pass
    if number == 5:
        os.unlink(os.path.join(directory, "other"))

import pooch.executor.evictor as module
held = []
real = module.Evictor.__init__
def noted(self, *given, **named):
    real(self, *given, **named)
    held.append(self)
module.Evictor.__init__ = noted
only_copy()
model = a_model()
train_under(model, 8, before=before)
report(full="full" in filled)
"""


def unshared(directory: Path, size: str) -> tuple[str, ...]:
    """Return the command that runs another one where a small disk is mounted on a directory."""
    command = ("unshare", "--mount", *(() if os.getuid() == 0 else ("--user", "--map-root-user")))
    mount = f'mount -t tmpfs -o size={size} tmpfs "{directory}" && exec "$@"'
    if (
        not shutil.which("unshare")
        or subprocess.run([*command, "sh", "-c", mount, "sh", "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("disks cannot be mounted here")
    return (*command, "sh", "-c", mount, "sh")


@pytest.mark.parametrize("way", ["auto", "apply"])
def test_a_disk_that_fills_up(way: str, plain: list[str], tmp_path: Path) -> None:
    before = unshared(tmp_path, "12m")
    found = finished(started(FULL_DISK, way, before=before, POOCH_SPILL_DIRECTORY=str(tmp_path)))
    assert found["full"]
    assert found["digests"] == plain
    assert found["failed"] == []
    lines = of_the_tier(found, tmp_path)
    if way == "auto":  # a plan has its room already
        assert len([line for line in lines if "is full" in line and "over the" not in line]) == 1
        assert "free some room there, or choose another with POOCH_SPILL_DIRECTORY" in lines[0]


# Memory --------------------------------------------------------------------------------------------------------------

MEMORY_LIMIT = """
before_limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
limited = []

def before(number):
    if number in (3, 5) and number not in limited:
        limited.append(number)
        pages = int(open("/proc/self/statm").read().split()[0])
        more = MIB if number == 3 else 64 * 1024
        resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + more, resource.RLIM_INFINITY))
        torch.randn(32 * MIB).sum()  # as a batch that is larger than the others

def after(number):
    resource.setrlimit(resource.RLIMIT_AS, before_limit)

model = a_model()
train_under(model, 8, before=before, after=after)
report(limited=limited)
"""


@pytest.mark.parametrize("way", ["auto", "apply"])
def test_no_more_memory_is_the_programs_own_error_and_the_next_step_is_right(
    way: str, plain: list[str], tmp_path: Path
) -> None:
    found = finished(started(MEMORY_LIMIT, way, POOCH_SPILL_DIRECTORY=str(tmp_path)))
    assert found["limited"] == [3, 5]
    assert len(found["failed"]) == 2, found["failed"]
    assert all("memory" in error or "MemoryError" in error for error in found["failed"])
    assert found["digests"] == plain


IN_THE_STEP = MEMORY_LIMIT.replace(
    "        torch.randn(32 * MIB).sum()  # as a batch that is larger than the others\n",
    "        forward.__globals__['greedy'] = True\n",
).replace(
    "model = a_model()",
    """
greedy = False
real_forward = forward

def forward(model, inputs):
    global greedy
    loss = real_forward(model, inputs)
    if greedy:
        greedy = False
        loss = loss + torch.randn(32 * MIB).requires_grad_().sum()  # in the middle of a step
    return loss

model = a_model()""",
)


@pytest.mark.parametrize("way", ["auto", "apply"])
def test_no_more_memory_in_the_middle_of_a_step(way: str, plain: list[str], tmp_path: Path) -> None:
    found = finished(started(IN_THE_STEP, way, POOCH_SPILL_DIRECTORY=str(tmp_path)))
    assert found["limited"] == [3, 5]
    assert len(found["failed"]) == 2, found["failed"]
    assert all("memory" in error or "MemoryError" in error for error in found["failed"])
    assert found["digests"] == plain


# Processes that stand still ------------------------------------------------------------------------------------------

STOPPED = """
from pooch.machine import CopySpeed
from tests.copy_costs import costing

real_write, real_read, told_of = os.pwrite, os.preadv, set()

def copying(word, real, *given):
    if word not in told_of and len(digests) >= 3:
        told_of.add(word)
        print(word, flush=True)
        time.sleep(0.3)  # the parent stops the process here, in the middle of a copy
    return real(*given)

spill_file.os.pwrite = lambda *given: copying("writing", real_write, *given)
spill_file.os.preadv = lambda *given: copying("reading", real_read, *given)
# Else a busy machine may read nothing back.
for name, method in costing(lambda size_bytes: size_bytes * 1e-9).items():
    setattr(CopySpeed, name, method)
model = a_model()
started_s = time.monotonic()
train_under(model, 8)
report(words=sorted(told_of))
"""


@pytest.mark.parametrize("way", ["auto", "apply"])
def test_a_process_that_is_stopped_in_the_middle_of_a_copy_goes_on(way: str, plain: list[str], tmp_path: Path) -> None:
    child = started(STOPPED, way, POOCH_SPILL_DIRECTORY=str(tmp_path))
    assert child.stdout is not None
    stops = 0
    for _ in range(2):
        assert child.stdout.readline().strip() in ("writing", "reading")
        child.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        stops += os.WIFSTOPPED(status)
        time.sleep(0.7)
        child.send_signal(signal.SIGCONT)
    found = finished(child)
    assert stops == 2
    assert found["words"] == ["reading", "writing"]
    assert found["digests"] == plain
    assert found["failed"] == []
    assert [line for line in of_the_tier(found, tmp_path) if "is slow" not in line] == []  # it stood still


# Two at a time -------------------------------------------------------------------------------------------------------

BESIDE = """
seed = int(sys.argv[2])
if seed:
    a_plain_model = a_model
    def a_model():
        model = a_plain_model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + seed)
        return model
steps = int(sys.argv[3])
expected = list(train(a_model(), steps))
model = a_model()
print("ready", flush=True)
sys.stdin.readline()

def after(number):
    while held and held[0].is_planning:
        time.sleep(0.02)

held = []
real = pooch.auto
def noted(*given, **options):
    held.append(real(*given, **options))
    return held[0]
pooch.auto = noted
train_under(model, steps, after=after, cache=os.environ["CACHE"])
summary = held[0].summary()
report(expected=expected, on_plan=summary.steps_on_plan, swapped=summary.swapped_bytes, over=summary.steps_over_budget)
"""


@pytest.mark.slow
def test_two_trainings_share_a_spill_directory_and_a_cache_of_plans(tmp_path: Path) -> None:
    spill, cache = tmp_path / "spill", tmp_path / "cache"
    spill.mkdir()
    places = {"POOCH_SPILL_DIRECTORY": str(spill), "CACHE": str(cache)}
    for steps in ("7", "5"):  # the second time, both begin with what both have kept
        children = [started(BESIDE, "auto", seed, steps, **places) for seed in ("0", "1")]
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline().strip() == "ready"
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        both = [finished(child) for child in children]
        for found in both:
            assert found["digests"] == found["expected"]
            assert found["failed"] == []
            assert found["on_plan"] > 0
        assert both[0]["digests"] != both[1]["digests"]
        assert list(spill.iterdir()) == []
    assert any(cache.iterdir())
    assert all(found["on_plan"] >= 4 for found in both)


# Calls that are cut short --------------------------------------------------------------------------------------------

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/uio.h>
#include <unistd.h>
/* Every other call on a file at all is interrupted (1), or moves half (2), or all but an odd number of bytes (3). */
int cut = 0;
long hits = 0;
static long calls = 0;
static size_t shorter(size_t n) {
    if (cut == 2) return n > 8192 ? (n / 2) & ~4095UL : n;
    return n > 8192 ? n - 1001 : n;
}
static int is_hit(void) { return cut && ++calls % 2 && ++hits; }
ssize_t pwrite64(int fd, const void *from, size_t n, off_t at) {
    static ssize_t (*real)(int, const void *, size_t, off_t);
    if (!real) real = dlsym(RTLD_NEXT, "pwrite64");
    if (!is_hit()) return real(fd, from, n, at);
    if (cut == 1) { errno = EINTR; return -1; }
    return real(fd, from, shorter(n), at);
}
ssize_t pwrite(int fd, const void *from, size_t n, off_t at) { return pwrite64(fd, from, n, at); }
static ssize_t cut_read(int fd, const struct iovec *to, int count, off_t at) {
    static ssize_t (*real)(int, const struct iovec *, int, off_t);
    if (!real) real = dlsym(RTLD_NEXT, "preadv64");
    if (!is_hit() || count != 1) return real(fd, to, count, at);
    if (cut == 1) { errno = EINTR; return -1; }
    struct iovec less = {to[0].iov_base, shorter(to[0].iov_len)};
    return real(fd, &less, 1, at);
}
ssize_t preadv64(int fd, const struct iovec *to, int count, off_t at) { return cut_read(fd, to, count, at); }
ssize_t preadv(int fd, const struct iovec *to, int count, off_t at) { return cut_read(fd, to, count, at); }
ssize_t preadv64v2(int fd, const struct iovec *to, int count, off_t at, int f) { return cut_read(fd, to, count, at); }
ssize_t preadv2(int fd, const struct iovec *to, int count, off_t at, int f) { return cut_read(fd, to, count, at); }
"""
CUT_SHORT = """
import ctypes
shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
cut, hits = ctypes.c_int.in_dll(shim, "cut"), ctypes.c_long.in_dll(shim, "hits")

def before(number):
    if number:
        by_kind.append(hits.value - sum(by_kind))
    cut.value = 1 + number % 3

by_kind = []
only_copy()
model = a_model()
train_under(model, 8, before=before)
cut.value = 0
report(by_kind=by_kind)
"""


@pytest.mark.parametrize("way", ["auto", "apply"])
def test_calls_that_are_interrupted_or_cut_short_are_completed(way: str, plain: list[str], tmp_path: Path) -> None:
    compiler = shutil.which("cc") or pytest.skip("there is no C compiler")
    (tmp_path / "shim.c").write_text(SHIM)
    library = str(tmp_path / "shim.so")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, str(tmp_path / "shim.c"), "-ldl"], check=True)
    spill = tmp_path / "spill"
    spill.mkdir()
    found = finished(started(CUT_SHORT, way, LD_PRELOAD=library, POOCH_SPILL_DIRECTORY=str(spill)))
    assert len(found["by_kind"]) == 7
    assert all(hits > 5 for hits in found["by_kind"])  # in each step, whatever the kind
    assert found["digests"] == plain
    assert found["failed"] == []
    assert of_the_tier(found, spill) == []
