"""Ways to read and to write a tensor, and a keeper of bytes that is as simple as can be, for tests of homes."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pooch.executor.evictor import Evictor
from pooch.executor.persistent import PersistentMemory
from pooch.executor.program_reads import value_of

Read = Callable[[Tensor], Any]
Write = Callable[[Tensor], object]
ROWS, COLUMNS = 4, 6


def fresh() -> Tensor:
    """What is read and written."""
    return torch.arange(float(ROWS * COLUMNS)).reshape(ROWS, COLUMNS).clone()


class Apart:
    """Takes the bytes of homes, and keeps a copy of each. What counts as unchanged since is not copied again.

    Args:
        library: The native watch.
        part_bytes: Of lists on which ops run in parts.
    """

    def __init__(self, library: Any, part_bytes: int = 0) -> None:
        self.homes: dict[int, Any] = {}
        self._copies: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self._library, self._lock = library, threading.RLock()
        self.fails = False
        self.brought: list[list[int]] = []
        library.use_homes(self.bring_back, part_bytes)

    def add(self, tensor: Tensor) -> Any:
        """Give a tensor's storage a home."""
        home = self._library.Home(tensor)
        self.homes[home.key] = home
        return home

    def leave(self) -> int:
        """Take all bytes that nothing works on, and return of how many homes."""
        with self._lock:
            return sum(self._took(home) for home in list(self.homes.values()))

    def _took(self, home: Any) -> bool:
        home.close()
        writes = home.writes
        taken = home.take(writes)
        if taken is None:
            return False
        kept = self._copies.get(home.key)
        if kept is None or kept[1] != writes:
            self._copies[home.key] = (taken.clone(), writes)
        return True

    def bring_back(self, keys: list[int]) -> None:
        """What the native part calls before an op."""
        if self.fails:
            raise OSError("the copy cannot be read")
        with self._lock:
            self.brought.append(keys)
            for home in map(self.homes.__getitem__, keys):
                if home.is_here:
                    continue
                bytes_kept, _ = self._copies[home.key]
                home.give(bytes_kept.clone())
                self._copies[home.key] = (bytes_kept, home.writes)


class Kept:
    """What outlives steps under a budget that nothing passes: it leaves when a test says so."""

    def __init__(self, evictor: Evictor) -> None:
        self.evictor = evictor
        self.memory = PersistentMemory(evictor, evictor.budget_bytes, 2**20)
        self.memory._least_bytes = 1
        self._count = 0

    def add(self, tensor: Tensor) -> Any:
        self._count += 1
        self.memory._adopt(tensor, "parameter", self._count)
        return self.memory._homes[tensor.untyped_storage()._cdata]

    def value(self, tensor: Tensor) -> Any:
        return value_of(self.memory.values, tensor)

    def leave(self) -> None:
        self.evictor.relieve()


def same(one: Any, other: Any) -> bool:
    """Whether two results are the same bit by bit."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(one == other)
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.detach(), other.detach())


def is_absence(error: BaseException) -> bool:
    """Whether an error says that bytes are away."""
    return isinstance(error, RuntimeError) and "its bytes are away" in str(error)


# Reads by ops ---------------------------------------------------------------------------------------------------------


class Squares(torch.autograd.Function):
    """A function of the program's, which saves its argument."""

    @staticmethod
    def forward(ctx: Any, one: Tensor) -> Tensor:
        ctx.save_for_backward(one)
        return one * one

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (one,) = ctx.saved_tensors
        return gradient * 2 * one


class Doubled(torch.autograd.Function):
    """A function of the program's, which writes to its argument."""

    @staticmethod
    def forward(ctx: Any, one: Tensor) -> Tensor:
        ctx.mark_dirty(one)
        return one.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient


class Sub(Tensor):
    """A subclass of the program's."""


def in_a_thread(act: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(act()))
    thread.start()
    thread.join()
    return found[0]


def compiled(function: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend="eager")


