"""The step of one microbatch through one stage of a pipeline, without the other stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from ..ground.errors import UsageError


@dataclass(frozen=True, slots=True)
class StageStep:
    """What a pipeline's stage does with one microbatch, and how many of them are in flight.

    Attributes:
        forward: the stage's forward pass. Its result is a scalar whose backward pass is that of the stage, so it can be
            profiled by itself, without a message to another rank.
        microbatches_in_flight: forward passes at most whose backward pass has not ended.
        accumulate: whether gradients of earlier microbatches exist during the forward passes, too.
    """

    forward: Callable[[], torch.Tensor]
    microbatches_in_flight: int
    accumulate: bool


def stage_step(
    stage: Any,
    schedule: Any,
    *inputs: torch.Tensor,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> StageStep:
    """Describe the step of one microbatch through a stage of `torch.distributed.pipelining`.

    Call it after the schedule's first step, in which the stages learn each other's shapes. The buffers in which a stage
    receives activations and gradients are its own from then on; what they hold does not matter to a profile.

    Args:
        stage: the `PipelineStage` of this rank.
        schedule: the `ScheduleGPipe` or `Schedule1F1B` that drives it.
        inputs: one microbatch of what the first stage gets. Other stages take what they receive.
        loss: output of the last stage -> scalar. Other stages have none.

    Raises:
        UsageError: the schedule is another one or has not made a step, inputs are missing or given to a stage that
            receives them, or the loss is missing or given to a stage that is not the last one.
    """
    microbatches = microbatches_in_flight(stage, schedule)
    if not stage.args_recv_info:
        raise UsageError("the stage knows no shapes yet: let the schedule make one step before the stage is profiled")
    if stage.is_first != bool(inputs):
        raise UsageError(
            "the first stage needs one microbatch of its inputs: give them after the schedule"
            if stage.is_first
            else f"stage {stage.stage_index} takes what it receives: give inputs to the first stage alone"
        )
    if stage.is_last != (loss is not None):
        raise UsageError(
            "the last stage needs the loss: give loss=, a function of its output"
            if stage.is_last
            else f"stage {stage.stage_index} has no loss: give loss= to the last stage alone"
        )
    received = [info.buffer for info in stage.args_recv_info[0]] if not stage.is_first else []
    gradients = [info.buffer for info in stage.grad_recv_info[0]] if not stage.is_last else []
    # Where the schedule returns the outputs, the last stage has those of all microbatches, which count as persistent.
    holds_output = not stage.output_chunks
    accumulate = isinstance(schedule, Schedule1F1B) and schedule._n_microbatches > microbatches
    # The gradients of inputs are held until they are sent.
    held = [torch.empty_like(each) for each in received if each.requires_grad]
    before = _outputs_of(stage) if isinstance(schedule, Schedule1F1B) and schedule._n_microbatches > 1 else []
    if not stage.is_last:
        # What 1F1B holds of a send that it has waited for includes the output of the last microbatch but one of those
        # that fill the pipeline. Where few follow, that one is in flight for as long as memory is short.
        lasts = microbatches == 2 or schedule._n_microbatches > 2 * microbatches - 2
        held += [torch.empty(each.shape, dtype=each.dtype, device=stage.device) for each in before if lasts]
    earlier = before if stage.is_last and holds_output else []
    forward = _Forward(stage.submod, inputs, received, gradients, loss, holds_output, held, earlier)
    return StageStep(forward, microbatches, accumulate)


def microbatches_in_flight(stage: Any, schedule: Any) -> int:
    """The number of microbatches of a stage whose forward pass has begun, and whose backward pass has not ended.

    GPipe runs all forward passes before the first backward pass. 1F1B runs as many as there are stages from this one
    on, and then one backward pass for each forward pass.

    Args:
        stage: the `PipelineStage` of this rank.
        schedule: the `ScheduleGPipe` or `Schedule1F1B` that drives it.

    Raises:
        UsageError: the schedule is another one.
    """
    if isinstance(schedule, ScheduleGPipe):
        return int(schedule._n_microbatches)
    if isinstance(schedule, Schedule1F1B):
        return min(int(schedule._n_microbatches), int(stage.num_stages - stage.stage_index))
    raise UsageError(
        f"{type(schedule).__name__} is neither ScheduleGPipe nor Schedule1F1B: count the forward passes that precede a "
        "backward pass, and plan with microbatches_in_flight="
    )


def _outputs_of(stage: Any) -> Sequence[Any]:
    """Return what knows shape and dtype of each output of a stage: under another name up to PyTorch 2.12."""
    known = getattr(stage, "_stage_meta", None)
    return known.outputs if known is not None else stage.get_outputs_meta()  # type: ignore[no-any-return]


class _Forward:
    """Runs a stage on one microbatch, and holds room for what a stage has beside the microbatches in flight."""

    def __init__(
        self,
        module: torch.nn.Module,
        inputs: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        loss: Callable[[Any], torch.Tensor] | None,
        holds_output: bool,
        held: Sequence[torch.Tensor],
        earlier: Sequence[Any],
    ) -> None:
        self._module, self._inputs, self._received, self._loss = module, inputs, received, loss
        self._gradients, self._holds_output, self._device = gradients, holds_output, next(module.parameters()).device
        self._held, self._earlier = held, earlier

    def __call__(self) -> torch.Tensor:
        received = [each.detach().requires_grad_(each.requires_grad) for each in self._received]
        # In 1F1B the last stage holds its output of the microbatch before until that of this one takes its place.
        earlier = [torch.empty(each.shape, dtype=each.dtype, device=self._device) for each in self._earlier]
        output = self._module(*self._inputs, *received)
        del earlier
        outputs = tuple(output) if isinstance(output, (tuple, list)) else (output,)
        if self._loss is not None:
            held = outputs if self._holds_output else ()
            loss: torch.Tensor = _Beside.apply(held, self._loss(output))  # type: ignore[no-untyped-call]
            return loss
        result: torch.Tensor = _AnswerWith.apply(self._gradients, *outputs)  # type: ignore[no-untyped-call]
        return result


class _Beside(torch.autograd.Function):
    """A loss beside which the outputs of the last stage are held, as the stage does until its backward pass."""

    @staticmethod
    def forward(ctx: Any, outputs: Sequence[torch.Tensor], loss: torch.Tensor) -> torch.Tensor:
        ctx.outputs = outputs
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, gradient


class _AnswerWith(torch.autograd.Function):
    """A scalar of no meaning whose backward pass hands given gradients to the outputs of a stage.

    It holds the outputs, as the stage does until its backward pass.
    """

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[torch.Tensor | None], *outputs: torch.Tensor) -> torch.Tensor:
        ctx.gradients, ctx.outputs = gradients, outputs
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return (None, *ctx.gradients)
