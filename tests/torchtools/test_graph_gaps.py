"""Gaps inside of compiled graphs: what a graph saves leaves within it, and comes back where it is read."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from pooch.executor.compiled import KeptCalls
from pooch.torchtools.graph_gaps import generated_code, insertion, operators
from pooch.torchtools.graph_gaps.generated_code import UnknownCode, with_leaving, with_returning
from pooch.torchtools.graph_gaps.partition import GAPS
from pooch.torchtools.standing_aside import StepHooks

FORWARD = """
class Runner:
    def call(self, args):
        primals_1, primals_2 = args
        args.clear()
        buf0 = empty_strided_cpu((8, 8), (8, 1), torch.float32)
        buf1 = reinterpret_tensor(buf0, (4, 8), (8, 1), 32)
        cpp_fused_0(primals_1, buf0)
        buf2 = torch.ops.aten.mm.default(primals_2, buf0)
        cpp_fused_1(buf2, buf1)
        buf3 = buf2; del buf2  # reuse
        cpp_fused_2(buf3)
        return (buf3, primals_1, reinterpret_tensor(buf0, (64, ), (1, ), 0), )
"""
BACKWARD = """
class Runner:
    def call(self, args):
        pooch_gap_0, tangents_1 = args
        args.clear()
        assert_size_stride(pooch_gap_0, (64, ), (1, ), 'input')
        with torch.cuda._DeviceGuard(0):
            triton_0.run(tangents_1)
            triton_1.run(tangents_1, pooch_gap_0)
            del pooch_gap_0
        return (tangents_1, )
"""


def written(code: str) -> list[str]:
    return [line.strip() for line in code.splitlines() if line.strip()][3:]


def test_a_result_leaves_after_the_last_line_that_names_its_memory() -> None:
    lines = written(with_leaving(FORWARD, (2,)))
    place = lines.index("cpp_fused_1(buf2, buf1)")  # which may write to it
    assert (
        lines[place + 1]
        == "pooch_left_2 = torch.ops.pooch_graph.leave.default(reinterpret_tensor(buf0, (64,), (1,), 0))"
    )
    assert lines[place + 2] == "del buf0, buf1"
    assert lines[-1] == "return (buf3, primals_1, pooch_left_2)"


@pytest.mark.parametrize(
    "line", ["buf2 = buf0", "buf2 = unknown(buf0)", "buf2 = torch.ops.aten.view.default(buf0, [64])"]
)
def test_what_may_share_the_memory_of_other_results_stays(line: str) -> None:
    code = FORWARD.replace("buf2 = torch.ops.aten.mm.default(primals_2, buf0)", line)
    assert written(with_leaving(code, (2,)))[-1] == "return (buf3, primals_1, reinterpret_tensor(buf0, (64,), (1,), 0))"


def test_code_of_another_form_is_left_as_it_is() -> None:
    with pytest.raises(UnknownCode):
        with_leaving(FORWARD.replace("        cpp_fused_2(buf3)", "        while buf3: pass"), (2,))
    with pytest.raises(UnknownCode):
        with_leaving("x = 1", (2,))


def test_backward_code_of_another_form_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has left in the forward graph could not come back."""

    def unknown(*_: object) -> str:
        raise UnknownCode

    monkeypatch.setattr(generated_code, "with_returning", unknown)
    refused = pytest.raises(Exception, match="compile with backend='aot_eager', or train without a budget")
    with torch._inductor.config.patch(force_disable_caches=True), refused:  # a cache writes nothing
        gradients("inductor", nullcontext, gaps=True)


def test_an_input_comes_back_before_the_first_line_that_reads_it() -> None:
    lines = written(with_returning(BACKWARD, {"pooch_gap_0": "cuda:0"}))
    place = lines.index("triton_1.run(tangents_1, pooch_gap_0)")
    back = "pooch_gap_0 = torch.ops.pooch_graph.come_back.default(pooch_gap_0, torch.device('cuda:0'))"
    assert lines[place - 1] == back
    assert lines[place - 2] == "triton_0.run(tangents_1)"


class Layers(nn.Sequential):
    """Several layers with dropout."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)))


def gradients(backend: str, hooks: Callable[[], Any], *, gaps: bool) -> list[Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    before = set(operators._LEFT)
    model, rows = torch.compile(Layers(), backend=backend), torch.randn(256, 64)
    if gaps:
        with GAPS.wanted():
            model(rows)
    else:
        model(rows)
    torch.manual_seed(1)
    with hooks():
        loss = model(rows).square().mean()
    loss.backward()
    assert not set(operators._LEFT) - before, "what has left is let go of"
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


class Away:
    """Saved tensor hooks that take every tensor away, and count how many of them are back at once."""

    def __init__(self) -> None:
        self.back: list[weakref.ref[Tensor]] = []
        self.most = self.left = 0

    def __call__(self) -> StepHooks:
        return StepHooks(self._leave, self._come_back, calls=KeptCalls())

    def _leave(self, tensor: Tensor) -> Any:
        if tensor.is_meta or tensor.requires_grad or tensor.nbytes < 16 * 1024:
            return tensor
        self.left += 1
        return [tensor.tolist(), tensor.dtype]

    def _come_back(self, held: Any) -> Tensor:
        if isinstance(held, Tensor):
            return held
        tensor = torch.tensor(held[0], dtype=held[1])
        self.back.append(weakref.ref(tensor))
        self.most = max(self.most, sum(each() is not None for each in self.back))
        return tensor


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_bits_are_the_same_and_what_is_saved_never_comes_back_at_once(backend: str) -> None:
    expected = gradients(backend, Away(), gaps=False)
    away = Away()
    assert all(map(torch.equal, gradients(backend, away, gaps=True), expected))
    assert away.left >= 12
    assert away.most <= 4


def test_without_gaps_all_comes_back_at_once() -> None:
    away = Away()
    gradients("aot_eager", away, gaps=False)
    assert away.most == away.left


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_where_nobody_asks_for_room_all_stays_and_hooks_of_the_program_see_what_they_do_without_gaps(
    backend: str,
) -> None:
    expected = gradients(backend, nullcontext, gaps=False)
    assert all(map(torch.equal, gradients(backend, nullcontext, gaps=True), expected))
    assert all(map(torch.equal, gradients(backend, save_on_cpu, gaps=True), expected))


def test_the_partitioner_is_that_of_the_program_again_afterwards() -> None:
    config = torch._inductor.config
    with GAPS.wanted(), GAPS.wanted():
        assert config.custom_partitioner_fn is not None
        assert isinstance(config.custom_partitioner_fn.uuid(), bytes)
    assert config.custom_partitioner_fn is None


def test_a_later_compiled_backward_graph_is_known_by_what_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[set[str]] = []

    def noted(code: str, devices: dict[str, str]) -> str:
        names.append(set(devices))
        return with_returning(code, devices)

    monkeypatch.setattr(generated_code, "with_returning", noted)
    with torch._inductor.config.patch(force_disable_caches=True):
        gradients("inductor", nullcontext, gaps=True)
        monkeypatch.setattr(insertion, "source_hash", lambda: b"another version")
        gradients("inductor", nullcontext, gaps=True)
    first, second = names
    assert first
    assert not first & second, "code from a cache would take the place of the other version's"


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_graphs_with_gaps_warn_of_nothing(backend: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*pooch_graph.*")
        gradients(backend, nullcontext, gaps=True)
