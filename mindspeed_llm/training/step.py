"""One train step of a Megatron model: gradients of a global batch, their reduction, the update."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from mindspeed.device.side_stream import begin_beside
from mindspeed.te.pytorch.optimizers.clipped_update import gradient_norm, retract, update
from mindspeed.training.metrics import (
    Metric,
    PendingStep,
    StepResult,
    StepTotals,
    StopCheck,
    reduce_metrics,
)
from mindspeed_llm.training.added_losses import SumAndCount, mean_losses, take_added_losses
from mindspeed_llm.training.model import RoleModel

ForwardStep = Callable[..., tuple[Any, Any]]
"""Runs a chunk on the next micro-batch; returns its output and the loss function."""
Report = Mapping[str, torch.Tensor]
"""The metrics of a micro-batch by name, and on the host its number of tokens."""


@dataclass(frozen=True)
class BatchShape:
    """The micro-batches of one rank in a step, as Megatron's schedule needs to know them."""

    seq_length: int
    micro_batch_size: int
    num_micro_batches: int


def train_on_batch(
    model: RoleModel,
    forward_step: ForwardStep,
    batches: list[Iterator[Any]],
    shape: BatchShape,
    *,
    metrics: Sequence[Metric],
    stop: StopCheck,
    after: PendingStep | None = None,
) -> PendingStep:
    """Update a model by one global batch; `batches` are this rank's, once for every chunk.

    The result is the same on every rank, also whether any was asked to stop. A step in which a
    metric or the gradient norm of any rank is not finite changes no weight. `after` is the
    step before, whose result is read while the device is busy with this one.
    """
    optimizer = model.optimizer
    # No forward pass reads gradients: GEMMs leave the memory to those that are zeroed beside it.
    wait_for_zeros = begin_beside(lambda: _zero_gradients(model))

    def forward(data_iterator: Iterator[Any], chunk: Any, **how: Any) -> tuple[Any, Any]:
        output = forward_step(data_iterator, chunk, **how)
        wait_for_zeros()
        if after is not None:
            # The device has work for some time. If the step before was skipped, the optimizer's
            # count of steps is corrected here, before it counts this one.
            after.wait()
        return output

    biases = [router.expert_bias.clone() for router in model.biased_routers]
    reports = forward_backward(model, forward, batches, shape)
    # With --fp16 overflows are usual, and the loss scaler handles them.
    is_fp16 = model.config.fp16
    is_skipped = optimizer.prepare_grads()
    norm = torch.tensor(math.nan) if is_skipped else gradient_norm(optimizer)
    added = take_added_losses(model, shape.num_micro_batches)
    totals = _reduce(metrics, reports, None if is_fp16 else norm, stop(), added.values())
    is_good = torch.ones_like(totals.tokens, dtype=torch.bool) if is_fp16 else totals.is_finite()
    # The copy is queued before the update, so that reading it does not wait for the update.
    read = totals.start_read(norm, optimizer.get_loss_scale())
    is_queued = not is_skipped and update(optimizer, norm, is_good)
    _restore_biases(model, biases, is_good & is_queued)

    def result() -> StepResult:
        reduced, (grad_norm, loss_scale) = read.wait()
        is_updated = is_queued and (reduced.is_finite or is_fp16)
        if is_queued and not is_updated:
            retract(optimizer)
        return StepResult(
            metrics=reduced.metrics | mean_losses(list(added), reduced.extras[2:]),
            grad_norm=grad_norm if is_updated else math.nan,
            tokens=reduced.tokens,
            loss_scale=loss_scale,
            is_updated=is_updated,
            is_finite=reduced.is_finite,
            should_stop=reduced.extras[1] > 0,
            done=read.done,
        )

    return PendingStep(result)


def _zero_gradients(model: RoleModel) -> None:
    for chunk in model.wrapped:
        chunk.zero_grad_buffer()
    model.optimizer.zero_grad()


def _restore_biases(model: RoleModel, before: list[torch.Tensor], is_updated: torch.Tensor) -> None:
    """Restore the biases of routers that are not trained, and of all in a step that is skipped.

    Megatron changes them where it reduces gradients.
    """
    for router, bias in zip(model.biased_routers, before, strict=True):
        is_changed = is_updated & router.weight.requires_grad
        router.expert_bias.copy_(torch.where(is_changed, router.expert_bias, bias))


def evaluate_batch(
    model: RoleModel,
    forward_step: ForwardStep,
    batches: list[Iterator[Any]],
    shape: BatchShape,
    *,
    metrics: Sequence[Metric],
) -> dict[str, float]:
    """Return the metrics of one global batch without training on it."""
    with _evaluating(model):
        reports = forward_backward(model, forward_step, batches, shape, forward_only=True)
    return _reduce(metrics, reports, None, False).read()[0].metrics


def collect_outputs(
    model: RoleModel,
    forward_step: ForwardStep,
    batches: list[Iterator[Any]],
    shape: BatchShape,
) -> list[Any]:
    """Run a model over micro-batches without gradients; return what is made of each output.

    The forward step returns, with the output, a function of it in the position of the loss
    function. Only ranks of the last pipeline stage have results; the others return nothing.
    """

    def step(data_iterator: Iterator[Any], chunk: Any) -> tuple[Any, Any]:
        output, collect = forward_step(data_iterator, chunk)
        return output, lambda tensor, non_loss_data: collect(tensor)

    with _evaluating(model):
        return forward_backward(
            model, step, batches, shape, forward_only=True, collects_outputs=True
        )


@contextmanager
def _evaluating(model: RoleModel) -> Iterator[None]:
    """Switch dropout and gradients off."""
    before = [chunk.training for chunk in model.wrapped]
    for chunk in model.wrapped:
        chunk.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for chunk, was_training in zip(model.wrapped, before):
            chunk.train(was_training)


def forward_backward(
    model: RoleModel,
    forward_step: ForwardStep,
    batches: list[Iterator[Any]],
    shape: BatchShape,
    *,
    forward_only: bool = False,
    collects_outputs: bool = False,
) -> list[Any]:
    """Run Megatron's pipeline schedule; return the reports of the loss functions of this rank.

    With `collects_outputs` what takes the place of a loss function may return anything.
    """
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    reports: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches if len(batches) > 1 else batches[0],
        model=model.wrapped,
        num_microbatches=shape.num_micro_batches,
        seq_length=shape.seq_length,
        micro_batch_size=shape.micro_batch_size,
        forward_only=forward_only,
        collect_non_loss_data=collects_outputs,
    )
    return reports


def _reduce(
    metrics: Sequence[Metric],
    reports: list[Report],
    norm: torch.Tensor | None,
    stop: bool,
    added: Iterable[SumAndCount] = (),
) -> StepTotals:
    """Add up what all ranks report; only the last pipeline stage of each model copy counts.

    Its first tensor-parallel rank reports metrics, for its part of the sequence where that is
    split, and the first rank of the copy its tokens; every rank has its part of the losses that
    Megatron added. With a norm that is not finite on one rank no rank may update: what it adds to
    the totals is not finite either.
    """
    from megatron.core import parallel_state

    is_counted = parallel_state.get_tensor_model_parallel_rank() == 0
    counted = reports if is_counted else []
    is_first = parallel_state.get_context_parallel_rank() == 0
    tokens = sum(int(report["tokens"]) for report in counted) if is_first else 0
    overflow = 0.0 if norm is None else norm * 0.0
    extras = overflow, float(stop), *chain.from_iterable(added)
    return reduce_metrics(metrics, counted, tokens=tokens, extras=extras)
