"""Random steps under the native watch and under the dispatch mode, compared bit by bit with plain training.

python -m tests.executor.fuzz_native_watch [--first SEED] [--count N] [--budget-s SECONDS] [--odd] [--collect]

Each seed is a program of random ops: in place, on views, with `out=`, on lists, sparse, quantized, complex, on the meta
device, of subclasses, without elements; with `--odd`, most of them are chains on such tensors, which autograd saves.
It is profiled, planned with random decisions and trained: on the path until the native watch replays by itself, in one
step in which an op is another one, and on the path again. A seed says the same each time. Exit codes: 0 nothing was
found; 1 something was.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from pooch.errors import PoochError, ReplayDiffers
from pooch.executor import apply_plan, mode
from pooch.executor.verification import PROOFS
from pooch.ir import Choice, Plan
from tests.executor import odd_tensors
from tests.executor.odd_tensors import Seeing
from tests.executor.support import all_of, is_same, quick_profile, region_of, tight_plan

SIZE = 8
SETTLING_STEPS = PROOFS + 2  # what ops look like is learnt in the first one, and what replays give is proven
NO_COPY = (
    "the backward pass needs value"  # what is said off the path, of what was written over, where no copy stands by
)
Op = Callable[..., Tensor]


def in_place(one: Tensor, other: Tensor) -> Tensor:
    return one.clone().mul_(2).add_(other).sigmoid_()


def in_place_raw(one: Tensor, other: Tensor) -> Tensor:
    return one.mul_(1.5) if one.grad_fn is not None else one + other


def adds_in_place_raw(one: Tensor, other: Tensor) -> Tensor:
    return one.add_(other) if one.grad_fn is not None and one is not other else one - other


def on_views(one: Tensor, other: Tensor) -> Tensor:
    one = one.clone()
    one[:, : SIZE // 2].mul_(2)
    one.t().add_(other)
    one.view(-1)[3:7].sin_()
    return one


def behind_autograd(one: Tensor, other: Tensor) -> Tensor:
    with torch.no_grad():
        made = one * 2
        made.add_(other)
    return one * made


def by_out(one: Tensor, other: Tensor) -> Tensor:
    with torch.no_grad():
        made = torch.add(one, other, out=torch.empty(SIZE, SIZE))
        torch.exp(made, out=made)
        torch.sort(one, out=(made, torch.empty(SIZE, SIZE, dtype=torch.long)))
    return other * made


def by_lists(one: Tensor, other: Tensor) -> Tensor:
    made = [one.detach().clone(), other.detach().sin()]
    torch._foreach_mul_(made, 0.5)
    torch._foreach_add_(made, [made[1], one.detach()])
    first, second = torch._foreach_exp([one.tanh(), other.tanh()])
    return first * made[0] + second * made[1]


def in_chunks(one: Tensor, other: Tensor) -> Tensor:
    left, right = one.clone().chunk(2)  # of such parts nothing can be asked once the whole has changed
    first, second = torch.unsafe_split(other * 2, SIZE // 2)
    return torch.cat([left * first, right.sin() + second.tanh_()])


def stacked(one: Tensor, other: Tensor) -> Tensor:
    return torch.stack([one, other, one]).unbind()[1] + torch.cat([one[:3], other[3:]])


def without_dimensions(one: Tensor, other: Tensor) -> Tensor:
    total = one.sum().tanh()
    scaled = total.mul(2).add_(other.mean()).exp()
    return other * scaled + torch.tensor(1.5)


def without_elements(one: Tensor, other: Tensor) -> Tensor:
    nothing = one[:0].sin().mul_(2)
    return torch.cat([nothing, other, torch.empty(0, SIZE)]) + nothing.sum()


def sparse(one: Tensor, other: Tensor) -> Tensor:
    thin = (one * (one.detach() > 0)).to_sparse()
    return torch.sparse.mm(thin, other) + torch.eye(SIZE).to_sparse().mul(2).to_dense()


def sparse_rows(one: Tensor, other: Tensor) -> Tensor:
    rows = torch.eye(SIZE).to_sparse_csr()
    return (rows @ one.detach()) * other


def of_values(one: Tensor, other: Tensor) -> Tensor:
    places = torch.arange(SIZE * SIZE).reshape(1, -1)
    thin = torch.sparse_coo_tensor(places, (one * 3).reshape(-1), (SIZE * SIZE,))
    later = other.sin().tanh()
    return later * thin.coalesce().to_dense().view(SIZE, SIZE)


def quantized(one: Tensor, other: Tensor) -> Tensor:
    rough = torch.quantize_per_tensor(one.detach().tanh(), 0.05, 0, torch.qint8)
    return other * rough.relu().dequantize()


def complex_ones(one: Tensor, other: Tensor) -> Tensor:
    both = torch.complex(one, other) * 1j
    return (both.conj() * both).real + torch.view_as_real(both.conj().resolve_conj()).sum(-1) + both.imag.neg()


def on_meta(one: Tensor, other: Tensor) -> Tensor:
    nowhere = torch.empty(SIZE, device="meta").sin().add_(1)
    return one * float(nowhere.dim()) + other


def of_a_subclass(one: Tensor, other: Tensor) -> Tensor:
    made = one.as_subclass(Seeing).sin() * other
    return made.exp().mul_(0.5).as_subclass(Tensor)


def of_two_tensors(one: Tensor, other: Tensor) -> Tensor:
    both = TwoTensor(one.detach().clone(), other.detach().clone())
    both.mul_(2)
    made = (both.sin() + 1).tanh()
    assert isinstance(made, TwoTensor)
    return one * made.a + other * made.b


def of_two_tensors_in_the_graph(one: Tensor, other: Tensor) -> Tensor:
    leaf = TwoTensor(one.detach().clone(), other.detach().clone()).requires_grad_()
    made = (leaf.sin() * leaf).exp().detach()
    assert isinstance(made, TwoTensor)
    return other * made.a


def of_random_numbers(one: Tensor, other: Tensor) -> Tensor:
    return nn.functional.dropout(one, 0.3) + torch.rand_like(other) * other + torch.empty(SIZE, SIZE).normal_()


def of_other_dtypes(one: Tensor, other: Tensor) -> Tensor:
    return (one.double() @ other.double()).to(torch.float32) * one.bfloat16().float() / SIZE


def by_index(one: Tensor, other: Tensor) -> Tensor:
    places = torch.tensor([1, 3, 3, 0])
    made = one.clone()
    made[places] = other[:4]
    made.index_put_((torch.tensor([2]),), other[0])
    return made + other[:, places].sum(-1, keepdim=True)


def asked(one: Tensor, other: Tensor) -> Tensor:
    return one * (2.0 if other.detach().sum().item() > 0 else 3.0)


def reshaped(one: Tensor, other: Tensor) -> Tensor:
    return (one.view(2, 4, SIZE) @ other).reshape(SIZE, SIZE).t().contiguous() / SIZE


def expanded(one: Tensor, other: Tensor) -> Tensor:
    return one[0].expand(SIZE, SIZE).exp() * other.detach().expand(2, SIZE, SIZE)[1]


def normalised(one: Tensor, other: Tensor) -> Tensor:
    return nn.functional.layer_norm(one, (SIZE,)) + nn.functional.softmax(other, -1)


def looked_at(one: Tensor, other: Tensor) -> Tensor:
    assert len(one.tolist()) == SIZE
    assert other.detach().numpy().shape == (SIZE, SIZE)
    return one.sin() + other


OPS: tuple[Op, ...] = (
    torch.add, torch.mul, lambda one, other: one.sin(), lambda one, other: other.tanh(), lambda one, other: one.cos(),
    lambda one, other: (one @ other) / SIZE, lambda one, other: one.tanh().exp(), lambda one, other: other.relu(),
    in_place, in_place_raw, adds_in_place_raw, on_views, behind_autograd, by_out, by_lists, in_chunks, stacked,
    without_dimensions, without_elements, sparse, sparse_rows, of_values, quantized, complex_ones, on_meta,
    of_a_subclass, of_two_tensors, of_two_tensors_in_the_graph, of_random_numbers, of_other_dtypes, by_index, asked,
    reshaped, expanded, normalised, looked_at,
)  # fmt: skip


class Program(nn.Module):
    """Random ops on a pool of square matrices.

    Args:
        seed: Says which.
        is_odd: Whether most of them are chains on odd tensors.

    Attributes:
        other_at: Number of an op that is another one in this step, or -1.
    """

    def __init__(self, seed: int, is_odd: bool = False) -> None:
        super().__init__()
        numbers = random.Random(seed)
        torch.manual_seed(seed)
        self.is_odd = is_odd
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))
        count = numbers.randint(5, 22)
        self.ops = [self._drawn(numbers) for _ in range(count)]
        self.other = self._drawn(numbers)
        self.forgets = {at for at in range(count) if numbers.random() < 0.3}
        self.layer_at = {at: numbers.randrange(3) for at in range(count) if numbers.random() < 0.3}
        self.other_at, self.drawn_at = -1, numbers.randrange(count)

    @property
    def has_ops_of_subclasses(self) -> bool:
        """Whether subclasses see ops, within which the native watch sees others than the mode: only the first step of
        a run shows that.
        """
        drawn = [*self.ops, self.other]
        return any(
            op.kind.sees_ops
            if isinstance(op, odd_tensors.Chain)
            else op in (of_two_tensors, of_two_tensors_in_the_graph)
            for op, _, _ in drawn
        )

    def _drawn(self, numbers: random.Random) -> tuple[Op, int, int]:
        is_odd = self.is_odd and numbers.random() < 0.6
        op = odd_tensors.drawn(numbers) if is_odd else OPS[numbers.randrange(len(OPS))]
        return op, numbers.randrange(100), numbers.randrange(100)

    def forward(self, rows: Tensor) -> Tensor:
        pool = [self.layers[0](rows), self.layers[1](rows).tanh()]
        for at, drawn in enumerate(self.ops):
            op, one, other = self.other if at == self.other_at else drawn
            made = op(pool[one % len(pool)], pool[other % len(pool)])
            if at in self.layer_at:
                made = self.layers[self.layer_at[at]](made)
            pool.append(made.tanh() if at % 3 == 0 else made)
            if at in self.forgets and len(pool) > 2:
                pool.pop(one % len(pool))
        return torch.stack([each.tanh().sum() for each in pool]).sum()


def outcome(model: Program, rows: Tensor, run: object = None) -> list[Tensor] | str:
    """What a step gives: the loss and the gradients, or what it raises."""
    torch.manual_seed(3)
    model.zero_grad()
    try:
        with region_of(run):  # type: ignore[arg-type]
            loss = model(rows)
        loss.backward()
    except PoochError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001  (whatever the program raises)
        return f"{type(error).__name__}: {str(error)[:60]}"
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [loss.detach(), *(each.clone() for each in found), torch.get_rng_state()]


def is_equal(one: list[Tensor] | str, other: list[Tensor] | str) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return len(one) == len(other) and all(map(is_same, one, other))


def planned(model: Program, rows: Tensor, seed: int) -> tuple[Plan, str]:
    """A plan of random decisions, and what replays are compared with."""
    numbers = random.Random(seed + 1_000_000)
    region = numbers.choice(["model", "step"])
    profile = quick_profile(lambda: model(rows), model)
    possible = set(all_of(profile, "recompute", region))  # type: ignore[arg-type]
    choices: list[Choice] = numbers.choice([["keep", "swap", "recompute"], ["keep", "keep", "swap"], ["recompute"]])
    drawn = {value: numbers.choice(choices) for value in all_of(profile, "keep", region)}  # type: ignore[arg-type]
    decisions = {value: "swap" if c == "recompute" and value not in possible else c for value, c in drawn.items()}
    return tight_plan(profile, decisions, region), numbers.choice(["first", "off"])  # type: ignore[arg-type]


@contextmanager
def watched_by(kind: str) -> Iterator[None]:
    if kind == "native":
        yield
        return
    with mock.patch.object(mode, "is_native", return_value=False):
        yield


def faults(seed: int, is_odd: bool = False) -> list[str]:
    """What is wrong with the steps of a seed. Nothing is said of programs that plain training refuses."""
    model = Program(seed, is_odd)
    rows = torch.rand(SIZE, SIZE)
    plain = outcome(model, rows)
    if isinstance(plain, str):
        return []
    gc.collect()
    plan, verify = planned(model, rows, seed)
    model.other_at = model.drawn_at
    others = outcome(model, rows)
    found: dict[str, list[str]] = {}
    for kind in ("native", "mode"):
        found[kind] = []
        with watched_by(kind), apply_plan(plan, model, verify=verify) as run:  # type: ignore[arg-type]
            for number, other_at in enumerate([*[-1] * SETTLING_STEPS, -1, model.drawn_at, -1, -1]):
                model.other_at = other_at
                got, expected = outcome(model, rows, run), plain if other_at < 0 else others
                if other_at >= 0 and verify == "off" and isinstance(got, str) and NO_COPY in got:
                    continue
                if isinstance(expected, str) and isinstance(got, str) and got.startswith(ReplayDiffers.__name__):
                    break  # plain training refuses what has changed, by another name; its recipe is not used any more
                if not is_equal(got, expected):
                    what = got if isinstance(got, str) else "other bits"
                    found[kind].append(f"step {number + 1}: {what} in place of {_short(expected)}")
                elif other_at < 0 and run.stats.mismatches and not (number == 0 and model.has_ops_of_subclasses):
                    found[kind].append(f"step {number + 1}: it left the path")
            else:
                if run.verified.differences:
                    found[kind].append(f"replays gave other bits: {run.verified}")
    return [f"{kind}: {each}" for kind, texts in found.items() for each in texts]


def _short(expected: list[Tensor] | str) -> str:
    return expected if isinstance(expected, str) else "its bits"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run seeds, and print those in which something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.executor.fuzz_native_watch", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=100, help="how many")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="begin no more seeds after this time")
    parser.add_argument("--odd", action="store_true", help="run most ops on odd tensors")
    parser.add_argument("--collect", action="store_true", help="collect garbage nearly wherever Python may do so")
    asked = parser.parse_args(arguments)
    begin_s, is_right, seed = time.perf_counter(), True, asked.first
    mock.patch("pooch.profiler.assembly.SMALLEST_ACTIVATION_BYTES", 1).start()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if asked.collect:
        gc.set_threshold(2, 300, 30)
    while seed < asked.first + asked.count and time.perf_counter() - begin_s < asked.budget_s:
        sys.stderr.write(f"\rseed {seed} ")  # where the process dies, this says of which
        for each in faults(seed, asked.odd):
            is_right = False
            sys.stdout.write(f"seed {seed}: {each}\n")
            sys.stdout.flush()
        seed += 1
    sys.stdout.write(f"{seed - asked.first} seeds from {asked.first} on\n")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
