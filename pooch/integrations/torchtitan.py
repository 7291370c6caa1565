"""torchtitan: a budget in bytes for its trainer, and a memory policy in bytes for its graph trainer.

from pooch.integrations.torchtitan import PoochBudget, register_policy

Trainer.Config(..., activation_checkpoint=PoochBudget.Config(budget="60GiB"))
register_policy("20GiB")    # then --compile.memory_policy pooch
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing

from ..api.budgets import parse_budget
from ..api.recompute import AllowRecompute, check_allowed
from ..autopilot.finding import ModelFinder
from ..ground import messages
from ..ground.errors import UsageError
from ..ground.units import format_bytes, plural
from ..torchtools.operators import operator_facts


class PoochBudget(ActivationCheckpointing):  # type: ignore[misc, unused-ignore]
    """Holds a budget over training rather than checkpointing blocks.

    torchtitan applies it to a model that has no memory yet, so the model is put under the budget where it is first
    called. There is one budget for all parts of a model. What happened is told when the process ends.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):  # type: ignore[misc, unused-ignore]
        """What is held.

        Attributes:
            budget: As `pooch.auto` takes it.
            host_budget: As `pooch.auto` takes it.
            allow_recompute: As `pooch.auto` takes it: what is compiled is made again only under "rounding".
        """

        budget: str = "auto"
        host_budget: str | None = None
        allow_recompute: AllowRecompute = "exact"

    def apply(self, model: nn.Module) -> None:
        """Begin to hold the budget, from the first call of the model on.

        Raises:
            UsageError: The budget does not parse, or another one is held already.
        """
        config: Any = self.config
        if HELD.finder is not None:
            if HELD.budget != config.budget:
                raise UsageError(f"a budget of {HELD.budget} is held already: give all parts of a model the same one")
            return
        check_allowed(config.allow_recompute)
        HELD.begin(
            config.budget,
            ModelFinder(
                config.budget,
                host_budget=config.host_budget,
                tell=messages.tell,
                allow_recompute=config.allow_recompute,
            ),
        )


class _Held:
    """The budget of the process.

    Attributes:
        finder: What holds it, or None.
        budget: As it was given.
    """

    def __init__(self) -> None:
        self.finder: ModelFinder | None = None
        self.budget = ""

    def begin(self, budget: str, finder: ModelFinder) -> None:
        """Begin to hold it."""
        self.budget, self.finder = budget, finder
        finder.start()
        atexit.register(self.end)

    def end(self) -> None:
        """Hold it no longer, and tell what happened. May be repeated."""
        finder, self.finder = self.finder, None
        if finder is not None:
            atexit.unregister(self.end)
            summary = finder.stop()
            messages.tell("no step was run under the budget" if summary is None else "\n".join(summary.totals))


HELD = _Held()


def register_policy(budget: float | str, name: str = "pooch") -> None:
    """Register a memory policy with torchtitan's graph trainer that saves as much as a budget allows.

    What takes the most computing for its bytes is saved, and the rest is made again. Like all policies of that trainer
    it changes how code is fused, and so how it rounds.

    Args:
        budget: Bytes that all saved activations of a step may take, such as "20GiB".
        name: Of the policy, for `--compile.memory_policy`.

    Raises:
        UsageError: The budget does not parse.
    """
    from torchtitan.experiments.graph_trainer.memory_policy import tag_sac_policy
    from torchtitan.experiments.graph_trainer.registry import register_memory_policy

    budget_bytes = parse_budget(budget, None)

    def policy(gm: torch.fx.GraphModule, *, config: Any) -> torch.fx.GraphModule:
        forward = [node for node in gm.graph.nodes if not node.meta.get("autograd_backward", False)]
        saved = saved_within(forward, budget_bytes)
        size_bytes = sum(map(_bytes, saved))
        messages.tell(
            f"{plural(len(saved), 'activation')} of {format_bytes(size_bytes)} saved, of {format_bytes(budget_bytes)}"
        )
        tag_sac_policy(gm, policy_fn=_tagging(saved))
        return gm

    register_memory_policy(name)(policy)


def _tagging(saved: set[torch.fx.Node]) -> Callable[[torch.fx.Node], CheckpointPolicy]:
    def tagged(node: torch.fx.Node) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if node in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return tagged


def saved_within(nodes: Iterable[torch.fx.Node], budget_bytes: int) -> set[torch.fx.Node]:
    """Return which nodes of a forward pass are saved: those that must be, and the most computing for the bytes left.

    Args:
        nodes: Of the forward pass.
        budget_bytes: What all of them may take.

    Raises:
        UsageError: What must be saved takes more.
    """
    computing = [node for node in nodes if isinstance(node.target, torch._ops.OpOverload) and _bytes(node)]
    must = {node for node in computing if _is_not_repeatable(node)}
    left_bytes = budget_bytes - sum(map(_bytes, must))
    if left_bytes < 0:
        raise UsageError(
            f"random numbers and results of operators that must not run twice take "
            f"{format_bytes(budget_bytes - left_bytes)}, more than the budget of {format_bytes(budget_bytes)}: raise it"
        )
    saved = set(must)
    candidates = [(node, flops) for node in computing if node not in must and (flops := _flops(node))]
    for node, _ in sorted(candidates, key=lambda pair: pair[1] / _bytes(pair[0]), reverse=True):
        if _bytes(node) <= left_bytes:
            saved.add(node)
            left_bytes -= _bytes(node)
    return saved


def _is_not_repeatable(node: torch.fx.Node) -> bool:
    facts = operator_facts(node.target)
    return not facts.is_view and (facts.random or facts.refusal is not None)


def _flops(node: torch.fx.Node) -> int:
    count = flop_registry.get(node.target.overloadpacket)  # type: ignore[union-attr]
    if count is None:
        return 0
    arguments = torch.fx.map_arg((node.args, node.kwargs), lambda each: each.meta.get("val"))
    return int(count(*arguments[0], **arguments[1], out_val=node.meta["val"]))


def _bytes(node: torch.fx.Node) -> int:
    values = node.meta.get("val")
    tensors = values if isinstance(values, (list, tuple)) else [values]
    return sum(int(each.nbytes) for each in tensors if isinstance(each, (FakeTensor, torch.Tensor)))