def inferred(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return (tensor.view(-1)[3:] * 2).clone()


def backward(tensor: Tensor) -> Tensor:
    weight, rows = tensor.detach().requires_grad_(), torch.ones(2, ROWS, requires_grad=True)
    (rows @ weight).square().sum().backward()
    assert weight.grad is not None
    assert rows.grad is not None
    return torch.cat([weight.grad.view(-1), rows.grad.view(-1)])


def tied(tensor: Tensor) -> Tensor:
    one = nn.Embedding(ROWS, COLUMNS)
    two = nn.Linear(COLUMNS, ROWS, bias=False)
    one.weight = two.weight = nn.Parameter(tensor.detach())
    two(one(torch.tensor([1, 3]))).sum().backward()
    assert one.weight.grad is not None
    return one.weight.grad


def squared(tensor: Tensor) -> Tensor:
    rows = torch.ones(ROWS, COLUMNS, requires_grad=True)
    Squares.apply(tensor * rows).sum().backward()
    assert rows.grad is not None
    return rows.grad


def checkpointed(tensor: Tensor) -> Tensor:
    rows = torch.ones(ROWS, COLUMNS, requires_grad=True)
    checkpoint(lambda each: (each * tensor).sin(), rows, use_reentrant=False).sum().backward()
    assert rows.grad is not None
    return rows.grad


def called(tensor: Tensor) -> Any:
    return torch.func.functional_call(nn.Linear(COLUMNS, ROWS, bias=False), {"weight": tensor}, torch.ones(2, COLUMNS))


def swapped(tensor: Tensor) -> Tensor:
    other = torch.zeros(ROWS, COLUMNS)
    torch.utils.swap_tensors(other, tensor)
    try:
        return other + 0
    finally:
        torch.utils.swap_tensors(other, tensor)


OP_READS: dict[str, Read] = {
    "op": lambda x: x + 1,
    "item": lambda x: x[1, 2].item(),
    "bool": lambda x: (bool(x[0, 1]), float(x[1, 1]), int(x[2, 1])),
    "equal": lambda x: (torch.equal(x, fresh()), torch.allclose(x, fresh())),
    "index": lambda x: x[1:3, ::2] * 1,
    "mask": lambda x: x[x > 3],
    "iteration": lambda x: torch.stack(list(x)),
    "out of another": lambda x: torch.add(x, 1, out=torch.empty(ROWS, COLUMNS)),
    "list": lambda x: torch.cat([x, x.view(COLUMNS, ROWS).t()], 1),
    "foreach": lambda x: torch._foreach_add([x, x.t()], 1)[1],
    "foreach norm": lambda x: torch.stack(torch._foreach_norm([x, x[1]])),
    "transposed": lambda x: x.t().contiguous(),
    "as_strided": lambda x: x.as_strided((3, 2), (2, 5), 1) + 0,
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2)) * 1j),
    "conjugate": lambda x: torch.view_as_complex(x.view(4, 3, 2)).conj() * 1,
    "other dtype": lambda x: x.view(torch.int32) + 1,
    "channels last": lambda x: x.view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    "no dimension": lambda x: x[0, 3] + x.view(-1)[5],
    "vmap": lambda x: torch.vmap(lambda row: row.sin().sum())(x),
    "vmap around": lambda x: torch.vmap(lambda row: (row * x).sum())(torch.ones(3, ROWS, COLUMNS)),
    "grad": lambda x: torch.func.grad(lambda each: (each * each * x).sum())(x),
    "jvp": lambda x: torch.func.jvp(lambda each: each * each, (x,), (x,))[1],
    "functionalize": lambda x: torch.func.functionalize(lambda each: each.view(-1).add(1))(x),
    "functional_call": called,
    "compile": lambda x: compiled(lambda each: each.sin() + each)(x),
    "inference mode": inferred,
    "thread": lambda x: in_a_thread(lambda: x * 3),
    "backward": backward,
    "tied": tied,
    "autograd function": squared,
    "checkpoint": checkpointed,
    "data": lambda x: x.data + 1,
    "swapped": swapped,
    "subclass": lambda x: (x.as_subclass(Sub) + 1).as_subclass(Tensor),
    "parameter": lambda x: nn.Parameter(x) + 1,
    "set from a tensor": lambda x: torch.empty(0).set_(x) + 1,
    "trace": lambda x: torch.jit.trace(lambda each: each + 1, (torch.ones(ROWS, COLUMNS),))(x),
    "sparse": lambda x: x.to_sparse().to_dense(),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize(),
    "nested": lambda x: torch.nested.nested_tensor([x, x[:2]]).to_padded_tensor(0.0),
    "convolution": lambda x: nn.functional.conv2d(torch.ones(1, 2, 5, 5), x.view(2, 2, 2, 3)),
    "is pinned": lambda x: (x.is_pinned(), x.shape, x.stride(), x.untyped_storage().nbytes()),
}


