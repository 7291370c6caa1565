"""Facts about ATen operators that decide how they are traced and whether they can be replayed.

Most of them follow from the operator's schema. The tables below hold what the schema does not declare, with reasons.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ..ground.errors import UsageError
from . import accelerators
from .cuda_only import chooses_algorithms_by_timing
from .determinism import may_vary, varies_now
from .tensors import find_tensors

# These update running statistics through arguments that their schema does not mark as written. In training mode,
# outputs do not depend on the running statistics, so a replay gets scratch copies and the real ones move only once.
_BATCH_NORMS = {
    "aten::native_batch_norm",
    "aten::cudnn_batch_norm",
    "aten::miopen_batch_norm",
    "aten::_native_batch_norm_legit",
    "aten::_batch_norm_with_update",
    "aten::batch_norm_update_stats",  # this and the next two are parts of SyncBatchNorm
    "aten::batch_norm_gather_stats",
    "aten::batch_norm_gather_stats_with_counts",
}
_RUNNING_STATISTICS = ("running_mean", "running_var")

_REFUSALS = {
    "aten::rrelu_with_noise": "it writes the noise that it draws into an argument",
    "aten::rrelu_with_noise_": "it writes the noise that it draws into an argument",
    "aten::_fft_c2r": "inverse transforms are not bitwise repeatable",
    "aten::_fft_c2c": "complex transforms are not bitwise repeatable",
    "aten::linalg_lstsq": "its results are not bitwise repeatable",
    "aten::from_file": "it reads a file, which may change",
    "aten::set_": "it swaps the storage of a tensor",
    "aten::resize_": "it changes the storage of a tensor",
}
_CUDNN_RNN = "aten::_cudnn_rnn"
# Results in which kernels leave bytes as they found them, by position. Only the backward pass of the same kernel reads
# them, and it does not read those bytes.
_WORKSPACES = {
    "aten.mkldnn_rnn_layer.default": (3,),
    "aten._cudnn_rnn.default": (3, 4),
    "aten.cudnn_batch_norm.default": (3,),
    "aten._scaled_dot_product_flash_attention.default": (1, 6, 7),
    "aten._scaled_dot_product_efficient_attention.default": (1, 2, 3),
    "aten._scaled_dot_product_cudnn_attention.default": (1, 6, 7),
}
_CONVOLUTIONS = {"aten::convolution", "aten::_convolution", "aten::convolution_overrideable"}
# Operators whose kernels run others that autocast casts, each with the function that autocast would know in its place.
_RUNS_OTHERS = {
    "aten::_native_multi_head_attention": "aten::_native_multi_head_attention",
    "aten::_transformer_encoder_layer_fwd": "aten::_transformer_encoder_layer_fwd",
    "aten::_trilinear": "aten::bilinear",
    "aten::linalg_pinv": "aten::linalg_pinv",
    "aten::affine_grid_generator": "aten::affine_grid_generator",
    "aten::_sparse_addmm": "aten::_sparse_addmm",
}
# Overloads that PyTorch calls only if a dispatch mode is there, beside other ops than without one: `ctc_loss` keeps
# lengths in tensors then, and makes lists of them otherwise.
MODE_ALONE = {"aten._ctc_loss.Tensor"}
# Other views check their extent against the storage, which is empty while its bytes are off the device.
_READ_NOTHING = {"aten::detach", "aten::alias"}
# It tells the allocator who uses the memory. The schema declares a write, but it accesses no contents.
_RECORD_STREAM = "aten::record_stream"
# Operators of these are PyTorch's own, or Pooch's: what they depend on is in their schema, or in the tables above.
OWN_NAMESPACES = {"aten", "prims", "prim", "quantized", "_quantized", "mkldnn", "inductor", "higher_order"}
OWN_NAMESPACES |= {"pooch_split"}
_REFUSED_NAMESPACES = {
    "c10d": "collectives must run once on every rank",
    "_c10d_functional": "collectives must run once on every rank",
    "fsdp": "sharding must run once on every rank",
}


@dataclass(frozen=True, slots=True)
class OperatorFacts:
    """What is known about an operator before it runs.

    Attributes:
        name: name of the overload, such as "aten.relu_.default".
        is_view: whether every output aliases an input, or there is none, and nothing is written, so that it computes
            nothing.
        written: positions of arguments that it writes in place.
        written_names: names of keyword arguments that it writes in place.
        statistics: positions of running statistics that it updates without declaring so.
        random: whether it draws from the random generator.
        refusal: why it cannot be replayed, or None.
        may_surprise: whether it may write to its arguments without declaring so, or read them after it returned, as
            collectives do.
        reads_nothing: whether it is a view that is valid whatever its memory holds, even if it is empty.
        depends_on_call: whether its replay depends on its arguments or on settings, see `call_refusal`.
        is_foreign: whether it is not PyTorch's own.
        cast_as: what autocast knows if it knows this one, where its kernels run operators that are cast; or "".
    """

    name: str
    is_view: bool
    written: tuple[int, ...]
    written_names: tuple[str, ...]
    statistics: tuple[int, ...]
    random: bool
    refusal: str | None
    may_surprise: bool = False
    reads_nothing: bool = False
    depends_on_call: bool = False
    is_foreign: bool = False
    cast_as: str = ""


_REPLAYABLE: set[str] = set()  # operators that the user vouches for


def allow_replay(*names: str) -> None:
    """Allows operators from outside of PyTorch to be computed again: `pooch.allow_replay("mylib::scan")`.

    By default they are not, since a replay would run them twice, and an operator may count, draw random numbers of its
    own or write to memory that its schema does not name. One that does none of that may be allowed; what it gives is
    then checked like any other replay. It is for plans and profiles that are made afterwards.

    Args:
        names: "namespace::operator", for all of its overloads.

    Raises:
        UsageError: if a name is not of this form.
    """
    wrong = [name for name in names if not isinstance(name, str) or name.count("::") != 1]
    if wrong:
        raise UsageError(f"{wrong[0]!r} is no operator: give its namespace and name, such as 'mylib::scan'")
    _REPLAYABLE.update(names)
    forget_facts()


def is_foreign_name(name: str) -> bool:
    """Returns whether an operator is not PyTorch's own, given its name or its namespace alone."""
    return name.partition(".")[0] not in OWN_NAMESPACES


