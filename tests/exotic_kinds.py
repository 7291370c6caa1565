"""Parts of a forward pass that few tools expect: tensors without ordinary memory, transforms, traced or compiled code.

Each is a function of hidden activations, rows by `WIDTH`, that returns as many rows. `Sandwich` has one between
ordinary layers, which have to stay governed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 256
ROWS = 256
Part = Callable[[Tensor], Tensor]


class Sandwich(nn.Module):
    """Ordinary layers around a part.

    Args:
        part: The part.
        repeats: How often layers and part run.
    """

    def __init__(self, part: Part, repeats: int = 3) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.part = Inner(part)
        self.repeats = repeats

    def forward(self, rows: Tensor) -> Tensor:
        """Return the loss."""
        for _ in range(self.repeats):
            hidden = functional.gelu(self.first(rows))
            rows = torch.tanh(self.norm(self.second(self.part(hidden))))
        return functional.dropout(rows, 0.1).square().mean()


class Inner(nn.Module):
    """A module of its own around the part, so that what is told can name it."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.function = part

    def forward(self, rows: Tensor) -> Tensor:
        """Run the part."""
        return self.function(rows)


class Scaled(Tensor):
    """Like the tensors of quantization libraries: values and a scale in one tensor without memory of its own."""

    values: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor) -> Scaled:
        made: Scaled = Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        return made

    def __init__(self, values: Tensor, scale: Tensor) -> None:
        self.values, self.scale = values, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values.detach(), args[0].scale)
        plain = torch.utils._pytree.tree_map_only(cls, lambda each: each.values * each.scale, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class Flattened(Scaled):
    """The same with the methods by which PyTorch looks inside."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, outer_size: Any, outer_stride: Any) -> Flattened:
        return Flattened(inner["values"], inner["scale"])


class Backed(Tensor):
    """A subclass with memory of its own that sees every op."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            plain = torch.utils._pytree.tree_map_only(cls, lambda each: each.as_subclass(Tensor), (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class Named(Tensor):
    """A subclass that sees calls of functions."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Doubles(torch.autograd.Function):
    """A function of the program's that saves what it is given."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return rows.as_subclass(Tensor) * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (rows,) = ctx.saved_tensors
        return gradient * (2 + rows.as_subclass(Tensor).sin())


def quantized(rows: Tensor) -> Tensor:
    """A tensor with a scale and a zero point."""
    return rows * torch.quantize_per_tensor(rows.detach(), 0.1, 3, torch.quint8).dequantize()


def quantized_by_channel(rows: Tensor) -> Tensor:
    """A tensor with a scale for each row."""
    scales = torch.full((len(rows),), 0.1, dtype=torch.float64)
    points = torch.zeros(len(rows), dtype=torch.long)
    return rows * torch.quantize_per_channel(rows.detach(), scales, points, 0, torch.qint8).dequantize()


def nested_strided(rows: Tensor) -> Tensor:
    """A nested tensor of the old layout, which has no sizes."""
    nested = torch.nested.as_nested_tensor([rows[:100], rows[100:]])
    return torch.nested.to_padded_tensor(functional.gelu(nested), 0.0).reshape(-1, WIDTH)[:ROWS]


def nested_jagged(rows: Tensor) -> Tensor:
    """A nested tensor of the new layout, a wrapper."""
    nested = torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 100, len(rows)]))
    return functional.gelu(nested).values()


def masked(rows: Tensor) -> Tensor:
    """A wrapper without memory that is not to be looked into."""
    from torch.masked import masked_tensor

    return rows * masked_tensor(rows, rows > 0).sum(1).to_tensor(0.0)[:, None]


def wrapped(rows: Tensor) -> Tensor:
    """A wrapper of the program's."""
    return functional.gelu(rows @ Scaled(torch.eye(WIDTH), torch.tensor(1.5)))


def wrapped_flattened(rows: Tensor) -> Tensor:
    """A wrapper of the program's that can be looked into."""
    return functional.gelu(rows @ Flattened(torch.eye(WIDTH), torch.tensor(1.5)))


