"""Native code that calls Python without the interpreter's lock: Python 3.12 and later may end the process there.

Python's own checks of its memory find such a call in every version.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

from tests.children import ROOT, child_environment

TRAINING = """
import torch
import pooch

def layer():
    parts = torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.GELU(), torch.nn.Dropout(0.1)
    return torch.nn.Sequential(*parts, torch.nn.ReLU(inplace=True))

torch.manual_seed(0)
model = torch.nn.Sequential(*[layer() for _ in range(4)])
optimizer, rows = torch.optim.AdamW(model.parameters()), torch.randn(512, 64)

def step():
    loss = model(rows).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()

profile = pooch.profile(lambda: model(rows).square().mean(), model, optimizer)
for budget in ("min", "80%"):
    with pooch.apply(pooch.plan(profile, budget), model):
        for _ in range(3):
            step()
with pooch.auto(model, "60%", tell=lambda _: None):  # online, and on the plan that is made meanwhile
    for _ in range(6):
        step()
print("trained")
"""


def test_python_is_called_under_its_lock() -> None:
    command, environment = [sys.executable, "-c", TRAINING], child_environment(PYTHONMALLOC="debug")
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "trained\n", done.stderr


def names_before_the_lock(text: str) -> Iterator[str]:
    """The lines that make a name of Python's in a function that takes the lock, but only after them.

    Functions that do not take it are called with it.
    """
    for function in re.split(r"^(?=\S)", text, flags=re.MULTILINE):
        before, lock, _ = function.partition("  Gil gil;")
        yield from re.findall(r"^.*\binterned\(.*$", before if lock else "", re.MULTILINE)


def test_no_name_of_pythons_is_made_before_the_lock_is_taken() -> None:
    files = [file for ending in ("h", "cpp") for file in (ROOT / "pooch").rglob(f"*.{ending}")]
    assert files
    assert {str(file): found for file in files if (found := list(names_before_the_lock(file.read_text())))} == {}
    early = 'void f() {\n  static PyObject* const name = interned("act");\n  Gil gil;\n}\n'
    assert list(names_before_the_lock(early)) == ['  static PyObject* const name = interned("act");']