def is_foreign(func: Any) -> bool:
    """Returns whether an operator is not PyTorch's own."""
    return is_foreign_name(func.namespace)


def _foreign_refusal(func: Any) -> str | None:
    name = func._schema.name
    if not is_foreign(func) or name in _REPLAYABLE:
        return None
    return f"it is not PyTorch's own, and may not give the same result twice (pooch.allow_replay({name!r}) allows it)"


# By identity: PyTorch hashes its operators in Python, and these are asked for several times in each op of a step.
_KNOWN: dict[int, tuple[Any, OperatorFacts]] = {}


def operator_facts(func: Any) -> OperatorFacts:
    """Returns the facts about an operator, which are computed only once."""
    known = _KNOWN.get(id(func))
    if known is None or known[0] is not func:
        known = _KNOWN[id(func)] = (func, _facts_about(func))
    return known[1]


def forget_facts() -> None:
    """Forgets the facts about operators, so that they are computed again."""
    _KNOWN.clear()


def _facts_about(func: Any) -> OperatorFacts:
    if isinstance(func, torch._ops.HigherOrderOperator):
        return OperatorFacts(func.name(), False, (), (), (), False, "it runs functions of the program")
    schema = func._schema
    arguments = schema.arguments
    written = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    if schema.name == _RECORD_STREAM:
        written = []
    is_batch_norm = schema.name in _BATCH_NORMS
    statistics = [i for i, a in enumerate(arguments) if is_batch_norm and a.name in _RUNNING_STATISTICS]
    written = [i for i in written if i not in statistics]
    return OperatorFacts(
        name=str(func),
        is_view=_is_view_schema(schema),
        written=tuple(i for i in written if not arguments[i].kwarg_only),
        written_names=tuple(arguments[i].name for i in written),
        statistics=tuple(statistics),
        random=torch.Tag.nondeterministic_seeded in func.tags,
        refusal=_REFUSALS.get(schema.name) or _REFUSED_NAMESPACES.get(func.namespace) or _foreign_refusal(func),
        may_surprise=schema.name in _REFUSALS or func.namespace in _REFUSED_NAMESPACES,
        reads_nothing=schema.name in _READ_NOTHING,
        depends_on_call=schema.name == _CUDNN_RNN or schema.name in _CONVOLUTIONS or may_vary(schema.name),
        is_foreign=is_foreign(func),
        cast_as=func.name() if is_foreign(func) else _RUNS_OTHERS.get(schema.name, ""),
    )


def has_undefined_bytes(name: str, position: int) -> bool:
    """Returns whether a result of an op may hold bytes that nobody has written, so that they differ each time.

    Args:
        name: of the overload, such as "aten.relu_.default".
        position: of the result.
    """
    return position in _WORKSPACES.get(name, ())


def reads_statistics(facts: OperatorFacts, func: Any, args: tuple[Any, ...]) -> bool:
    """Returns whether a batch norm reads its running statistics (evaluation mode) instead of updating them."""
    if not facts.statistics:
        return False
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in ("train", "training"):
            return not (position < len(args) and args[position])
    return False  # those without such an argument are always in training mode


def call_refusal(func: Any, args: tuple[Any, ...]) -> str | None:
    """Returns why this call cannot be replayed, if that depends on its arguments or on settings; else None."""
    name = func._schema.name
    if name == _CUDNN_RNN:
        if _argument(func, args, "dropout") and _argument(func, args, "train"):
            return "cuDNN draws this dropout from a state of its own, which the call advances"
        return None
    there = next((tensor for tensor in find_tensors(args) if accelerators.has_streams(tensor.device)), None)
    if there is None:
        return None
    if name in _CONVOLUTIONS:
        return _convolution_refusal(func, args, there.device)
    return varies_now(name, there.dtype)


def _convolution_refusal(func: Any, args: tuple[Any, ...], device: torch.device) -> str | None:
    if chooses_algorithms_by_timing(device):
        return (
            "torch.backends.cudnn.benchmark chooses its algorithm by timing, separately in each thread, so a replay in "
            "the backward pass may use another one"
        )
    is_repeatable = torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    if _argument(func, args, "transposed") and not is_repeatable:
        return (
            "a transposed convolution may give other bits each time it runs on an accelerator, unless "
            "torch.use_deterministic_algorithms(True) was called before"
        )
    return None


def _argument(func: Any, args: tuple[Any, ...], name: str) -> Any:
    position = next(i for i, argument in enumerate(func._schema.arguments) if argument.name == name)
    return args[position] if position < len(args) else None


@cache
def is_view_name(name: str) -> bool:
    """Returns whether a profiler event such as "aten::transpose" is a pure view (no kernel, no memory)."""
    schemas = torch._C._jit_get_schemas_for_operator(name)
    return bool(schemas) and all(_is_view_schema(schema) for schema in schemas if "out" not in schema.overload_name)


def _is_view_schema(schema: Any) -> bool:
    if schema.name == _RECORD_STREAM:
        return True
    if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
        return False
    returns = schema.returns
    return bool(returns) and all(r.alias_info is not None for r in returns)
