"""`pooch exec`: a script runs as `python` runs it, and under the budget."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.children import child_environment

pytestmark = pytest.mark.slow  # each test starts processes that import torch

SMALL = r"""
import sys, torch
torch.manual_seed(0)
torch.set_num_threads(1)
def block():
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
def train(model, steps=6):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        loss = model(torch.randn(512, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sys.stdout.write(loss.item().hex() + "\n")  # at once, as two processes may write
        sys.stdout.flush()
"""
TRAINING = SMALL + "train(torch.nn.Sequential(*[block() for _ in range(4)]))\n"


class Folder:
    """A folder in which scripts run, with and without a budget."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.environment = child_environment(OMP_NUM_THREADS="1")

    def write(self, name: str, text: str) -> str:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name

    def python(self, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments], cwd=self.path, env=self.environment, input=given, capture_output=True,
            text=True, timeout=280, check=False,
        )  # fmt: skip

    def budgeted(self, *arguments: str, budget: str = "60%", given: str = "") -> subprocess.CompletedProcess[str]:
        return self.python("-m", "pooch", "exec", "--budget", budget, *arguments, given=given)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def without_summary(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("pooch: "))


def counted(summary: str, pattern: str) -> float:
    found = re.search(pattern, summary)
    assert found is not None, summary
    return float(found.group(1))


NOTHING_RAN = "pooch: no step was run under the budget: no model with trainable parameters"


def test_training_prints_the_same_losses_within_the_budget(folder: Folder) -> None:
    script = folder.write("train.py", TRAINING)
    plain, budgeted = folder.python(script), folder.budgeted(script)
    assert plain.returncode == budgeted.returncode == 0, budgeted.stderr
    assert len(plain.stdout.splitlines()) == 6
    assert budgeted.stdout == plain.stdout
    assert without_summary(budgeted.stderr) == plain.stderr
    steps = r"pooch: 6 steps: (\d+) on plan, (\d+) online"
    found = re.search(steps, budgeted.stderr)
    assert found is not None, budgeted.stderr
    assert int(found.group(1)) + int(found.group(2)) == 6
    assert "pooch: 512x64: 6 steps" in budgeted.stderr, "the first step is governed as the others are"
    verdict = r"pooch: Budget held: ([\d.]+) of ([\d.]+) MiB in all 6 steps"
    peak = counted(budgeted.stderr, verdict)
    budget = counted(budgeted.stderr, verdict.replace("([", "[", 1).replace("+)", "+", 1))
    assert 0 < peak <= budget < counted(budgeted.stderr, r"peak without Pooch ([\d.]+) MiB")
    assert re.findall(r"the budget is ([\d.]+) MiB", budgeted.stderr) == [f"{budget:.2f}"], "told once, and kept"
    swapped = counted(budgeted.stderr, r"([\d.]+) \w+ swapped")
    assert swapped + counted(budgeted.stderr, r"(\d+) ops? recomputed") > 0
    summary = budgeted.stderr[budgeted.stderr.index("pooch: Budget held") :].splitlines()
    assert re.fullmatch(r"pooch: [\d.]+ s in all: [\d.]+ s to start .* s in steps, .* s to end.*", summary[1])
    assert "recorded and" not in budgeted.stderr


SHOWN = """
import sys
print(__name__, __file__, __package__, __cached__ and "cached", type(__loader__).__name__, sorted(globals()))
print(sys.argv, sys.path[0], __spec__ and __spec__.name, sys.modules["__main__"].__dict__ is globals())
print(repr(sys.stdin.read()), __doc__)
sys.stderr.write("on stderr\\n")
"""


@pytest.mark.parametrize(
    "program",
    [
        ["here/show.py"],
        ["here/show.py", "--help", "--budget", "1", "-m", "x", "--", "--debug", "exec"],
        ["-m", "here.show", "--lr", "3", "--help", "--", "-m"],
        ["-mhere", "--quiet"],
        ["here", "a"],
    ],
    ids=lambda program: " ".join(program),
)
def test_a_program_sees_what_it_sees_under_python(folder: Folder, program: list[str]) -> None:
    for name in ("show.py", "__main__.py"):
        folder.write(f"here/{name}", '"""What this is."""' + SHOWN)
    plain, budgeted = folder.python(*program, given="a\nb"), folder.budgeted(*program, given="a\nb")
    assert plain.returncode == 0, plain.stderr
    assert "'a\\nb'" in plain.stdout
    assert budgeted.stdout == plain.stdout
    assert without_summary(budgeted.stderr) == plain.stderr == "on stderr\n"
    assert NOTHING_RAN in budgeted.stderr
    assert budgeted.returncode == 0


@pytest.mark.parametrize(
    "ending",
    [
        "sys.exit()",
        "sys.exit(0)",
        "sys.exit(7)",
        "sys.exit('what went wrong')",
        "raise SystemExit((1, 2))",
        "1 / 0",
        "def inner():\n    raise ValueError('no') from KeyError('first')\ninner()",
        "sys.excepthook = lambda kind, value, traceback: print(kind.__name__)\n1 / 0",
        "def broken(:",
        "os.kill(os.getpid(), signal.SIGINT); time.sleep(9)",
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)",
        "os.abort()",
    ],
)
def test_a_program_ends_as_under_python(folder: Folder, ending: str) -> None:
    script = folder.write("end.py", f"import os, signal, sys, time\n{ending}\n")
    plain, budgeted = folder.python(script), folder.budgeted(script)
    assert budgeted.returncode == plain.returncode
    assert without_summary(budgeted.stderr) == plain.stderr
    assert budgeted.stdout == plain.stdout
    assert (NOTHING_RAN in budgeted.stderr) is not (plain.returncode in (-signal.SIGTERM, -signal.SIGABRT))


