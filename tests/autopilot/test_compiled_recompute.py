"""What compiled graphs make again where the user allows other rounding, and that they do not otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pooch.api.recompute import compiled_parts
from pooch.autopilot import auto
from pooch.errors import UsageError
from tests.autopilot.test_compiled import Changing, gradients
from tests.autopilot.under import Under
from tests.compiled_models import Language, Trained, Way, blocks_in_place, trained, whole

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def rounding(budget: str | int) -> Under:
    """A budget under which graphs may make values again."""
    return Under(budget, allow_recompute="rounding")


def allowed(name: str, way: Way, backend: str, budget: str | int = "50%") -> tuple[Trained, Trained, Under]:
    under = rounding(budget)
    plain = trained(name, way, backend, steps=4)
    budgeted = trained(name, way, backend, steps=4, prepared=under)
    assert budgeted.compiled == plain.compiled, "nothing is compiled by us, and nothing anew"
    return plain, budgeted, under


@pytest.mark.parametrize("way", [whole, blocks_in_place])
def test_graphs_make_values_again_within_the_budget(way: Way) -> None:
    plain, budgeted, under = allowed("language", way, "aot_eager", "60%")
    assert budgeted.is_as(plain), "aot_eager fuses nothing, and random numbers are not drawn again"
    again = under.summary.made_again
    assert again.graphs == 1
    assert again.saved_bytes < again.whole_bytes
    assert under.summary.steps_over_budget == 0, under.told
    (line,) = [line for line in under.told if "make" in line and "again" in line]
    assert line in str(under.summary)
    assert "compiled graphs may round in another way" in str(under.summary)


def test_inductor_makes_what_it_fuses_again() -> None:
    plain, budgeted, under = allowed("language", whole, "inductor", "60%")
    assert torch.allclose(torch.tensor(budgeted.losses), torch.tensor(plain.losses), rtol=1e-3)
    assert torch.equal(budgeted.random, plain.random)
    assert under.summary.made_again.graphs == 1
    assert under.summary.steps_over_budget == 0, under.told


def test_nothing_is_made_again_by_default() -> None:
    under = Under("50%")
    plain = trained("language", whole, "aot_eager", steps=4)
    assert trained("language", whole, "aot_eager", steps=4, prepared=under).is_as(plain)
    assert under.summary.made_again.graphs == 0


def test_nothing_is_made_again_that_fits() -> None:
    under = rounding("1GiB")
    plain = trained("language", whole, "aot_eager", steps=2)
    assert trained("language", whole, "aot_eager", steps=2, prepared=under).is_as(plain)
    assert under.summary.made_again.graphs == 0


def test_a_larger_budget_makes_no_more_again() -> None:
    saved_bytes = []
    for budget in ("40%", "60%", "80%"):
        _, _, under = allowed("vision", whole, "aot_eager", budget)
        again = under.summary.made_again
        saved_bytes.append(again.saved_bytes if again.graphs else 2**60)
    assert saved_bytes == sorted(saved_bytes)
    assert saved_bytes[0] < saved_bytes[-1]


@pytest.mark.parametrize("budget", ["40%", "60%"])
def test_what_a_graph_writes_to_is_not_read_again_for_what_it_was_before(budget: str) -> None:
    def built() -> nn.Module:
        torch._dynamo.reset()
        torch.manual_seed(0)
        return Changing()

    expected = gradients(built())
    model, under = built(), rounding(budget)
    with under(model):
        assert all(map(torch.equal, gradients(model), expected))


class Counted(nn.Module):
    """Reads a buffer that it writes to, with dropout, and compiles as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.last = nn.Linear(64, 10)
        self.scale: Tensor
        self.register_buffer("scale", torch.full((64,), 0.5))

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = nn.functional.dropout((layer(rows) * self.scale.clone()).tanh().exp().sin(), 0.2, self.training)
        with torch.no_grad():
            self.scale.mul_(0.9).add_(rows.mean(0), alpha=0.1)
        return self.last(rows)  # type: ignore[no-any-return]


def test_buffers_that_change_in_the_forward_pass_and_dropout_have_the_bits_of_the_model_that_is_not_compiled() -> None:
    # PyTorch's own partition reads the buffer in the backward pass, when it has changed: its gradients differ.
    def built() -> nn.Module:
        torch._dynamo.reset()
        torch.manual_seed(0)
        return Counted()

    expected = gradients(built())
    model, under = whole(built(), "aot_eager"), rounding("40%")
    with under(model):
        assert all(map(torch.equal, gradients(model), expected))
    assert under.summary.made_again.graphs == 1


@pytest.mark.parametrize(
    ("way", "parts"),
    [(blocks_in_place, 3), (whole, 1), (lambda model, backend: model, 0)],
    ids=["blocks", "whole", "nothing"],
)
def test_parts_that_are_compiled_are_counted(way: Callable[[nn.Module, str], nn.Module], parts: int) -> None:
    assert compiled_parts([way(Language(), "aot_eager")]) == parts


def test_anything_else_is_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match="give 'exact'"):
        auto(nn.Linear(2, 2), "1GiB", allow_recompute="bits")  # type: ignore[arg-type]