# Reads that are no ops ------------------------------------------------------------------------------------------------


def saved(tensor: Tensor, **options: Any) -> Tensor:
    file = io.BytesIO()
    torch.save(tensor, file, **options)
    file.seek(0)
    loaded: Tensor = torch.load(file)
    return loaded


def written_file(tensor: Tensor) -> bytes:
    with tempfile.NamedTemporaryFile() as file:
        with Path(file.name).open("wb") as opened:
            tensor.untyped_storage()._write_file(opened, True, True, 1)
        file.seek(0)
        return file.read()


def bytes_at(address: int) -> bytes:
    return ctypes.string_at(address, 4 * ROWS * COLUMNS)


RAW_READS: dict[str, Read] = {
    "repr": lambda x: repr(x.detach()),
    "format": lambda x: f"{x.detach()} {x[1, 1]:.2f}",
    "tolist": lambda x: x.tolist(),
    "deepcopy": copy.deepcopy,
    "copy": lambda x: copy.copy(x) + 0,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "save": saved,
    "save in the old format": lambda x: saved(x, _use_new_zipfile_serialization=False),
    "numpy": lambda x: x.numpy().tobytes(),
    "numpy of a slice": lambda x: x[1:].numpy().tobytes(),
    "asarray": lambda x: numpy.asarray(x).tobytes(),
    "array": lambda x: numpy.array(x).tobytes(),
    "ufunc": lambda x: numpy.add(x.numpy(), 1).tobytes(),
    "dlpack": lambda x: torch.from_dlpack(x).clone(),
    "dlpack of numpy": lambda x: numpy.from_dlpack(x).tobytes(),
    "storage as a list": lambda x: x.untyped_storage().tolist(),
    "bytes of the storage": lambda x: bytes(x.untyped_storage()),
    "item of the storage": lambda x: x.untyped_storage()[5],
    "slice of the storage": lambda x: x.untyped_storage()[4:20].tolist(),
    "clone of the storage": lambda x: x.untyped_storage().clone().tolist(),
    "copy of the storage": lambda x: copy.copy(x.untyped_storage()).tolist(),
    "deepcopy of the storage": lambda x: copy.deepcopy(x.untyped_storage()).tolist(),
    "storage on the CPU": lambda x: x.untyped_storage().cpu().tolist(),
    "typed storage": lambda x: x.storage().tolist(),
    "item of the typed storage": lambda x: x.storage()[3],
    "copied from the storage": lambda x: torch.UntypedStorage(x.nbytes).copy_(x.untyped_storage()).tolist(),
    "file of the storage": written_file,
    "set from the storage": lambda x: torch.empty(0).set_(x.untyped_storage(), 0, (ROWS, COLUMNS), (COLUMNS, 1)) + 1,
    "rebuilt": lambda x: torch._utils._rebuild_tensor_v2(x.storage(), 0, (ROWS, COLUMNS), (COLUMNS, 1), False, {}) + 1,
    "address": lambda x: bytes_at(x.data_ptr()),
    "address of the storage": lambda x: bytes_at(x.untyped_storage().data_ptr()),
}
if hasattr(Tensor, "const_data_ptr"):  # from PyTorch 2.13 on
    RAW_READS["constant address"] = lambda x: bytes_at(x.const_data_ptr())


# Writes by ops --------------------------------------------------------------------------------------------------------


def as_parameter(tensor: Tensor, optimizer: Any) -> None:
    """A step of an optimizer."""
    parameter = nn.Parameter(tensor)
    parameter.grad = torch.ones(ROWS, COLUMNS)
    optimizer([parameter]).step()


def as_state(tensor: Tensor, **options: Any) -> None:
    """A step of an optimizer of which it is the state."""
    parameter = nn.Parameter(torch.ones(ROWS, COLUMNS))
    parameter.grad = torch.ones(ROWS, COLUMNS)
    optimizer = torch.optim.Adam([parameter], **options)
    state = {"step": torch.tensor(0.0), "exp_avg": tensor, "exp_avg_sq": torch.ones(ROWS, COLUMNS)}
    optimizer.state[parameter] = state
    optimizer.step()


def as_gradient(tensor: Tensor, act: Callable[[Tensor], object]) -> None:
    parameter = torch.ones(ROWS, COLUMNS, requires_grad=True)
    parameter.grad = tensor
    act(parameter)