@pytest.mark.parametrize(
    ("ending", "code"), [("raise RuntimeError('after training')", 1), ("sys.exit(3)", 3), ("sys.exit('bad')", 1)]
)
def test_the_summary_follows_however_the_script_ends(folder: Folder, ending: str, code: int) -> None:
    script = folder.write("train.py", f"{TRAINING}\n{ending}\n")
    ended = folder.budgeted(script)
    assert ended.returncode == code
    assert "pooch: 6 steps" in ended.stderr
    if "Runtime" in ending:
        _, first, *_ = ended.stderr[ended.stderr.index("Traceback") :].splitlines()
        assert f'File "{folder.path / script}"' in first
        assert "pooch/" not in without_summary(ended.stderr)


def test_an_interrupt_in_training_ends_it_as_under_python(folder: Folder) -> None:
    script = folder.write("train.py", SMALL + "train(block(), steps=10**9)\n")
    command = [sys.executable, "-m", "pooch", "exec", "--budget", "60%", script]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=folder.path, env=folder.environment, stdout=pipe, stderr=pipe, text=True) as ran:
        assert ran.stdout is not None
        for _ in range(3):
            assert float.fromhex(ran.stdout.readline()) > 0
        ran.send_signal(signal.SIGINT)
        _, errors = ran.communicate(timeout=120)
    assert ran.returncode == -signal.SIGINT, errors
    assert "\nKeyboardInterrupt\n" in errors
    assert re.search(r"pooch: \d+ steps", errors)


WORKERS = """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        held = [torch.ones(2**20) for _ in range(8)]  # more than the budget
        other = block()
        loss = other(torch.ones(64, 64)).mean()
        loss.backward()
        kind = type(vars(torch.nn.Module)["_compiled_call_impl"]).__name__
        assert kind == ("NoneType" if METHOD == "spawn" else "ModelFinder")
        if "model" in globals():  # forked: the model is governed from the first step of its parent on
            globals()["model"](torch.ones(4, 64))
            assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        return torch.full((64,), float(index) + other[0].weight.grad.abs().sum().item() * 0)
if __name__ == "__main__":
    model = torch.nn.Sequential(*[block() for _ in range(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        loader = torch.utils.data.DataLoader(Data(), batch_size=6, num_workers=1, multiprocessing_context=METHOD)
        for batch in loader:
            loss = model(batch.repeat(100, 1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(loss.item().hex())
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_that_load_data_are_left_alone(folder: Folder, method: str) -> None:
    text = (SMALL + WORKERS).replace("METHOD", repr(method))
    script = folder.write("train.py", text)
    plain = folder.python(folder.write("plain.py", re.sub(".*assert.*\n", "", text)))
    budgeted = folder.budgeted(script, budget="6MiB")
    assert budgeted.returncode == 0, budgeted.stderr
    assert budgeted.stdout == plain.stdout
    assert len(plain.stdout.splitlines()) == 4
    assert budgeted.stderr.count("pooch: 4 steps") == 1, budgeted.stderr


TWO = """
G, D = (torch.nn.Sequential(*[block() for _ in range(3)]) for _ in range(2))
optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (G, D)]
for _ in range(4):
    for part, sign in ((D, 1.0), (G, -1.0)):
        loss = sign * D(G(torch.randn(512, 64))).tanh().mean()
        loss.backward()
        print(loss.item().hex())
        optimizers[part is D].step()
        for each in optimizers:
            each.zero_grad()
