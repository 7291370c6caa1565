"""Facts about operators and storages that the profiler and the runtime must agree on."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pooch.torchtools.effects import StorageMap, argument_keys, new_tensors, written_tensors
from pooch.torchtools.memory_trace import live_bytes
from pooch.torchtools.operators import is_view_name, operator_facts, reads_statistics
from pooch.torchtools.tensors import (
    find_tensors,
    fingerprint,
    map_tensors,
    model_signature,
    storage_bytes,
    storage_key,
    version_of,
)

ATEN = torch.ops.aten


def test_views_writes_and_random_ops_follow_from_the_schema() -> None:
    assert operator_facts(ATEN.transpose.int).is_view
    assert is_view_name("aten::transpose")
    assert not operator_facts(ATEN.add.Tensor).is_view
    assert not is_view_name("aten::add")
    assert operator_facts(ATEN.add_.Tensor).written == (0,)
    assert operator_facts(ATEN.add.out).written_names == ("out",)
    assert operator_facts(ATEN.bernoulli.default).random
    assert not operator_facts(ATEN.sin.default).random


def test_telling_the_allocator_of_a_stream_is_no_op_that_computes_though_its_schema_says_that_it_writes() -> None:
    facts = operator_facts(ATEN.record_stream.default)
    assert facts.is_view
    assert (facts.written, facts.written_names) == ((), ())
    assert is_view_name("aten::record_stream")


def test_refusals_say_why() -> None:
    assert operator_facts(ATEN.sin.default).refusal is None
    assert "noise" in str(operator_facts(ATEN.rrelu_with_noise.default).refusal)
    assert "bitwise" in str(operator_facts(ATEN.linalg_lstsq.default).refusal)


def test_batch_norm_updates_statistics_in_training_and_reads_them_in_evaluation() -> None:
    func = ATEN.native_batch_norm.default
    facts = operator_facts(func)
    assert facts.statistics == (3, 4)
    rows = torch.rand(2, 3)
    assert not reads_statistics(facts, func, (rows, None, None, rows, rows, True, 0.1, 1e-5))
    assert reads_statistics(facts, func, (rows, None, None, rows, rows, False, 0.1, 1e-5))


def test_effects_are_results_first_and_aliases_are_no_effects() -> None:
    base, other = torch.rand(4), torch.rand(4)
    written = written_tensors(operator_facts(ATEN.add_.Tensor), (base, other), {})
    assert set(written) == {storage_key(base)}
    keys = argument_keys((base, other), {})
    assert new_tensors(written, [base], keys) == (base,)
    assert new_tensors({}, [base.view(2, 2)], keys) == ()  # as `_unsafe_view` does
    fresh = torch.rand(4)
    assert new_tensors(written, [fresh, fresh[1:]], keys) == (fresh, base)
    assert new_tensors({}, [torch.eye(2).to_sparse()], keys) == ()


def test_a_storage_that_is_gone_is_forgotten() -> None:
    values, tensor = StorageMap(), torch.rand(4)
    key = storage_key(tensor)
    values.bind(tensor.untyped_storage(), 5)
    assert values.get(storage_key(tensor[1:])) == 5
    del tensor
    assert values.get(key) is None


def test_tensors_are_found_and_replaced_in_any_nesting() -> None:
    one, two = torch.rand(2), torch.rand(3)
    nested = [one, (two, 3, {"key": one})]
    assert [t.numel() for t in find_tensors(nested)] == [2, 3, 2]
    assert map_tensors(lambda t: t.numel(), nested) == [2, (3, 3, {"key": 2})]
    assert storage_bytes([one, one[1:], two]) == 8 + 12
    assert fingerprint("op", [one]) == "op(float32[2])"


def test_fake_tensors_that_live_take_no_memory() -> None:
    before = live_bytes(torch.device("cpu"))
    with FakeTensorMode():
        fake = torch.empty(1 << 20)
    real = torch.empty(1 << 10)
    assert live_bytes(torch.device("cpu")) - before == 4 << 10
    assert fake.numel() > real.numel()


def test_versions_of_inference_tensors_are_constant() -> None:
    with torch.inference_mode():
        constant = torch.rand(2)
    assert version_of(constant) == 0
    tensor = torch.rand(2)
    before = version_of(tensor)
    tensor.add_(1)
    assert version_of(tensor) == before + 1


def test_signatures_tell_shapes_names_and_frozen_parameters_apart() -> None:
    one, same = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    assert model_signature(one) == model_signature(same)
    assert model_signature(one) != model_signature(torch.nn.Linear(3, 2))
    same.bias.requires_grad_(False)
    assert model_signature(one) != model_signature(same)