def backed(rows: Tensor) -> Tensor:
    """A subclass with memory."""
    return functional.gelu(rows * torch.full((WIDTH,), 1.5).as_subclass(Backed))


def named(rows: Tensor) -> Tensor:
    """A subclass without ops of its own."""
    return (rows.exp().as_subclass(Named) * 2).sin().as_subclass(Tensor)


def saved_by_name(rows: Tensor) -> Tensor:
    """The same, saved by a function of the program's."""
    return Doubles.apply(rows.exp().as_subclass(Named)).cos()  # type: ignore[no-any-return,no-untyped-call]


def sparse(rows: Tensor) -> Tensor:
    """Coordinates of what is positive."""
    adjacent = torch.relu(rows[:, :ROWS].detach() - 1).to_sparse()
    return torch.sparse.mm(adjacent, rows) + rows.relu().to_sparse().to_dense()


def sparse_rows(rows: Tensor) -> Tensor:
    """Compressed rows."""
    return torch.relu(rows[:, :ROWS].detach() - 1).to_sparse_csr() @ rows.sin()


def opaque(rows: Tensor) -> Tensor:
    """A tensor in oneDNN's own layout."""
    return functional.relu(rows.to_mkldnn()).to_dense() * rows


def func_grad(rows: Tensor) -> Tensor:
    """Gradients for each row."""
    return torch.func.vmap(torch.func.grad(lambda row: (row.sin() * row.exp()).sum()))(rows)


def func_vjp(rows: Tensor) -> Tensor:
    """A vector-Jacobian product."""
    result, product = torch.func.vjp(lambda each: each.sin() * each.exp(), rows)
    return result + product(torch.ones_like(rows))[0]


def func_jvp(rows: Tensor) -> Tensor:
    """A Jacobian-vector product."""
    result, tangent = torch.func.jvp(lambda each: each.sin() * each.exp(), (rows,), (torch.ones_like(rows),))
    return result + tangent


def func_jacobians(rows: Tensor) -> Tensor:
    """Jacobians in both modes."""
    few = rows[:8, :8]
    backward = torch.func.jacrev(lambda each: each.sin().exp())(few).sum((0, 1))
    forward = torch.func.jacfwd(lambda each: each.sin().exp())(few).sum((0, 1))
    return rows * (backward + forward).sum()


def func_vmap(rows: Tensor) -> Tensor:
    """A function of one row over all of them."""
    return torch.func.vmap(lambda row: functional.gelu(row.sin() * row))(rows)


def func_call(rows: Tensor) -> Tensor:
    """A module with other parameters, and gradients by them."""
    layer = nn.Linear(WIDTH, WIDTH)
    weights = {name: torch.full_like(each, 0.01).requires_grad_() for name, each in layer.named_parameters()}
    gradients = torch.func.grad(lambda each: torch.func.functional_call(layer, each, (rows,)).sin().sum())(weights)
    return torch.func.functional_call(layer, weights, (rows,)).sin() + gradients["bias"]


def linearized(rows: Tensor) -> Tensor:
    """A function and its linear part."""
    result, linear = torch.func.linearize(lambda each: each.sin() * each, rows.detach())
    return rows * result + linear(torch.ones_like(rows))


def dual(rows: Tensor) -> Tensor:
    """A tensor with a tangent."""
    import torch.autograd.forward_ad as forward_ad

    with forward_ad.dual_level():
        both = forward_ad.make_dual(rows, torch.ones_like(rows))
        result, tangent = forward_ad.unpack_dual(both.sin() * both.exp())
    return result + tangent


def branch(rows: Tensor) -> Tensor:
    """A branch that depends on a tensor."""
    return torch.cond(rows.sum() > 0, lambda each: each.sin(), lambda each: each.cos(), (rows,))  # type: ignore[no-any-return]