"""


def test_two_models_share_the_budget(folder: Folder) -> None:
    script = folder.write("gan.py", SMALL + TWO)
    plain, budgeted = folder.python(script), folder.budgeted(script, budget="70%")
    assert budgeted.returncode == 0, budgeted.stderr
    assert budgeted.stdout == plain.stdout
    assert "pooch: 8 steps" in budgeted.stderr
    assert "Budget held: " in budgeted.stderr
    # Both of their activations are in the peak of a step: three blocks hold a third of that less.
    assert counted(budgeted.stderr, r"peak without Pooch ([\d.]+) MiB") > 2 * 3 * 512 * 256 * 4 / 2**20


LATER = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.front, self.back = block(), torch.nn.Sequential(*[block() for _ in range(3)])
    def forward(self, x):
        return self.back(self.front(x))
net = Net()
train(net.front, 2)
train(net, 4)
train(net.back[1], 2)
"""


def test_a_model_takes_over_its_parts(folder: Folder) -> None:
    script = folder.write("later.py", SMALL + LATER)
    plain, budgeted = folder.python(script), folder.budgeted(script, budget="9MiB")
    assert budgeted.returncode == 0, budgeted.stderr
    assert budgeted.stdout == plain.stdout
    assert "pooch: 8 steps" in budgeted.stderr


def test_a_model_of_torchscript_runs_outside_of_the_budget(folder: Folder) -> None:
    model = "torch.nn.Sequential(*[block() for _ in range(4)])"
    script = folder.write("train.py", f"{SMALL}train(torch.jit.script({model}))\n")
    plain, budgeted = folder.python(script), folder.budgeted(script)
    assert budgeted.returncode == plain.returncode == 0, budgeted.stderr
    assert budgeted.stdout == plain.stdout
    assert "pooch: no step was run under the budget: " in budgeted.stderr
    assert "TorchScript" in budgeted.stderr


IN_PLACE = """
model = torch.nn.Sequential(*[block() for _ in range(4)])
for part in {parts}:
    part.compile(backend="aot_eager")
train(model)
print(torch._dynamo.utils.counters["stats"]["unique_graphs"], dict(torch._dynamo.utils.counters["frames"]))
"""


@pytest.mark.parametrize("parts", ["model", "[model]"])
def test_a_script_that_compiles_its_model_or_parts_of_it_is_governed(folder: Folder, parts: str) -> None:
    script = folder.write("train.py", SMALL + IN_PLACE.format(parts=parts))
    plain, budgeted = folder.python(script), folder.budgeted(script)
    assert budgeted.returncode == plain.returncode == 0, budgeted.stderr
    assert budgeted.stdout == plain.stdout, "the numbers, and what was compiled"
    assert "pooch: 6 steps" in budgeted.stderr


FROZEN = """
net = torch.nn.Sequential(*[block() for _ in range(4)]).requires_grad_(False)
picture = torch.randn(512, 64, requires_grad=True)
optimizer = torch.optim.SGD([picture], lr=1e5)
target = net(torch.randn(512, 64))  # nothing is trained by it
for _ in range(6):
    loss = (net(picture) - target).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex(), picture.detach().sum().item().hex())
"""


def test_a_frozen_model_whose_input_is_trained_is_governed(folder: Folder) -> None:
    """As in neural style, or for adversarial examples."""
    script = folder.write("style.py", SMALL + FROZEN)
    plain, budgeted = folder.python(script), folder.budgeted(script, budget="75%")
    assert budgeted.returncode == 0, budgeted.stderr
    assert budgeted.stdout == plain.stdout
    assert "pooch: 6 steps" in budgeted.stderr
    assert "Budget held: " in budgeted.stderr


def test_lazy_modules_find_their_shapes_first(folder: Folder) -> None:
    text = (
        SMALL
        + "model = torch.nn.Sequential(torch.nn.LazyLinear(64), block())\nmodel(torch.ones(1, 64))\ntrain(model)\n"
    )
    script = folder.write("lazy.py", text)
    plain, budgeted = folder.python(script), folder.budgeted(script)
    assert budgeted.returncode == 0, budgeted.stderr
    assert budgeted.stdout == plain.stdout
    assert "pooch: 6 steps" in budgeted.stderr


