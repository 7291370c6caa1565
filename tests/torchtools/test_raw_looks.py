"""Accesses that are no ops are seen without anything that PyTorch's own code could ask about."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pooch.torchtools.raw_looks import RawLooks
from pooch.torchtools.stand_ins import LastingUser
from pooch.torchtools.tensors import storage_of

pytestmark = pytest.mark.cpu

ACCESSES: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "print": (repr, False),
    "format": (lambda x: f"{x}", False),
    "tolist": (lambda x: x.tolist(), False),
    "deepcopy": (copy.deepcopy, False),
    "numpy": (lambda x: x.numpy(), True),
    "unbound": (lambda x: Tensor.numpy(x), True),
    "asarray": (numpy.asarray, True),
    "address": (lambda x: x.data_ptr(), True),
    "storage": (lambda x: x.untyped_storage(), True),
    "typed storage": (lambda x: x._typed_storage(), True),  # type: ignore[attr-defined]
    "dlpack": (torch.from_dlpack, True),
    "old dlpack": (lambda x: torch.utils.dlpack.to_dlpack(x), True),
    "pickle": (pickle.dumps, True),
    "copy": (copy.copy, True),
    "apply": (lambda x: x.apply_(lambda number: number), True),  # type: ignore[no-untyped-call]
    "map": (lambda x: x.map_(torch.ones(3), lambda one, other: one), True),  # type: ignore[no-untyped-call]
    "interface": (lambda x: getattr(x, "__cuda_array_interface__", None), True),
}


class Seen:
    """What was reported."""

    def __init__(self) -> None:
        self.looks: list[tuple[tuple[Any, ...], bool]] = []
        self.assigned: list[Tensor] = []

    def look(self, arguments: Any, handed_out: bool) -> None:
        self.looks.append((arguments[0], handed_out))

    def watching(self) -> RawLooks:
        return RawLooks(self.look, self.assigned.append)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("name", ACCESSES)
def test_an_access_is_reported_once_before_it_happens(name: str) -> None:
    access, hands_out = ACCESSES[name]
    tensor, seen = torch.rand(3), Seen()
    with seen.watching():
        access(tensor)
        torch.sin(tensor)  # ops are no such accesses
    access(tensor)
    found = [(arguments[0] is tensor, out) for arguments, out in seen.looks]
    assert found[0] == (True, hands_out)
    assert all(not is_it and not out for is_it, out in found[1:])  # what printing makes of it
    assert not seen.assigned


def test_the_class_is_as_it_was() -> None:
    pickle.dumps(torch.rand(2))  # the pickle module keeps something in each class
    places = Tensor, torch, torch.utils.dlpack
    before = [list(vars(place).items()) for place in places]

    def fail() -> None:
        with Seen().watching():
            assert [list(vars(place).items()) for place in places] != before
            raise ValueError("in the middle")

    with Seen().watching(), pytest.raises(ValueError, match="in the middle"):
        fail()
    assert [list(vars(place).items()) for place in places] == before


def test_what_the_program_puts_in_place_meanwhile_stays_and_is_watched_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, tensor = Seen(), torch.rand(3)
    with seen.watching():
        earlier = Tensor.tolist
        monkeypatch.setattr(Tensor, "tolist", lambda x: ["the program's", *earlier(x)], raising=True)
        assert tensor.tolist()[0] == "the program's"
    assert tensor.tolist()[0] == "the program's"
    assert len(seen.looks) == 1
    with seen.watching():
        assert tensor.tolist() == ["the program's", *torch.Tensor.numpy(tensor).tolist()]
    assert len(seen.looks) == 3


def test_only_the_thread_that_watches_is_watched() -> None:
    seen, tensor = Seen(), torch.rand(3)
    with seen.watching():
        thread = threading.Thread(target=lambda: (tensor.numpy(), setattr(tensor, "data", torch.rand(3))))
        thread.start()
        thread.join()
        assert not seen.looks
        assert not seen.assigned
        tensor.numpy()
    assert len(seen.looks) == 1


def test_it_may_be_left_in_another_thread() -> None:
    before, seen = list(vars(Tensor).items()), Seen()
    watching = seen.watching()
    watching.__enter__()
    thread = threading.Thread(target=watching.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    torch.rand(3).numpy()
    assert not seen.looks
    assert list(vars(Tensor).items()) == before


def test_what_a_watcher_does_itself_is_not_reported() -> None:
    looks: list[Any] = []
    tensor, outer = torch.rand(3), Seen()
    with outer.watching(), RawLooks(lambda arguments, out: looks.append(arguments[0][0].numpy())):
        tensor.data_ptr()
    assert len(looks) == 1
    assert len(outer.looks) == 1


def test_data_that_is_assigned_is_reported_while_the_old_is_there() -> None:
    tensor, before = torch.zeros(3), []
    with RawLooks(lambda arguments, out: None, lambda x: before.append(x.sum().item())):
        assert tensor.data is not tensor
        tensor.data = torch.ones(3)
        with pytest.raises(RuntimeError, match="not allowed"):
            del tensor.data
    assert before == [0.0]
    assert tensor.sum().item() == 3.0
    assert "data" not in vars(Tensor)


def test_what_is_asked_as_data_is_assigned_calls_nothing_of_the_program() -> None:
    """A parameter without a shape yet refuses all that it may be asked, also within a subclass of the program's."""
    own, lazy = torch.zeros(3).as_subclass(Sub), torch.nn.LazyLinear(4).weight
    keys = list[int]()

    def note(tensor: Tensor) -> Callable[[], None]:
        keys.append(storage_of(tensor)._cdata)
        return lambda: keys.append(storage_of(tensor)._cdata)

    Sub.calls.clear()
    with RawLooks(None, note):
        own.data = torch.ones(3)
        lazy.materialize((4, 3))  # type: ignore[no-untyped-call]
        lazy.data = torch.ones(4, 3)
    assert [name for _, name, *_ in Sub.calls] == ["__set__"]
    assert len(keys) == 6