def loop(rows: Tensor) -> Tensor:
    """A loop that depends on a tensor; it has no gradient."""
    from torch._higher_order_ops.while_loop import while_loop

    with torch.no_grad():
        _, found = while_loop(lambda n, _: n < 3, lambda n, each: (n + 1, each.sin()), (torch.tensor(0), rows.detach()))
    return rows * found


def flexible(rows: Tensor) -> Tensor:
    """Attention with a function for its scores."""
    from torch.nn.attention.flex_attention import flex_attention

    heads = rows.detach().reshape(1, 4, -1, 64)  # it has no backward pass on a CPU
    return rows * flex_attention(heads, heads, heads, score_mod=lambda score, *_: score * 0.5).reshape(rows.shape)  # type: ignore[no-any-return, union-attr]


def scanned(rows: Tensor) -> Tensor:
    """A scan along the rows, as an operator of higher order."""
    from torch._higher_order_ops.associative_scan import associative_scan

    return rows * associative_scan(lambda a, b: a + b, rows.detach().abs(), 0, combine_mode="generic").log1p()  # type: ignore[no-any-return]


def recomputed(rows: Tensor) -> Tensor:
    """Both kinds of checkpointing."""

    def inner(each: Tensor) -> Tensor:
        return functional.gelu(each.sin()) * each.exp().rsqrt()

    rows = checkpoint(inner, rows, use_reentrant=False)  # type: ignore[assignment]
    return checkpoint(inner, rows, use_reentrant=True)  # type: ignore[return-value, no-any-return]


def faked(rows: Tensor) -> Tensor:
    """Fake tensors, from which only a shape is taken."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    fake = mode.from_tensor(rows.detach())
    with mode:
        width = (fake.sin() @ torch.empty(WIDTH, WIDTH)).shape[1]
        unused = fake.clone().requires_grad_()
        functional.gelu(unused * 2).exp().sum()
    return rows.sin() * width


def traced_to_graph(rows: Tensor) -> Tensor:
    """A function that is traced to a graph, with real and with fake tensors, which then runs."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def inner(each: Tensor) -> Tensor:
        return functional.gelu(each.sin()) * each

    real = make_fx(inner)(rows.detach())
    fake = make_fx(inner, tracing_mode="fake")(rows.detach())
    return real(rows) + fake(rows)  # type: ignore[no-any-return]


def symbolically_traced(rows: Tensor) -> Tensor:
    """A module that is traced without tensors."""
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.GELU(), nn.Tanh()))
    return traced(rows)  # type: ignore[no-any-return]


def exported(rows: Tensor) -> Tensor:
    """A module that is exported, and then run."""
    program = torch.export.export(nn.Sequential(nn.GELU(), nn.Tanh()), (rows.detach(),))
    return program.module()(rows)  # type: ignore[no-any-return]


def jit_traced(rows: Tensor) -> Tensor:
    """A function that is traced by the older tracer, and then run."""
    return torch.jit.trace(lambda each: functional.gelu(each.sin()) * each, rows.detach())(rows)  # type: ignore[no-any-return,no-untyped-call]


@torch.jit.script
def _scripted(rows: Tensor) -> Tensor:
    total = rows
    for _ in range(2):
        total = torch.sin(total) * rows
    return total


def scripted(rows: Tensor) -> Tensor:
    """A function of TorchScript."""
    return _scripted(rows)  # type: ignore[no-any-return]


@torch.compile(backend="aot_eager")
def _compiled(rows: Tensor) -> Tensor:
    return functional.gelu(rows.sin()) * rows.exp().rsqrt()


def compiled(rows: Tensor) -> Tensor:
    """A compiled function."""
    return _compiled(rows)  # type: ignore[no-any-return]


def on_meta(rows: Tensor) -> Tensor:
    """Tensors without contents."""
    shape = functional.gelu(rows.to("meta")).sin()
    functional.gelu(torch.empty(9, 9, device="meta", requires_grad=True)).exp().sum()
    return rows.sin() * shape.shape[1]