def test_quiet_prints_nothing_and_the_page_tells_what_happened(folder: Folder) -> None:
    script = folder.write("<b>.py", TRAINING)
    ended = folder.budgeted("--quiet", "--report", "out.html", script)
    assert ended.returncode == 0
    assert ended.stderr == ""
    page = (folder.path / "out.html").read_text()
    assert "<h1>Run of &lt;b&gt;.py</h1>" in page
    assert "6 steps" in page
    assert "<td>512x64</td><td>6</td>" in page
    again = folder.budgeted("--report", "out.html", script)
    assert again.returncode == 2
    assert "--force" in again.stderr


def test_the_page_is_there_while_the_script_runs(folder: Folder) -> None:
    looks = """
from pathlib import Path
model = block()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(512, 64)).square().mean().backward()
optimizer.step()
text = Path("out.html").read_text()
print("http-equiv='refresh'".replace("'", '"') in text, "1 step: " in text)
"""
    ended = folder.budgeted("--quiet", "--report", "out.html", folder.write("train.py", SMALL + looks))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "True True\n"
    page = (folder.path / "out.html").read_text()
    assert 'http-equiv="refresh"' not in page, "the last version stays"
    assert "--report out.html train.py</code></footer>" in page


PARALLEL = """
import os
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(*[block() for _ in range(4)])
if KIND == "DDP":
    model = torch.nn.parallel.DistributedDataParallel(model)
else:
    from torch.distributed.fsdp import fully_shard
    for part in model:
        fully_shard(part)
    fully_shard(model)
torch.manual_seed(int(os.environ["RANK"]))
train(model)
torch.distributed.destroy_process_group()
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def torchrun(folder: Folder, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Two ranks. A plain rank of gloo aborts now and then when it ends, after all of its work: then once more."""
    for _ in range(3):
        done = folder.python(*TORCHRUN, *arguments)
        if done.returncode == 0 or "terminate called without an active exception" not in done.stderr:
            break
    return done


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_each_process_of_torchrun_holds_the_budget(folder: Folder, kind: str) -> None:
    script = folder.write("parallel.py", SMALL + PARALLEL.replace("KIND", repr(kind)))
    plain = torchrun(folder, script)
    options = ("--budget", "60%", "--host-budget", "16MiB")
    budgeted = torchrun(folder, "-m", "pooch", "exec", *options, script)
    assert plain.returncode == 0, plain.stderr
    assert budgeted.returncode == 0, budgeted.stderr
    assert sorted(budgeted.stdout.splitlines()) == sorted(plain.stdout.splitlines())
    for rank in range(2):
        assert f"pooch (rank {rank}): 6 steps: " in budgeted.stderr
    assert budgeted.stderr.count("Budget held: ") == 2
    assert budgeted.stderr.count("16.00 MiB of this machine: 8.00 MiB for each of 2 ranks") == 1, budgeted.stderr
    taken = re.findall(r"the 2 ranks of this machine took ([\d.]+) MiB of swap tier, of 16.00 MiB", budgeted.stderr)
    assert len(taken) == 1, budgeted.stderr
    assert 0 < float(taken[0]) <= 16


STARTING = """
import multiprocessing, os
class Trains(multiprocessing.get_context("fork").Process):
    def run(self):
        train(torch.nn.Sequential(*[block() for _ in range(4)]))
def rank(number):
    meeting = "file://" + os.path.abspath(sys.argv[1])
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=number, world_size=2)
    train(torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*[block() for _ in range(4)])))
    torch.distributed.destroy_process_group()
if __name__ == "__main__":
    forked = Trains(name="forked")
    forked.start()
    forked.join()
    list(torch.utils.data.DataLoader([0, 1], num_workers=1))
    torch.multiprocessing.spawn(rank, nprocs=2)
"""


def test_each_process_that_the_script_starts_holds_the_budget(folder: Folder) -> None:
    script = folder.write("starting.py", SMALL + STARTING)
    plain = folder.python(script, "plainly")
    budgeted = folder.budgeted("--report", "page.html", script, "budgeted")
    assert plain.returncode == 0, plain.stderr
    assert budgeted.returncode == 0, budgeted.stderr
    assert sorted(budgeted.stdout.splitlines()) == sorted(plain.stdout.splitlines())
    for name in ("forked", "rank 0", "rank 1"):
        assert len(re.findall(rf"pooch \({name}\): Budget held: [\d.]+ of [\d.]+ MiB", budgeted.stderr)) == 1
        assert f"pooch ({name}): 6 steps: " in budgeted.stderr
        assert len(re.findall(rf"pooch \({name}\): [\d.]+ MiB swapped", budgeted.stderr)) == 1
    assert "the script has started 3 processes through multiprocessing" in budgeted.stderr
    pages = sorted(path.name for path in folder.path.glob("*.html"))
    assert pages == ["page.forked.html", "page.html", "page.rank1.html"]


