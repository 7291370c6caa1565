"""The package asks what a device is in one place: nothing else calls CUDA, or decides by its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
THE_FILE = "pooch/torchtools/cuda_only.py"
NAMES = ("cuda", "hip", "xpu", "mps", "mtia", "npu")
SOURCES = [path for folder in ("pooch", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
COMMAND_LINE = {"benchmarks/gpu"}  # `--device cuda` is what its command takes, not what a device turned out to be


def vendor_calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every `torch.cuda`, `torch.xpu`, ..., import of one, and `tensor.is_cuda`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_module = node.attr in NAMES and isinstance(node.value, ast.Name) and node.value.id == "torch"
            if is_module or node.attr in {f"is_{name}" for name in NAMES}:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            if any(name.startswith(tuple(f"torch.{vendor}" for vendor in NAMES)) for name in modules):
                yield node.lineno, ast.unparse(node)


def decisions_by_name(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every comparison with such a name, `device.type.startswith("cuda")`, and `torch.device("cuda")`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            inside = [each for operand in (node.left, *node.comparators) for each in ast.walk(operand)]
        elif isinstance(node, ast.Call):
            inside = [*node.args] if ast.unparse(node.func).endswith((".startswith", "torch.device", "_module")) else []
        else:
            continue
        if any(isinstance(each, ast.Constant) and str(each.value).partition(":")[0] in NAMES for each in inside):
            yield node.lineno, ast.unparse(node)


def found_in(path: Path) -> Iterator[str]:
    name, tree = str(path.relative_to(ROOT)), ast.parse(path.read_text())
    decisions = () if str(Path(name).parent) in COMMAND_LINE else decisions_by_name(tree)
    yield from (f"{name}:{line}: {text}" for line, text in (*vendor_calls(tree), *decisions))


def test_no_other_file_knows_a_vendor() -> None:
    assert len(SOURCES) > 250
    assert [each for path in SOURCES if path != ROOT / THE_FILE for each in found_in(path)] == []


def test_the_search_finds_what_it_is_for() -> None:
    calls = "import torch.cuda\ntorch.cuda.synchronize()\nfrom torch.xpu import Stream\nif tensor.is_cuda: pass\n"
    assert sorted(line for line, _ in vendor_calls(ast.parse(calls))) == [1, 2, 3, 4]
    decisions = (
        'device.type == "cuda"\nkind in ("cpu", "cuda")\ntorch.device("cuda", 0)\nname.startswith("cuda")\n'
        'torch.get_device_module("xpu")\n'
    )
    assert sorted(line for line, _ in decisions_by_name(ast.parse(decisions))) == [1, 2, 3, 4, 5]
    assert list(found_in(ROOT / THE_FILE))