def complex_views(rows: Tensor) -> Tensor:
    """Views that are conjugate or negative."""
    numbers = torch.complex(rows, rows.sin())
    flipped = (numbers.conj() * numbers.exp()).imag * numbers.conj().imag
    return flipped + torch._neg_view(rows.cos()) * rows


def shared_memory(rows: Tensor) -> Tensor:
    """Memory that other processes could see."""
    shared = rows.sin().share_memory_()
    return shared * rows.cos().detach().share_memory_()


def from_file(rows: Tensor) -> Tensor:
    """Memory that is a file, which is gone by the backward pass."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "factors"
        path.write_bytes(torch.arange(WIDTH, dtype=torch.float32).numpy().tobytes())
        factors = torch.from_file(str(path), shared=True, size=WIDTH)
        return (rows * factors).sin() * (factors + 1)


def fixed_memory(rows: Tensor) -> Tensor:
    """Memory that PyTorch did not allocate."""
    import numpy

    factors = torch.from_numpy(numpy.arange(WIDTH, dtype=numpy.float32))
    buffered = torch.frombuffer(bytearray(numpy.ones(WIDTH, dtype=numpy.float32).tobytes()), dtype=torch.float32)
    return rows * factors.sin() + buffered * rows.cos()


def nothing(rows: Tensor) -> Tensor:
    """Tensors without elements."""
    empty = functional.gelu(rows[:0].sin() * rows[:0])
    return torch.cat([empty, rows.sin()]) * (empty.sum() + 1)


def expanded(rows: Tensor) -> Tensor:
    """Views that are larger than their memory."""
    column = rows[:, :1].sin().expand(-1, WIDTH)
    return column * rows * rows[0].exp().expand_as(rows)


_LIBRARY = torch.library.Library("pooch_exotic", "DEF")
_LIBRARY.define("twice_or_none(Tensor rows, bool none) -> (Tensor, Tensor?)")
_LIBRARY.define("as_it_is(Tensor rows) -> Tensor")
_LIBRARY.define("look(Tensor rows) -> ()")
_LIBRARY.impl("look", lambda rows: None, "CompositeExplicitAutograd")
_LIBRARY.impl("as_it_is", lambda rows: rows, "CompositeExplicitAutograd")
_LIBRARY.impl("twice_or_none", lambda rows, none: (rows * 2, None if none else rows * 3), "CompositeExplicitAutograd")


def foreign(rows: Tensor) -> Tensor:
    """Operators that return nothing, None, or their argument without saying so."""
    operators = torch.ops.pooch_exotic
    operators.look(rows)
    with torch.no_grad():
        twice, none = operators.twice_or_none(rows.sin(), True)
        assert none is None
        same = operators.as_it_is(operators.twice_or_none(rows.cos(), False)[1])
    return rows * twice * same.detach()


def inferred(rows: Tensor) -> Tensor:
    """Tensors of inference mode."""
    with torch.inference_mode():
        factors = rows.sin() * 2
    return rows * factors.clone()


def spectral(rows: Tensor) -> Tensor:
    """Complex transforms."""
    return torch.fft.irfft(torch.fft.rfft(rows) * torch.fft.rfft(rows.sin()), n=WIDTH)


def lower_precision(rows: Tensor) -> Tensor:
    """Numbers of eight bits."""
    return rows * rows.detach().clamp(-1, 1).to(torch.float8_e4m3fn).to(rows.dtype)


KINDS: dict[str, Part] = {
    part.__name__: part
    for part in (
        quantized, quantized_by_channel, nested_strided, nested_jagged, masked, wrapped, wrapped_flattened, backed,
        named, saved_by_name, sparse, sparse_rows, opaque, func_grad, func_vjp, func_jvp, func_jacobians, func_vmap,
        func_call, linearized, dual, branch, loop, flexible, scanned, recomputed, faked, traced_to_graph,
        symbolically_traced, exported, jit_traced, scripted, compiled, on_meta, complex_views, shared_memory, from_file,
        fixed_memory, nothing, expanded, foreign, inferred, spectral, lower_precision,
    )
}  # fmt: skip