LATE = """
import multiprocessing, sys
def is_loaded(_):
    return [name in sys.modules for name in ("torch", "pooch.autopilot")]
def work():
    import training
    training.train(training.torch.nn.Sequential(*[training.block() for _ in range(4)]))
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        print(pool.map(is_loaded, [0]), flush=True)
    late = context.Process(target=work, name="late")
    late.start()
    late.join()
"""


def test_a_process_that_does_not_train_loads_nothing_and_one_that_imports_pytorch_late_is_governed(
    folder: Folder,
) -> None:
    folder.write("training.py", SMALL)
    script = folder.write("late.py", LATE)
    plain, budgeted = folder.python(script), folder.budgeted(script)
    assert plain.returncode == 0, plain.stderr
    assert budgeted.returncode == 0, budgeted.stderr
    assert budgeted.stdout == plain.stdout
    assert plain.stdout.startswith("[[False, False]]")
    assert len(re.findall(r"pooch \(late\): Budget held: [\d.]+ of [\d.]+ MiB", budgeted.stderr)) == 1


FAILING = """
class Fails(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.step = len(seen)
        seen.append(0)
        return x.clone()
    @staticmethod
    def backward(context, gradient):
        if context.step == 3 and os.environ["RANK"] == "1":
            raise ValueError("no gradient today")
        return gradient
import os
seen = []
class Net(torch.nn.Sequential):
    def forward(self, x):
        return Fails.apply(super().forward(x))
torch.distributed.init_process_group("gloo")
train(torch.nn.parallel.DistributedDataParallel(Net(*[block() for _ in range(4)])))
"""


def test_a_rank_that_fails_is_named_and_ends_the_others(folder: Folder) -> None:
    script = folder.write("failing.py", SMALL + FAILING)
    begin_s = time.monotonic()
    ended = folder.python(*TORCHRUN, "-m", "pooch", "exec", "--budget", "60%", script)
    assert ended.returncode == 1
    why = "rank 1 failed: ValueError: no gradient today"
    assert f"pooch (rank 1): {why}; the other ranks end with it" in ended.stderr
    # The other one is ended by torchrun, or notices before that.
    assert len(re.findall(r"pooch \(rank 0\): rank \d failed", ended.stderr)) <= 1
    assert "rank 0 failed" not in ended.stderr
    assert time.monotonic() - begin_s < 200


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["--budget", "60%"], 2, "there is no script"),
        (["--budget", "60%", "missing.py"], 2, "there is no script missing.py"),
        (["--budget", "60%", "."], 2, "has no __main__.py"),
        (["--budget", "much", "a.py"], 2, "the budget 'much' does not parse"),
        (["--budget", "min", "a.py"], 2, "cannot be 'min'"),
        (["--budget", "1GiB", "--host-budget", "x", "a.py"], 2, "the host budget 'x' does not parse"),
        (["a.py"], 2, "Missing option '--budget'"),
        (["--budget", "60%", "-m"], 2, "Option '-m' requires an argument"),
        (["--budget", "1GiB", "--report", "no/out.html", "a.py"], 2, "the folder of no/out.html does not exist"),
    ],
)
def test_wrong_usage_is_told_in_one_line_before_anything_runs(
    folder: Folder, arguments: list[str], code: int, error: str
) -> None:
    folder.write("a.py", "print('it ran')\n")
    ended = folder.python("-m", "pooch", "exec", *arguments)
    assert ended.returncode == code
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith("pooch: ")
    assert error in line


def test_the_command_does_not_need_the_checkout_on_the_path(folder: Folder) -> None:
    """The folder of the `pooch` command makes room for that of the script."""
    folder.write("deep/helper.py", "WORD = 'from the folder of the script'\n")
    script = folder.write("deep/use.py", "import helper\nprint(helper.WORD)\n")
    arguments = ["exec", "--budget", "1GiB", script]
    start = f"import sys; sys.path.insert(0, 'bin'); from pooch.cli import main; sys.exit(main({arguments!r}))"
    ended = subprocess.run(
        [sys.executable, "-c", start], cwd=folder.path, env=os.environ | folder.environment, capture_output=True,
        text=True, timeout=200, check=False,
    )  # fmt: skip
    assert ended.stdout == "from the folder of the script\n", ended.stderr
