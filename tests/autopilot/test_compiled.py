"""Models that are compiled, in part or as a whole, under a budget."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pooch.autopilot import auto
from pooch.executor.compiled import CopiedCalls
from tests.autopilot.under import Under
from tests.children import child_environment
from tests.compiled_models import (
    MODELS,
    WIDTH,
    Language,
    Trained,
    Way,
    blocks_in_place,
    blocks_wrapped,
    data_of,
    trained,
    whole,
    whole_in_place,
    whole_without_breaks,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def compared(name: str, way: Way, backend: str, budget: str = "70%", **options: Any) -> tuple[Trained, Under]:
    """Train under a budget and plainly, which must give the same bits and compile as much."""
    under = Under(budget)
    budgeted = trained(name, way, backend, prepared=under, **options)  # first: a share is of all that is alive
    plain = trained(name, way, backend, **options)
    assert budgeted.is_as(plain)
    assert budgeted.compiled == plain.compiled, "nothing is compiled by us, and nothing anew"
    return plain, under


def assert_held(under: Under) -> None:
    summary = under.summary
    assert summary is not None
    assert summary.steps_over_budget == 0, under.told
    assert_governed(under)


def assert_governed(under: Under) -> None:
    summary = under.summary
    assert summary is not None
    assert summary.swapped_bytes > 0
    assert summary.recomputed_ops == 0
    assert not summary.ungoverned


@pytest.mark.parametrize("way", [blocks_in_place, blocks_wrapped])
def test_compiled_blocks_train_within_a_budget(way: Way) -> None:
    _, under = compared("language", way, "aot_eager")
    assert_held(under)


@pytest.mark.parametrize("way", [whole, whole_in_place, whole_without_breaks])
def test_a_model_compiled_as_a_whole_trains_within_half_of_what_it_takes(way: Way) -> None:
    _, under = compared("language", way, "aot_eager", "50%")
    assert_held(under)


def test_inductor_holds_the_budget_of_a_model_compiled_as_a_whole() -> None:
    _, under = compared("language", whole, "inductor", "50%", steps=4)
    assert_held(under)


def test_what_was_compiled_before_it_is_given_comes_back_at_once_and_one_line_tells_the_excess() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.compile(Language(), backend="aot_eager")
    tokens, targets = data_of("language", torch.Generator().manual_seed(1))
    functional.cross_entropy(model(tokens), targets).backward()
    under = Under("50%")
    with under(model):
        for _ in range(4):
            model.zero_grad()
            functional.cross_entropy(model(tokens), targets).backward()
    assert under.summary is not None
    assert under.summary.steps_over_budget > 0
    (line,) = [line for line in under.told if "over the budget" in line]
    assert "a compiled graph or an op needs the rest at once: compile" in line


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_each_kind_of_model(name: str, autocast: bool, backend: str) -> None:
    _, under = compared(name, blocks_in_place, backend, "85%", autocast=autocast)
    if name != "skips":  # the program holds most of what it needs at its highest peak
        assert_held(under)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", MODELS)
def test_each_kind_of_model_compiled_as_a_whole(name: str, backend: str) -> None:
    for autocast in (False, True):
        compared(name, whole, backend, autocast=autocast)


class Changing(nn.Module):
    """A compiled part that writes to what eager parts have saved, read or will read, as far as autograd lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(WIDTH))
        self.part = torch.compile(self._part, backend="aot_eager")

    def _part(self, rows: Tensor, shift: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(0.9).add_(rows.mean(0), alpha=0.1)
            shift.data.add_(1)
        return rows.mul_(2).tanh() * self.scale

    def forward(self, rows: Tensor) -> Tensor:
        shift = torch.zeros(WIDTH)
        for _ in range(6):
            rows = functional.gelu(self.first(rows)) * self.scale.clone() + shift.clone()
            rows = self.part(rows + 1, shift).exp().sigmoid()
        return self.last(rows)  # type: ignore[no-any-return]


def gradients(model: nn.Module, steps: int = 4, called: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    torch.manual_seed(1)
    for _ in range(steps):
        model.zero_grad()
        functional.cross_entropy((called or model)(torch.randn(512, WIDTH)), torch.randint(10, (512,))).backward()
    return [each.clone() for each in (*model.buffers(), *(parameter.grad for parameter in model.parameters()))]


def built(kind: type[nn.Module]) -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return kind()


def assert_same_under_a_budget(
    kind: type[nn.Module], train: Callable[[nn.Module], list[Tensor]] = gradients, budget: str = "60%"
) -> Under:
    expected = train(built(kind))
    model, under = built(kind), Under(budget)
    with under(model):
        assert all(map(torch.equal, train(model), expected))
    assert under.summary is not None
    assert under.summary.swapped_bytes > 0
    return under


def test_what_compiled_parts_write_to_is_never_made_again_from_before() -> None:
    assert_same_under_a_budget(Changing)


class Broken(nn.Module):
    """Compiled parts that Dynamo leaves to Python in between, where activations are written over."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)
        self.part = torch.compile(self._part, backend="aot_eager")

    def _part(self, rows: Tensor) -> Tensor:
        rows = self.first(rows).tanh()
        torch._dynamo.graph_break()
        rows = _exempt(rows.sin())
        return functional.relu_(rows * 2) * rows

    def forward(self, rows: Tensor) -> Tensor:
        for _ in range(4):
            rows = self.part(rows).sigmoid() * rows.cos()
        return self.last(rows)  # type: ignore[no-any-return]


@torch._dynamo.disable
def _exempt(rows: Tensor) -> Tensor:
    return functional.relu_(rows.exp() - 1).sqrt() + rows


def test_graph_breaks() -> None:
    assert_same_under_a_budget(Broken)


def retained(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    loss = functional.cross_entropy(model(torch.randn(512, WIDTH)), torch.randint(10, (512,)))
    loss.backward(retain_graph=True)
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_a_graph_that_is_read_twice() -> None:
    with torch._functorch.config.patch(donated_buffer=False):
        assert_same_under_a_budget(Broken, retained)


def test_checkpointed_blocks_that_are_compiled() -> None:
    class Checkpointed(Broken):
        def _part(self, rows: Tensor) -> Tensor:
            return functional.relu(self.first(rows).tanh()).sin()

        def forward(self, rows: Tensor) -> Tensor:
            for _ in range(4):
                rows = checkpoint(self.part, rows, use_reentrant=False).sigmoid() * rows.cos()
            return self.last(rows)  # type: ignore[no-any-return]

    assert_same_under_a_budget(Checkpointed)


def test_three_lengths_of_dynamic_sequences() -> None:
    def prepare(tokens: Tensor) -> None:
        torch._dynamo.mark_dynamic(tokens, 1)

    for way in (blocks_in_place, whole):
        _, under = compared("language", way, "aot_eager", steps=6, lengths=(64, 48, 56), prepare=prepare)
        assert_held(under)


def test_calls_that_run_without_their_graphs_leave_the_plan() -> None:
    torch.manual_seed(0)
    model = Language()
    compiled = torch.compile(model, backend="aot_eager")
    tokens, targets = data_of("language", torch.Generator().manual_seed(1))

    def step(stance: str) -> list[Tensor]:
        torch.manual_seed(2)
        model.zero_grad()
        with torch.compiler.set_stance(stance):
            loss = functional.cross_entropy(compiled(tokens), targets)
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    expected = {stance: step(stance) for stance in ("default", "force_eager")}
    torch._dynamo.reset()
    with auto(compiled, "60%", quiet=True) as governor:
        for _ in range(4):
            step("default")
        while governor.is_planning:
            time.sleep(0.01)
        for stance in ("default", "force_eager", "force_eager", "default"):
            assert all(map(torch.equal, step(stance), expected[stance]))


@pytest.mark.parametrize("stance", ["eager_then_compile", "eager_on_recompile", "fail_on_recompile"])
def test_each_stance_in_which_graphs_run(stance: str) -> None:
    def train(model: nn.Module) -> list[Tensor]:
        compiled: Any = torch.compile(model, backend="aot_eager")
        gradients(compiled, 2)
        with torch.compiler.set_stance(stance):  # type: ignore[arg-type]
            return gradients(compiled)

    under = assert_same_under_a_budget(Eagerly, train, "70%")
    assert under.summary is not None
    assert under.summary.steps_over_budget == 0


def test_only_the_loss_is_compiled() -> None:
    def train(model: nn.Module) -> list[Tensor]:
        criterion = torch.compile(functional.cross_entropy, backend="aot_eager")
        torch.manual_seed(1)
        for _ in range(5):
            model.zero_grad()
            criterion(model(torch.randn(4096, WIDTH)), torch.randint(10, (4096,))).backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    under = assert_same_under_a_budget(Eagerly, train, "80%")
    assert under.summary is not None
    assert under.summary.steps_over_budget == 0


def part_by_part(model: Language, steps: int) -> list[Tensor]:
    """Train for some steps that call the parts of a model one by one, and return the gradients of the last one."""
    for _ in range(steps):
        tokens, targets = data_of("language", torch.Generator().manual_seed(1))
        model.zero_grad()
        rows = model.embedding(tokens)
        for block in model.blocks:
            rows = block(rows)
        functional.cross_entropy(model.head(rows).flatten(0, 1), targets).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_parts_that_a_loop_calls_one_by_one_stay_under_the_budget_where_some_are_compiled() -> None:
    """The first call of a compiled part has the regions on all parts taken away, which began the steps until then."""
    steps = 6

    def train(model: nn.Module) -> list[Tensor]:
        assert isinstance(model, Language)
        blocks_in_place(model, "aot_eager")
        return part_by_part(model, steps)

    under = assert_same_under_a_budget(Language, train)
    assert_held(under)
    assert under.summary.steps == steps


def test_a_loop_whose_first_calls_are_those_of_compiled_parts_is_under_the_budget_from_the_first_step_on() -> None:
    """Nothing is saved outside of compiled graphs until nearly all of them have run."""
    steps = 6

    def train(model: nn.Module) -> list[Tensor]:
        assert isinstance(model, Language)
        blocks_in_place(model, "aot_eager")
        model.embedding.compile(backend="aot_eager")
        return part_by_part(model, steps)

    under = assert_same_under_a_budget(Language, train)
    assert_held(under)
    assert under.summary.steps == steps


def test_what_is_compiled_later_stays_under_the_budget() -> None:
    expected = gradients(built(Eagerly))
    model, under = built(Eagerly), Under("60%")
    with under(model):
        model.compile(backend="eager")
        assert all(map(torch.equal, gradients(model), expected))
    assert under.summary is not None
    assert under.summary.steps == 4
    assert callable(model._compiled_call_impl)


class Eagerly(nn.Sequential):
    """Nothing of it is compiled."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)), nn.Linear(WIDTH, 10))


def test_compiled_autograd_is_told_with_its_remedy() -> None:
    with torch._dynamo.config.patch(compiled_autograd=True):
        model, under = built(Eagerly), Under("60%")
        with under(model):
            gradients(model)
        assert under.summary is not None
        assert under.summary.swapped_bytes == 0
        assert "switch compiled autograd off" in str(under.summary)


def test_cuda_graphs_are_left_alone_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pooch.executor.compiled.has_streams", lambda device: True)
    told: list[tuple[object, ...]] = []
    evictor: Any = SimpleNamespace(device="cuda", warn_once=lambda *text: told.append(text), look=lambda size: None)
    step: Any = SimpleNamespace(evictor=evictor)
    assert not CopiedCalls(step).begins(lambda: {"triton.cudagraphs": True})
    assert "max-autotune-no-cudagraphs" in str(told)
    assert CopiedCalls(step).begins(lambda: {"triton.cudagraphs": False})


@pytest.mark.parametrize("is_first", [True, False])
def test_what_is_compiled_of_a_governed_model_is_governed_in_its_place(is_first: bool) -> None:
    """As where a Trainer of transformers with `torch_compile=True` gives its callbacks the model as it was before."""
    expected = gradients(built(Eagerly))
    model, under = built(Eagerly), Under("75%")
    compiled: Any = torch.compile(model, backend="aot_eager") if is_first else None
    with under(model):
        compiled = compiled or torch.compile(model, backend="aot_eager")
        assert all(map(torch.equal, gradients(compiled), expected))
    assert under.summary is not None
    assert under.summary.steps == 4
    assert under.summary.steps_over_budget == 0
    assert under.summary.swapped_bytes > 0
    assert "_compiled_call_impl" not in {**vars(compiled), **vars(model)}
    assert not [line for line in under.told if "give the compiled model" in line]


def test_a_model_that_was_compiled_and_is_called_itself_stays_under_the_budget() -> None:
    expected = gradients(built(Eagerly))
    model, under = built(Eagerly), Under("60%")
    compiled = torch.compile(model, backend="aot_eager")
    with under(model):
        assert all(map(torch.equal, gradients(model), expected))
    assert under.summary is not None
    assert under.summary.steps == 4
    assert "_compiled_call_impl" not in {**vars(compiled), **vars(model)}


def test_a_compiled_method_of_a_governed_model_is_told() -> None:
    model, under = built(Eagerly), Under("60%")
    with under(model):
        gradients(model, called=torch.compile(model.__call__, backend="eager"))
    (line,) = [line for line in under.told if "torch.compile" in line]
    assert "give the compiled model" in line


class Heavy(nn.Sequential):
    """Its parameters take more than its activations."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 512), *(nn.Linear(512, 512) for _ in range(4)), nn.Linear(512, 10))


def compiled_in_the_middle(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(8):
        if step == 5:
            model.compile(backend="inductor")
        optimizer.zero_grad()
        functional.cross_entropy(model(torch.randn(64, WIDTH)), torch.randint(10, (64,))).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_parameters_that_are_away_come_back_before_a_compiled_graph_runs() -> None:
    expected = compiled_in_the_middle(built(Heavy))
    model, under = built(Heavy), Under("45%")
    with under(model):
        assert all(map(torch.equal, compiled_in_the_middle(model), expected))
    told = "\n".join(under.told)
    assert "leave cpu memory where a step would exceed 45% of what it takes" in told
    assert "stay on the device, as compiled graphs read them by their addresses" in told


LOOKED_AT = """
import sys
import torch
import pooch
from torch._dynamo.utils import counters

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, rows):
        return torch.nn.functional.gelu(self.layer(rows))

model = torch.nn.Sequential(Block(), Block())
for block in model:
    block.compile(backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters())
if sys.argv[1] != "plain":
    auto = pooch.auto(model, sys.argv[1], optimizer, quiet=True)
for _ in range(3):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(counters["frames"]["total"])
"""


def test_dynamo_looks_at_nothing_of_ours() -> None:
    """In a process of its own, since it looks at each function once."""
    command = [sys.executable, "-c", LOOKED_AT]
    options: dict[str, Any] = {"env": child_environment(), "text": True, "timeout": 240}
    plain, governed = (subprocess.check_output([*command, budget], **options) for budget in ("plain", "1GiB"))
    assert plain == governed


STEPPED = """
import sys
from pathlib import Path
import torch
import pooch
from torch._dynamo import convert_frame
from torch._dynamo.utils import counters

folder, looked_at = str(Path(pooch.__file__).parent), []

def look(self, frame, *others, original=convert_frame.ConvertFrame.__call__, **options):
    looked_at.append(frame.f_code.co_filename)
    return original(self, frame, *others, **options)

convert_frame.ConvertFrame.__call__ = look
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU()) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters())
if sys.argv[1] != "plain":
    auto = pooch.auto(model, sys.argv[1], quiet=True)
step = torch.compile(optimizer.step, backend="aot_eager")
for _ in range(6):
    model(torch.randn(64, 32)).square().mean().backward()
    step()
    optimizer.zero_grad()
numbers = sum(parameter.double().sum().item() for parameter in model.parameters())
print(counters["stats"]["unique_graphs"], numbers, [name for name in looked_at if name.startswith(folder)])
"""


def test_a_compiled_step_of_an_optimizer_is_compiled_once() -> None:
    """Hooks on all optimizers' steps run within it. In processes of their own, as above."""
    command = [sys.executable, "-c", STEPPED]
    options: dict[str, Any] = {"env": child_environment(), "text": True, "timeout": 240}
    plain, *governed = (subprocess.check_output([*command, budget], **options) for budget in ("plain", "60%", "60KiB"))
    assert governed == [plain] * 2
    assert plain.split()[0] == "1"
