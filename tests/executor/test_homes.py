"""Storages whose bytes are away: whoever reads or writes them finds what is right, or one clear error."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from pooch.torchtools import watch
from tests.executor.homes import (
    COLUMNS,
    OP_READS,
    OP_WRITES,
    RAW_READS,
    RAW_WRITES,
    ROWS,
    Apart,
    Kept,
    define_operators,
    fresh,
    is_absence,
    same,
)  # fmt: skip
from tests.executor.online.support import holding

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore"),
]
BYTES = 4 * ROWS * COLUMNS


@pytest.fixture(scope="module", autouse=True)
def operators(mutated_sources: None) -> None:
    if watch.LIBRARY.get() is None:
        pytest.skip(f"nothing leaves without what watches natively: {watch.LIBRARY.why_not}")
    define_operators()


@pytest.fixture
def library() -> Any:
    return watch.LIBRARY.get()


@pytest.fixture
def apart(library: Any) -> Iterator[Apart]:
    """The native part alone."""
    yield (made := Apart(library))
    made.fails = False
    made.bring_back([key for key, home in made.homes.items() if not home.is_gone])
    made.homes.clear()


@pytest.fixture
def kept() -> Iterator[Kept]:
    """All of it: ops, and what is read without one."""
    with holding() as evictor:
        made = Kept(evictor)
        yield made
        made.memory.close()


ON: dict[str, Callable[[Tensor], Tensor]] = {
    "tensor": lambda x: x,
    "view": lambda x: x.view(ROWS, COLUMNS),
    "detached": lambda x: x.detach(),
}


def found_or_absent(read: Any, tensor: Tensor) -> Any:
    """What is read of what is away, or what is read once it is there, if one clear error says that it is not."""
    try:
        return read(tensor)
    except RuntimeError as error:
        if not is_absence(error):
            raise
    torch.add(tensor, 1)
    return read(tensor)


# Reads ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", OP_READS)
def test_every_op_finds_what_is_away(apart: Apart, how: str) -> None:
    expected = OP_READS[how](fresh())
    tensor = fresh()
    home = apart.add(tensor)
    for on in ON.values():
        apart.leave()
        assert not home.is_here
        assert same(OP_READS[how](on(tensor)), expected)
    apart.leave()
    assert same(tensor + 0, fresh())
    assert not home.is_used


# Ops that are made of others, which make a view or a copy.
WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.t().contiguous(),
    "double": lambda x: x.double(),
    "expanded": lambda x: x.expand(2, ROWS, COLUMNS).reshape(-1),
    "flatten": lambda x: x.t().flatten(),
    "resolve_conj": lambda x: torch.complex(x, x).conj().resolve_conj().imag,
    "reshape": lambda x: x.t().reshape(-1),
    "same": lambda x: x.contiguous().reshape(-1),
    "to": lambda x: x.to(torch.float32, copy=True),
}
BELOW_AUTOGRAD: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "inference": torch.inference_mode,
    "below": torch._C._AutoDispatchBelowAutograd,
}


@pytest.mark.parametrize("mode", BELOW_AUTOGRAD)
@pytest.mark.parametrize("how", WHOLE)
def test_what_comes_as_a_whole_below_autograd_finds_what_is_away(apart: Apart, how: str, mode: str) -> None:
    """Elsewhere autograd takes such ops apart before anybody sees them."""
    expected = WHOLE[how](fresh())
    tensor = fresh()
    home = apart.add(tensor)
    apart.leave()
    assert not home.is_here
    with BELOW_AUTOGRAD[mode]():
        found = WHOLE[how](tensor)
        apart.leave()
        assert same(found + 0, expected)
    apart.leave()
    assert same(tensor + 0, fresh())


@pytest.mark.parametrize("how", RAW_READS)
def test_what_reads_without_an_op_gets_it_or_one_clear_error(apart: Apart, how: str) -> None:
    expected = RAW_READS[how](fresh())
    tensor = fresh()
    apart.add(tensor)
    apart.leave()
    assert same(found_or_absent(RAW_READS[how], tensor), expected)
    assert same(tensor + 0, fresh())


@pytest.mark.parametrize("how", RAW_READS)
def test_what_reads_without_an_op_gets_it_where_a_budget_is_held(kept: Kept, how: str) -> None:
    expected = RAW_READS[how](fresh())
    for on in ON.values():
        tensor = fresh()
        home = kept.add(tensor)
        kept.leave()
        assert not home.is_here
        assert same(RAW_READS[how](on(tensor)), expected)
        kept.leave()
        assert same(tensor + 0, fresh())
        assert not kept.value(tensor).users


def test_whether_bytes_are_shared_can_be_asked_of_what_is_away(kept: Kept) -> None:
    """PyTorch ends the process if it is asked itself."""
    tensor = fresh()
    kept.add(tensor)
    kept.leave()
    assert not tensor.is_shared()
    assert not tensor.untyped_storage().is_shared()
    assert torch.empty(3).share_memory_().is_shared()


# Writes ---------------------------------------------------------------------------------------------------------------


def written(how: Callable[[Tensor], object]) -> Tensor:
    tensor = fresh()
    how(tensor)
    return tensor


@pytest.mark.parametrize("begin", ["away", "here"])
@pytest.mark.parametrize("how", OP_WRITES)
def test_no_write_of_an_op_is_lost(apart: Apart, how: str, begin: str) -> None:
    expected = written(OP_WRITES[how])
    tensor = fresh()
    home = apart.add(tensor)
    apart.leave()
    if begin == "here":
        assert same(tensor + 0, fresh())
    before = home.writes
    OP_WRITES[how](tensor)
    assert home.writes > before
    for _ in range(2):
        apart.leave()
        assert same(tensor + 0, expected)


@pytest.mark.parametrize("begin", ["away", "here"])
@pytest.mark.parametrize("how", RAW_WRITES)
def test_no_write_that_is_no_op_is_lost_where_a_budget_is_held(kept: Kept, how: str, begin: str) -> None:
    expected = written(RAW_WRITES[how])
    tensor = fresh()
    kept.add(tensor)
    kept.leave()
    if begin == "here":
        assert same(tensor + 0, fresh())
    RAW_WRITES[how](tensor)
    assert same(tensor + 0, expected)
    for _ in range(2):
        kept.leave()
        assert same(tensor + 0, expected)


@pytest.mark.parametrize("how", ["op", "foreach", "backward", "compile", "thread", "item", "numpy"])
def test_reads_count_as_no_writes(apart: Apart, how: str) -> None:
    """What is not written to is not copied out again."""
    tensor = fresh()
    home = apart.add(tensor)
    (OP_READS | RAW_READS)[how](tensor)
    assert home.writes == 0


def test_an_operator_that_is_vouched_for_writes_what_it_declares(apart: Apart, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = fresh()
    home = apart.add(tensor)
    torch.ops.pooch_tests.read(tensor)
    assert home.writes > 0


# What stays -----------------------------------------------------------------------------------------------------------

ARRAYS: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda x: x.numpy(),
    "asarray": numpy.asarray,
    "__array__": lambda x: x.__array__(),
    "of a slice": lambda x: x[1:].numpy(),
    "slice of it": lambda x: x.numpy()[1:],
    "of a detached tensor": lambda x: x.detach().numpy(),
    "memory": lambda x: numpy.asarray(memoryview(x.numpy())),
    "from_numpy": lambda x: torch.from_numpy(x.numpy()),
}


@pytest.mark.parametrize("begin", ["away", "here"])
@pytest.mark.parametrize("how", ARRAYS)
def test_what_an_array_is_on_stays_as_long_as_the_array_and_keeps_what_it_writes(
    kept: Kept, how: str, begin: str
) -> None:
    tensor, expected = fresh(), fresh()
    home = kept.add(tensor)
    kept.leave()
    if begin == "here":
        assert same(tensor + 0, fresh())
    array, other = ARRAYS[how](tensor), ARRAYS[how](expected)
    kept.leave()
    assert home.is_here
    array[0], other[0] = 77, 77
    kept.leave()
    assert same(tensor + 0, expected)
    array[1], other[1] = 78, 78
    del array
    kept.leave()
    assert not home.is_here
    assert same(tensor + 0, expected)


@pytest.mark.parametrize("how", ["data_ptr", "storage", "from_dlpack", "numpy.from_dlpack", "capsule"])
def test_what_somebody_has_the_address_of_stays(kept: Kept, how: str) -> None:
    obtain: dict[str, Callable[[Tensor], Any]] = {
        "data_ptr": lambda x: x.data_ptr(),
        "storage": lambda x: x.untyped_storage().data_ptr(),
        "from_dlpack": torch.from_dlpack,
        "numpy.from_dlpack": numpy.from_dlpack,
        "capsule": torch.utils.dlpack.to_dlpack,  # type: ignore[attr-defined]
    }
    for begin in ("away", "here"):
        tensor = fresh()
        home = kept.add(tensor)
        kept.leave()
        if begin == "here":
            assert same(tensor + 0, fresh())
        held = obtain[how](tensor)
        kept.leave()
        assert home.is_here
        del held


def _embedded(indices: Tensor) -> Tensor:
    table = torch.ones(9, 4, requires_grad=True)
    torch.nn.functional.embedding(indices, table, sparse=True).sum().backward()
    assert table.grad is not None
    return table.grad


SPARSE: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]] = {
    "indices": (lambda: torch.arange(8).view(1, 8), lambda x: torch.sparse_coo_tensor(x, torch.ones(8), (9,))),
    "values": (lambda: torch.arange(8.0), lambda x: torch.sparse_coo_tensor(torch.arange(8).view(1, 8), x, (9,))),
    "rows": (lambda: torch.arange(9), lambda x: torch.sparse_csr_tensor(x, torch.arange(8), torch.ones(8), (8, 8))),
    "columns": (lambda: torch.arange(8), lambda x: torch.sparse_csc_tensor(torch.arange(9), x, torch.ones(8), (8, 8))),
    "gradient": (lambda: torch.arange(8), _embedded),
}


@pytest.mark.parametrize("how", SPARSE)
def test_what_a_sparse_tensor_is_made_of_stays(apart: Apart, how: str) -> None:
    """Ops on that one read it, and are no ops on what it is made of."""
    make, made_of = SPARSE[how]
    expected = made_of(make()).to_dense()
    part = make()
    home = apart.add(part)
    apart.leave()
    assert not home.is_here
    made = made_of(part)
    apart.leave()
    assert home.is_here
    assert same(made.to_dense(), expected)


def test_what_a_sparse_tensor_was_copied_from_leaves(apart: Apart) -> None:
    tensor = fresh()
    home = apart.add(tensor)
    indices = torch.zeros(2, 1, dtype=torch.int64)
    made = (tensor.to_sparse(), tensor.sparse_mask(torch.sparse_coo_tensor(indices, torch.ones(1), tensor.shape)))
    apart.leave()
    assert not home.is_here
    assert same(made[0].to_dense(), fresh())


def test_a_buffer_that_a_sparse_tensor_was_made_of_before_stays(kept: Kept) -> None:
    model = nn.Module()
    columns = torch.arange(4096)
    model.register_buffer("columns", columns)
    made = torch.sparse_csr_tensor(torch.arange(4097), columns, torch.ones(4096))
    kept.memory.adopt_model(model)
    assert kept.memory.values.of(columns.untyped_storage()._cdata) is None
    assert made.sum() == 4096
    del made
    kept.memory.adopt_model(model)
    assert kept.memory.values.of(columns.untyped_storage()._cdata) is not None


def test_what_is_accessed_without_an_op_stays_until_that_has_ended(kept: Kept) -> None:
    tensor = fresh()
    home = kept.add(tensor)
    found: list[bool] = []

    def add_one(number: float) -> float:
        kept.leave()
        found.append(home.is_here)
        return number + 1

    kept.leave()
    tensor.apply_(add_one)  # type: ignore[no-untyped-call]
    assert found == [True] * tensor.numel()
    kept.leave()
    assert not home.is_here
    assert same(tensor + 0, fresh() + 1)


def test_what_writes_is_told_of_a_copy_that_reads_and_what_reads_is_not(apart: Apart) -> None:
    tensor = fresh()
    home = apart.add(tensor)
    home.is_read = True
    assert same(tensor + 0, fresh())
    assert not apart.brought
    assert home.is_read
    for _ in range(2):
        tensor.add_(1)
    assert apart.brought == [[home.key]]
    assert not home.is_read


def test_what_is_resized_stays_as_its_room_is_of_another_size(kept: Kept) -> None:
    before, tensor, after = torch.full((8,), 1.0), fresh(), torch.full((8,), 2.0)
    for each in (before, tensor, after):
        kept.add(each)
    kept.leave()
    tensor.resize_(10_000).fill_(3)
    kept.leave()
    kept.leave()
    assert [each.unique().tolist() for each in (before, tensor, after)] == [[1.0], [3.0], [2.0]]


# Homes ----------------------------------------------------------------------------------------------------------------


def test_a_storage_has_one_home_and_needs_plain_memory(library: Any, apart: Apart) -> None:
    tensor = fresh()
    home = apart.add(tensor)
    with pytest.raises(ValueError, match="has a home already"):
        library.Home(tensor.view(-1))
    for other in (torch.eye(3).to_sparse(), torch.empty(2, device="meta"), 3):
        with pytest.raises(TypeError, match="plain memory"):
            library.Home(other)
    with pytest.raises(TypeError, match="a tensor is marked"):
        home.mark(3)
    with pytest.raises(TypeError, match="given in a storage"):
        home.give(3)


def test_bytes_are_taken_and_given_once(apart: Apart) -> None:
    tensor = fresh()
    home = apart.add(tensor)
    taken = home.take()
    assert bytes(taken) == bytes(fresh().untyped_storage())
    assert (home.is_here, home.take()) == (False, None)
    assert tensor.untyped_storage().nbytes() == BYTES
    home.give(taken)
    assert taken.nbytes() == 0
    other = fresh().untyped_storage()
    home.give(other)  # they are there
    assert other.nbytes() == BYTES
    assert same(tensor, fresh())


def test_bytes_are_not_taken_that_were_written_to_since_somebody_looked(apart: Apart) -> None:
    """Another thread may write between a look at what is to be copied and the taking."""
    tensor = fresh()
    home = apart.add(tensor)
    writes = home.writes
    tensor.add_(1)
    assert home.take(writes) is None
    assert home.is_here
    taken = home.take(home.writes)
    assert taken is not None
    home.give(taken)
    assert same(tensor + 0, fresh() + 1)


def test_what_an_op_may_work_on_after_it_has_returned_stays_until_it_is_closed(apart: Apart) -> None:
    tensor = fresh()
    home = apart.add(tensor)
    tensor.set_(tensor.detach())
    assert home.is_used
    assert home.take() is None
    writes = home.writes
    home.close()
    assert home.writes > writes
    home.close()
    assert home.writes == writes + 1
    assert apart.leave() == 1
    assert same(tensor + 0, fresh())


def test_what_the_program_has_released_is_gone_and_neither_taken_nor_given(library: Any, apart: Apart) -> None:
    tensor = fresh()
    home = apart.add(tensor)
    key = home.key
    assert (home.is_gone, home.tensors) == (False, 1)
    view = tensor.detach()
    assert home.tensors == 2
    assert library.tensors_beside(view) == 2
    del tensor
    assert (home.is_gone, home.tensors) == (False, 1)
    del view
    assert (home.is_gone, home.tensors, home.storage, home.take()) == (True, 0, None, None)
    assert [fresh().untyped_storage()._cdata == key for _ in range(50)] == [False] * 50  # its address is still its own


def test_views_of_what_has_a_home_are_watched_and_copies_are_not(library: Any, apart: Apart) -> None:
    tensor = fresh()
    apart.add(tensor)
    for view in (tensor.view(-1), tensor.t()[1:], tensor.detach(), tensor.data, tensor.unbind()[1], tensor.real):
        assert library.is_marked(view)
    for other in (tensor.clone(), tensor + 1, tensor.to(torch.float64), tensor[tensor > 1]):
        assert not library.is_marked(other)


@pytest.mark.parametrize(
    "make",
    [
        lambda tensor: tensor.new(2, 3).zero_(),
        lambda tensor: tensor.new([1.5, 2]),
        lambda tensor: tensor.new(torch.ones(3, dtype=tensor.dtype)),
        lambda tensor: tensor.new(),
        lambda tensor: tensor.new_tensor([1.5, 2]),
        lambda tensor: tensor.new_tensor(3, dtype=torch.int64),
        lambda tensor: tensor.new_tensor(data=2.5, requires_grad=True),
        lambda tensor: tensor[0].detach().new(4).fill_(2),
    ],
)
def test_tensors_are_made_like_one_that_has_a_home(apart: Apart, make: Any) -> None:
    """As recurrent networks do with their first parameter, and optimizers with gradients."""
    for tensor in (fresh(), torch.nn.Parameter(fresh().double())):
        expected = make(tensor)
        apart.add(tensor)
        made = make(tensor)
        assert (made.dtype, made.device, made.requires_grad) == (
            expected.dtype,
            expected.device,
            expected.requires_grad,
        )
        assert torch.equal(made, expected)


def test_the_type_of_what_has_a_home_is_known(apart: Apart) -> None:
    single, double = fresh(), torch.nn.Parameter(fresh().double())
    for tensor in (single, double):
        apart.add(tensor)
    kinds = (torch.FloatTensor, torch.DoubleTensor, torch.LongTensor, torch.cuda.FloatTensor, torch.Tensor)
    assert [isinstance(single, kind) for kind in kinds] == [True, False, False, False, True]
    assert [isinstance(double.data[0], kind) for kind in kinds] == [False, True, False, False, True]
    assert [isinstance(3, kind) for kind in kinds] == [False] * 5


def test_uses_are_noted_in_their_order(library: Any, apart: Apart) -> None:
    one, other = fresh(), fresh()
    homes = [apart.add(one), apart.add(other)]
    library.take_uses()
    _ = one + other, one + 1, other * other
    assert library.count_uses() == 4
    assert homes[0].last_use < homes[1].last_use
    assert library.take_uses() == [homes[0].key, homes[1].key, homes[0].key, homes[1].key]
    assert library.count_uses() == 0


def test_homes_are_found_among_what_programs_nest(library: Any, apart: Apart) -> None:
    one, other, none = fresh(), fresh(), fresh()
    homes = [apart.add(one), apart.add(other)]
    nesting = {"first": other, "more": (one[1:], [none, one.to_sparse()], {"again": other}, 3, "text", None)}
    assert library.keys_of_homes(nesting) == [homes[1].key, homes[0].key, homes[1].key]
    assert library.keys_of_homes([]) == []
    sparse, device = one.to_sparse(), torch.device("cpu")
    assert library.keys_of([one, none, sparse, 3]) == [homes[0].key, none.untyped_storage()._cdata, None, None]
    with pytest.raises(TypeError, match="in a list"):
        library.keys_of((one,))
    assert library.have_homes({"first": one, "others": [other[1:], sparse, 3]}, device, 0)
    assert not library.have_homes([one, [none]], device, BYTES)
    assert library.have_homes([one, [none]], device, BYTES + 1), "what is smaller stays"
    assert library.have_homes([one, [none]], torch.device("cuda"), 0)
    watch.unmark(one)
    assert not library.have_homes([one], device, 0), "ops on it come to nobody"
    for asked in (library.here_bytes, lambda device: library.have_homes([], device, 0)):
        with pytest.raises(TypeError, match="a device is asked about"):
            asked("cpu")


def test_the_bytes_that_are_there_are_those_of_a_device_that_are_neither_away_nor_gone(
    library: Any, apart: Apart
) -> None:
    device, before_bytes = torch.device("cpu"), library.here_bytes(torch.device("cpu"))
    one, other = fresh(), fresh()
    for tensor in (one, other):
        apart.add(tensor)
    assert library.here_bytes(device) == before_bytes + 2 * BYTES
    assert library.here_bytes(torch.device("cuda")) == 0
    apart.leave()
    assert library.here_bytes(device) == before_bytes
    _ = one + 1
    assert library.here_bytes(device) == before_bytes + BYTES
    del one
    assert library.here_bytes(device) == before_bytes


def test_an_op_that_finds_its_bytes_nowhere_fails_and_loses_nothing(apart: Apart) -> None:
    one, other = fresh(), fresh()
    homes = [apart.add(one), apart.add(other)]
    apart.leave()
    apart.fails = True
    with pytest.raises(OSError, match="cannot be read"):
        one.add_(other)
    assert [home.is_used for home in homes] == [False, False]
    apart.fails = False
    assert same(one + other, 2 * fresh())


def test_an_op_that_fails_lets_go_of_its_arguments(apart: Apart) -> None:
    tensor = fresh()
    home = apart.add(tensor)
    with pytest.raises(RuntimeError):
        _ = tensor @ torch.ones(2, 2)
    assert not home.is_used
    assert apart.leave() == 1


def test_bytes_stay_while_an_op_works_on_them(apart: Apart) -> None:
    tensor, found = fresh(), []
    home = apart.add(tensor)

    class Looking(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    @torch.library.custom_op("pooch_tests::looks", mutates_args=())
    def looks(x: Tensor) -> Tensor:
        found.append((home.is_used, home.take(), x.sum().item()))
        return x + 1

    apart.leave()
    assert same(torch.ops.pooch_tests.looks(tensor), fresh() + 1)
    assert found == [(True, None, fresh().sum().item())]
    assert not home.is_used


def test_other_data_in_the_place_of_a_parameters_is_what_ops_find(apart: Apart) -> None:
    parameter = nn.Parameter(fresh())
    home = apart.add(parameter)
    apart.leave()
    parameter.data = parameter.data * 2
    apart.leave()
    assert same(parameter + 0, fresh() * 2)
    assert home.is_gone
    parameter.data = fresh()
    assert same(parameter + 0, fresh())


def test_a_deep_copy_and_a_state_dict_are_of_what_is_away(kept: Kept) -> None:
    model = nn.Linear(COLUMNS, ROWS)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for parameter in model.parameters():
        kept.add(parameter)
    kept.leave()
    import copy

    twin = copy.deepcopy(model)
    kept.leave()
    state = model.state_dict()
    for name, tensor in expected.items():
        assert same(twin.state_dict()[name], tensor)
        assert same(state[name] + 0, tensor)
    twin.weight.data.zero_()
    assert same(model.weight + 0, expected["weight"])


def test_a_tensor_passes_through_a_queue_to_another_process(kept: Kept) -> None:
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    tensor = fresh()
    home = kept.add(tensor)
    kept.leave()
    queue.put(tensor)
    kept.leave()
    assert home.is_here  # the other process may write to it
    received = queue.get()
    assert same(received, fresh())
    tensor.add_(1)
    assert same(received, fresh() + 1)


# Parts ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def in_parts(library: Any) -> Iterator[Apart]:
    yield (made := Apart(library, part_bytes=2 * BYTES))
    made.bring_back([key for key, home in made.homes.items() if not home.is_gone])
    made.homes.clear()
    library.use_homes(made.bring_back, 0)


FOREACH: dict[str, Callable[[list[Tensor]], Any]] = {
    "new ones": lambda xs: torch._foreach_add(xs, 2),
    "in place": lambda xs: torch._foreach_mul_(xs, 2),
    "two lists": lambda xs: torch._foreach_add(xs, [x.detach() * 2 for x in xs], alpha=3),
    "with plain ones between": lambda xs: torch._foreach_add([*xs[:2], torch.ones(3), *xs[2:]], 1),
    "a scalar for each": lambda xs: torch._foreach_mul(xs, [float(n) for n in range(len(xs))]),
    "in place with a scalar for each": lambda xs: torch._foreach_addcmul_(xs, xs, xs, [0.5] * len(xs)),
    "norms": lambda xs: torch._foreach_norm(xs),
    "a tensor of scalars": lambda xs: torch._foreach_addcmul(xs, xs, xs, torch.arange(float(len(xs)))),
    "one tensor for all": lambda xs: torch._foreach_mul(xs, torch.tensor(3.0)),
    "copy": lambda xs: torch._foreach_copy_(xs, [torch.full((ROWS, COLUMNS), float(n)) for n in range(len(xs))]),
    "three lists": lambda xs: torch._foreach_lerp(xs, [x.neg() for x in xs], [torch.full_like(x, 0.25) for x in xs]),
    "maximum": lambda xs: torch._foreach_clamp_min(xs, [5.0 * n for n in range(len(xs))]),
}  # fmt: skip


def some(count: int) -> list[Tensor]:
    return [fresh() + 100 * number for number in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("how", FOREACH)
def test_ops_on_lists_give_in_parts_what_they_give_as_a_whole(in_parts: Apart, how: str, count: int) -> None:
    plain, tensors = some(count), some(count)
    expected = FOREACH[how](plain)
    for tensor in tensors:
        in_parts.add(tensor)
    in_parts.leave()
    in_parts.brought.clear()
    found = FOREACH[how](tensors)
    if how != "a tensor of scalars":
        assert max(len(set(keys)) for keys in in_parts.brought) <= 2
    if expected is not None:
        assert len(found) == len(expected)
        assert all(map(same, found, expected))
    in_parts.leave()
    assert all(same(tensor + 0, each) for tensor, each in zip(tensors, plain, strict=True))


def test_an_item_that_is_larger_than_a_part_is_a_part_by_itself(in_parts: Apart) -> None:
    tensors = [fresh(), torch.ones(10 * ROWS, COLUMNS), fresh(), fresh()]
    for tensor in tensors:
        in_parts.add(tensor)
    in_parts.leave()
    torch._foreach_add_(tensors, 1)
    assert [len(keys) for keys in in_parts.brought] == [1, 1, 2]
    in_parts.leave()
    assert [tensor.sum().item() for tensor in tensors] == [300.0, 480.0, 300.0, 300.0]


def test_infinities_are_found_in_whatever_part_they_are(in_parts: Apart) -> None:
    for bad in range(5):
        tensors = some(5)
        tensors[bad][1, 1] = float("inf")
        for tensor in tensors:
            in_parts.add(tensor)
        in_parts.leave()
        found, scale = torch.tensor(0.0), torch.tensor(0.5)
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, scale)
        assert found.item() == 1.0


@pytest.mark.parametrize("op", [torch._foreach_add, torch._foreach_copy_])
@pytest.mark.parametrize("lengths", [(3, 2), (2, 3), (0, 3), (3, 0)])
def test_lists_of_several_lengths_run_as_a_whole(in_parts: Apart, op: Any, lengths: tuple[int, int]) -> None:
    tensors = some(3)
    for tensor in tensors:
        in_parts.add(tensor)
    in_parts.leave()
    assert same(torch.cat(tensors), torch.cat(some(3)))
    with pytest.raises(RuntimeError, match=r"[Tt]ensor"):
        op(*(tensors[:length] for length in lengths))
    assert not any(home.is_used for home in in_parts.homes.values())


# Random ops, and threads ----------------------------------------------------------------------------------------------


def random_op(numbers: random.Random, tensors: list[Tensor]) -> Tensor | None:
    """One op on some of the tensors, which have values below one."""
    one, other, third = (tensors[numbers.randrange(len(tensors))] for _ in range(3))
    row = numbers.randrange(ROWS)
    ops: list[Callable[[], Any]] = [
        lambda: one + other * third,
        lambda: one.mul_(0.5).add_(other, alpha=0.25),
        lambda: one[row].copy_(other[ROWS - 1 - row]),
        lambda: one.t().mul_(0.9),
        lambda: one.view(-1)[row::3].sub_(0.1),
        lambda: torch.mul(one, other, out=third),
        lambda: torch._foreach_mul_([one, other] if one is not other else [one], 0.75),
        lambda: torch._foreach_lerp_([one], [other], 0.5),
        lambda: torch.cat([one, other]).sum(0),
        lambda: one.sin_().neg_(),
        lambda: torch.view_as_complex(one.view(4, 3, 2)).mul_(0.5j),
        lambda: one.copy_(other),
        lambda: one @ other.t(),
        lambda: torch.vmap(lambda each: each.sum())(one),
        lambda: one.zero_(),
        lambda: one.add_(torch.arange(float(COLUMNS)) / COLUMNS),
        lambda: one.view(torch.int32).bitwise_and_(-2),
        lambda: other.index_add_(0, torch.tensor([row]), one[row : row + 1].clone()),
        lambda: nn.functional.batch_norm(one, other[0], other[1], training=True) if one is not other else None,
    ]  # fmt: skip
    result = numbers.choice(ops)()
    return result if isinstance(result, Tensor) else None


@pytest.mark.parametrize("seed", range(40))
def test_random_ops_on_what_comes_and_goes_give_what_they_give_on_what_stays(library: Any, seed: int) -> None:
    numbers = random.Random(seed)
    apart = Apart(library, numbers.choice([0, BYTES, 3 * BYTES]))
    plain = [fresh() / 24 - number / 8 for number in range(5)]
    tensors = [tensor.clone() for tensor in plain]
    for tensor in tensors:
        apart.add(tensor)
    for number in range(60):
        if numbers.random() < 0.4:
            apart.leave()
        drawn = numbers.randrange(2**30)
        expected, found = (random_op(random.Random(drawn), each) for each in (plain, tensors))
        assert (expected is None) == (found is None)
        if expected is not None and found is not None:
            assert torch.equal(found.nan_to_num(), expected.nan_to_num()), (seed, number)
    apart.leave()
    for tensor, each in zip(tensors, plain, strict=True):
        assert torch.equal((tensor + 0).nan_to_num(), each.nan_to_num()), seed
    library.use_homes(apart.bring_back, 0)


def test_threads_read_and_write_while_others_let_leave(apart: Apart) -> None:
    shared = [fresh() + number for number in range(4)]
    expected = [tensor.clone() for tensor in shared]
    own = [torch.zeros(ROWS, COLUMNS) for _ in range(3)]
    for tensor in (*shared, *own):
        apart.add(tensor)
    end_s = time.monotonic() + 1.0
    errors: list[BaseException] = []
    counts = [0, 0, 0]

    def works(number: int) -> None:
        numbers = random.Random(number)
        try:
            while time.monotonic() < end_s and not errors:
                at = numbers.randrange(4)
                assert same(shared[at] + 0, expected[at])
                own[number].add_(1)
                counts[number] += 1
        except BaseException as error:  # noqa: BLE001  (told by the thread that joins)
            errors.append(error)

    def lets_leave() -> None:
        try:
            while time.monotonic() < end_s and not errors:
                apart.leave()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=works, args=(number,)) for number in range(3)]
    threads.append(threading.Thread(target=lets_leave))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert min(counts) > 10
    for tensor, count in zip(own, counts, strict=True):
        assert same(tensor + 0, torch.full((ROWS, COLUMNS), float(count)))


def test_homes_end_in_any_order(library: Any, apart: Apart) -> None:
    tensors = [fresh() for _ in range(20)]
    homes = [library.Home(tensor) for tensor in tensors]
    numbers = random.Random(0)
    for _ in range(20):
        (tensors if numbers.random() < 0.5 else homes).pop() if tensors and homes else None
    gc.collect()
    for tensor in tensors:
        assert same(tensor + 0, fresh())