def as_statistics(tensor: Tensor) -> None:
    norm = nn.BatchNorm1d(COLUMNS)
    norm.running_mean, norm.running_var = tensor[0], tensor[1]
    norm(torch.arange(24.0).view(ROWS, COLUMNS))


def loaded(tensor: Tensor) -> None:
    linear = nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight = nn.Parameter(tensor)
    linear.load_state_dict({"weight": torch.ones(ROWS, COLUMNS)})


def in_inference_mode(tensor: Tensor) -> None:
    with torch.inference_mode():
        tensor.view(-1)[2:].add_(3)


def drawn(tensor: Tensor) -> None:
    torch.manual_seed(0)
    tensor.normal_()


def resized(tensor: Tensor) -> None:
    tensor.resize_(2, COLUMNS).add_(1)
    tensor.resize_(ROWS, COLUMNS)


def sorted_into(tensor: Tensor) -> None:
    torch.sort(torch.arange(24.0).view(ROWS, COLUMNS).neg(), out=(tensor, torch.empty(0, dtype=torch.long)))


ONES = (ROWS, COLUMNS)
OP_WRITES: dict[str, Write] = {
    "in place": lambda x: x.add_(1),
    "through a view": lambda x: x.view(-1)[3:7].mul_(2),
    "through a transposed view": lambda x: x.t().copy_(torch.ones(COLUMNS, ROWS)),
    "through as_strided": lambda x: x.as_strided((3,), (5,), 1).zero_(),
    "through a complex view": lambda x: torch.view_as_complex(x.view(4, 3, 2)).conj().mul_(2j),
    "through imaginary parts": lambda x: torch.view_as_complex(x.view(4, 3, 2)).imag.zero_(),
    "through another dtype": lambda x: x.view(torch.int32).add_(1),
    "through permuted channels": lambda x: x.view(1, 2, 3, 4).permute(0, 2, 3, 1).add_(1),
    "one of several views": lambda x: x.unbind()[1].add_(1),
    "by item": lambda x: x.__setitem__(1, 5),
    "by mask": lambda x: x.__setitem__(x > 3, 5),
    "by index": lambda x: x.index_put_((torch.tensor([1]),), torch.tensor(3.0)),
    "scatter": lambda x: x.scatter_(0, torch.zeros(1, COLUMNS, dtype=torch.long), 9.0),
    "out": lambda x: torch.add(torch.ones(ONES), 1, out=x),
    "out through a view": lambda x: torch.mul(torch.ones(COLUMNS), 3, out=x[2]),
    "one of two outs": sorted_into,
    "foreach": lambda x: torch._foreach_add_([x[0], x[1]], 2),
    "foreach with scalars": lambda x: torch._foreach_mul_([x, torch.ones(3)], [2.0, 3.0]),
    "foreach copy": lambda x: torch._foreach_copy_([x], [torch.ones(ONES)]),
    "foreach zero": lambda x: torch._foreach_zero_([x]),
    "foreach lerp": lambda x: torch._foreach_lerp_([x], [torch.ones(ONES)], 0.5),
    "unscale": lambda x: torch._amp_foreach_non_finite_check_and_unscale_([x], torch.tensor(0.0), torch.tensor(2.0)),
    "operator": lambda x: torch.ops.pooch_tests.add_one_(x),
    "operator that does not declare it": lambda x: torch.ops.pooch_tests.add_one_secretly(x),
    "operator that gives nothing": lambda x: torch.ops.pooch_tests.add_one_silently(x),
    "custom operator": lambda x: torch.ops.pooch_tests.triple(x),
    "custom operator in numpy": lambda x: torch.ops.pooch_tests.sevens(x),
    "autograd function": lambda x: Doubled.apply(x),
    "vmap": lambda x: torch.vmap(lambda row: row.mul_(2))(x),
    "functionalize": lambda x: torch.func.functionalize(lambda each: each.view(-1).add_(1))(x),
    "compile": lambda x: compiled(lambda each: each.add_(1))(x),
    "inference mode": in_inference_mode,
    "thread": lambda x: in_a_thread(lambda: x.add_(3)),
    "running statistics": as_statistics,
    "noise": lambda x: torch._C._nn.rrelu_with_noise(-torch.ones(ONES), x, 0.25, 0.25, True),
    "SGD": lambda x: as_parameter(x, torch.optim.SGD),
    "Adam's state": as_state,
    "Adam's state in lists": lambda x: as_state(x, foreach=True),
    "Adam's state fused": lambda x: as_state(x, fused=True),
    "accumulated": lambda x: as_gradient(x, lambda parameter: (parameter * parameter).sum().backward()),
    "clipped": lambda x: as_gradient(x, lambda parameter: nn.utils.clip_grad_norm_([parameter], 0.1)),
    "random": drawn,
    "resized": resized,
    "data": lambda x: x.data.fill_(2),
    "set from a tensor": lambda x: torch.empty(0).set_(x).add_(4),
    "loaded": loaded,
    "renormalised": lambda x: nn.functional.embedding(torch.tensor([1, 3]), x, max_norm=1.0),
    "trace": lambda x: torch.jit.trace(lambda each: each.add_(1), (torch.ones(ONES),))(x),
}