class Recording(TorchFunctionMode):
    """A function mode of the program's."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, getattr(func, "__name__", ""), len(args), kwargs))
        return func(*args, **(kwargs or {}))


class Sub(Tensor):
    """A subclass of the program's that keeps what it is asked for."""

    calls: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append((func, func.__name__, len(args), kwargs))
        return super().__torch_function__(func, types, args, kwargs)


def _accessed(tensor: Tensor) -> None:
    for name in ("print", "tolist", "numpy", "address", "storage", "copy", "asarray"):
        ACCESSES[name][0](tensor)
    assert (tensor + 1).data.requires_grad is False


def test_modes_and_subclasses_of_the_program_see_what_they_see_without() -> None:
    asked = {Tensor.numpy: "numpy", Tensor.data_ptr: "address", Tensor.tolist: "list"}  # as libraries keep them
    tensor, own = torch.rand(3), torch.rand(3).as_subclass(Sub)
    Sub.calls.clear()
    with Recording() as plain:
        _accessed(tensor)
    _accessed(own)
    plain_calls, expected = list(Sub.calls), [asked.get(func) for func, *_ in plain.calls]
    Sub.calls.clear()
    seen = Seen()
    with seen.watching():
        assert not torch.overrides.has_torch_function((tensor,))
        with Recording() as mode:
            _accessed(tensor)
            assert any(func is Tensor.numpy for func, *_ in mode.calls)
        reported = len(seen.looks)
        _accessed(own)
    assert [call[1:] for call in mode.calls] == [call[1:] for call in plain.calls]
    assert [asked.get(func) for func, *_ in mode.calls] == expected
    assert [call[1:] for call in Sub.calls] == [call[1:] for call in plain_calls]
    assert mode.calls == plain.calls
    assert plain_calls == Sub.calls
    assert reported >= 7
    assert len(seen.looks) >= reported + 7


def test_stand_ins_look_like_what_they_stand_for() -> None:
    names = ("numpy", "__repr__", "untyped_storage", "__array__")
    before = [getattr(Tensor, name) for name in names]
    with Seen().watching():
        for name, original in zip(names, before, strict=True):
            now: Any = getattr(Tensor, name)
            assert now == original
            assert original == now
            assert hash(now) == hash(original)
            assert (now.__name__, now.__doc__, now.__qualname__) == (
                original.__name__, original.__doc__, original.__qualname__,
            )  # fmt: skip
            assert repr(now) == repr(original)
            assert isinstance(getattr(torch.rand(1), name), MethodType)


def test_for_a_lasting_user_the_class_changes_once() -> None:
    names = "numpy", "data"
    before = [vars(Tensor).get(name) for name in names]
    lasting, placed, looks = LastingUser(), [], []

    def assigned(tensor: Tensor) -> None:
        looks.append(tensor)

    for _ in range(2):
        with RawLooks(lambda looked, _: looks.append(looked), assigned, lasting):
            placed.append([vars(Tensor).get(name) for name in names])
            torch.rand(2).numpy()
        placed.append([vars(Tensor).get(name) for name in names])
        torch.rand(2).numpy()  # nobody watches
    assert all(now is first for each in placed[1:] for now, first in zip(each, placed[0], strict=True))
    assert not any(now is earlier for now, earlier in zip(placed[0], before, strict=True))
    assert len(looks) == 2
    lasting.end()
    assert all(vars(Tensor).get(name) is earlier for name, earlier in zip(names, before, strict=True))
    with RawLooks(None, assigned, lasting):
        torch.rand(2).data = torch.rand(2)
    assert len(looks) == 3
    assert vars(Tensor).get("data") is before[1]


@pytest.mark.parametrize("name", ["svdvals", "matrix_norm", "cond"])
def test_what_asks_for_modes_can_be_compiled_in_one_graph(name: str) -> None:
    tensor = torch.eye(3) + 0.1 * torch.arange(9.0).reshape(3, 3)
    function = getattr(torch.linalg, name)
    plain = function(tensor)
    torch._dynamo.reset()
    with RawLooks(lambda *_: None):
        assert torch.equal(
            torch.compile(lambda x: getattr(torch.linalg, name)(x), backend="eager", fullgraph=True)(tensor), plain
        )