def define_operators() -> None:
    """The operators of a program, which write to their arguments in several ways."""
    if hasattr(torch.ops.pooch_tests, "add_one_"):
        return
    library = torch.library.Library("pooch_tests", "FRAGMENT")

    def add_one(x: Tensor) -> None:
        x.add_(1)

    for name, schema in (("add_one_", "(Tensor(a!) x) -> ()"), ("add_one_silently", "(Tensor x) -> ()")):
        library.define(f"{name}{schema}")
        library.impl(name, add_one, "CPU")
    library.define("add_one_secretly(Tensor x) -> Tensor")
    library.impl("add_one_secretly", lambda x: x.add_(1).clone(), "CPU")
    library.define("read(Tensor x) -> Tensor")
    library.impl("read", lambda x: x + 1, "CPU")

    @torch.library.custom_op("pooch_tests::triple", mutates_args={"x"})
    def triple(x: Tensor) -> None:
        x.mul_(3)

    @torch.library.custom_op("pooch_tests::sevens", mutates_args={"x"})
    def sevens(x: Tensor) -> None:
        x.numpy()[:] = 7

    _KEPT.append(library)


_KEPT: list[Any] = []  # a library's operators end with it


# Writes that are no ops -----------------------------------------------------------------------------------------------


def zero_bytes_at(address: int) -> None:
    ctypes.memset(address, 1, 40)


def storage_resized(tensor: Tensor, size_bytes: int) -> None:
    storage, before_bytes = tensor.untyped_storage(), tensor.nbytes
    storage.resize_(size_bytes)
    if size_bytes:
        tensor.add_(1)
    storage.resize_(before_bytes)
    tensor[1:].fill_(5)
    if not size_bytes:
        tensor[0].fill_(6)


RAW_WRITES: dict[str, Write] = {
    "numpy": lambda x: x.numpy().__setitem__(2, 3),
    "ufunc": lambda x: numpy.add(x.numpy(), 1, out=x.numpy()),
    "array": lambda x: numpy.asarray(x).fill(4),
    "dlpack": lambda x: torch.from_dlpack(x).add_(3),
    "address": lambda x: zero_bytes_at(x.data_ptr()),
    "address of the storage": lambda x: zero_bytes_at(x.untyped_storage().data_ptr()),
    "apply_": lambda x: x.apply_(lambda number: number + 1),  # type: ignore[no-untyped-call]
    "map_": lambda x: x.map_(torch.ones(ONES), lambda one, other: one + other),  # type: ignore[no-untyped-call]
    "item of the storage": lambda x: x.untyped_storage().__setitem__(3, 8),
    "filled storage": lambda x: x.untyped_storage().fill_(8),
    "copied to the storage": lambda x: x.untyped_storage().copy_(torch.ones(ONES).untyped_storage()),
    "swapped bytes": lambda x: x.untyped_storage().byteswap(torch.float32),
    "item of the typed storage": lambda x: x.storage().__setitem__(3, 8.0),
    "filled typed storage": lambda x: x.storage().fill_(8.0),
    "resized storage": lambda x: storage_resized(x, 2 * x.nbytes),
    "emptied storage": lambda x: storage_resized(x, 0),
    "set from the storage": lambda x: torch.empty(0).set_(x.untyped_storage(), 0, ONES, (COLUMNS, 1)).add_(4),
    "rebuilt": lambda x: torch._utils._rebuild_tensor_v2(x.storage(), 0, ONES, (COLUMNS, 1), False, {}).add_(4),
    "shared": lambda x: x.share_memory_().add_(1),
}  # fmt: skip
