"""One training step: gradients of a global batch, their reduction, the update."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mindspeed import device
from mindspeed.distributed.parallel_dims import ParallelDims
from mindspeed.te.pytorch.optimizers.clipped_update import gradient_norm, retract, update
from mindspeed.training.metrics import StepResult
from mindspeed_llm.training.options import TrainOptions

ForwardStep = Callable[[Iterator[Any], Any], tuple[Any, Any]]


class Stepper:
    """Runs steps of one model."""

    def __init__(
        self,
        wrapped: list[Any],
        optimizer: Any,
        forward_step: ForwardStep,
        options: TrainOptions,
        dims: ParallelDims,
    ) -> None:
        self._wrapped, self._optimizer, self._forward_step = wrapped, optimizer, forward_step
        self._options, self._dims = options, dims

    def train(
        self, batches: list[Iterator[Any]], sizes: tuple[int, int], stop: bool = False
    ) -> StepResult:
        """Train on one global batch; `batches` are this rank's micro-batches, for every chunk.

        `sizes` are the length and the number of samples of a micro-batch; `stop` is this rank's
        wish to end, which becomes every rank's.
        """
        for chunk in self._wrapped:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        reports = self._run(batches, sizes, forward_only=False)
        # With --fp16 overflows are usual, and the loss scaler deals with them.
        is_fp16 = self._options.fp16
        is_skipped = self._optimizer.prepare_grads()
        norm = torch.tensor(math.nan) if is_skipped else gradient_norm(self._optimizer)
        row = self._share(reports, None if is_fp16 else norm, stop)
        # Queued before anything is read: the host is ahead of the device until the step ends.
        is_good = torch.ones_like(row[0], dtype=torch.bool) if is_fp16 else self._is_good(row)
        is_updated = not is_skipped and update(self._optimizer, norm, is_good)
        losses, tokens, is_bad, stops, grad_norm = self._read(row, norm)
        is_finite = not is_bad and all(map(math.isfinite, losses.values()))
        if is_updated and not is_finite and not is_fp16:
            retract(self._optimizer)
            is_updated = False
        return StepResult(
            metrics=losses,
            grad_norm=grad_norm if is_updated else math.nan,
            tokens=tokens,
            loss_scale=float(self._optimizer.get_loss_scale()),
            is_updated=is_updated,
            is_finite=is_finite,
            should_stop=stops,
        )

    def evaluate(self, batches: list[Iterator[Any]], sizes: tuple[int, int]) -> dict[str, float]:
        """Return the losses of one global batch without learning from it."""
        for chunk in self._wrapped:
            chunk.eval()
        with torch.no_grad():
            reports = self._run(batches, sizes, forward_only=True)
        for chunk in self._wrapped:
            chunk.train()
        return self._read(self._share(reports, None, False))[0]

    def _run(
        self, batches: list[Iterator[Any]], sizes: tuple[int, int], *, forward_only: bool
    ) -> list[dict[str, torch.Tensor]]:
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        reports: list[dict[str, torch.Tensor]] = get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=batches if len(batches) > 1 else batches[0],
            model=self._wrapped,
            num_microbatches=self._dims.num_micro_batches,
            seq_length=sizes[0],
            micro_batch_size=sizes[1],
            forward_only=forward_only,
        )
        return reports

    def _share(
        self, reports: list[dict[str, torch.Tensor]], norm: torch.Tensor | None, stop: bool
    ) -> torch.Tensor:
        """Add up on the device what all ranks report, and whether one of them is to stop.

        A report holds the sum of losses and how many they are, and the tokens of its micro-batch.
        Only one rank of each model copy reports: the last stage's first. With a norm that is not
        finite on one rank no rank may update.
        """
        from megatron.core import parallel_state

        is_first = parallel_state.get_tensor_model_parallel_rank() == 0
        counted = reports if is_first else []
        tokens = float(sum(int(report["tokens"]) for report in counted))
        here = device.current().torch_device
        row = torch.tensor([0.0] * 3 + [len(counted), tokens, 0.0, float(stop)])
        row = row.to(here, non_blocking=True)
        if counted:
            losses = torch.stack([report["lm loss"].float() for report in counted])
            row[:2] = losses.sum(0)
            row[2] = (losses[:, 0] / losses[:, 1].clamp(min=1.0)).sum()
        if norm is not None:
            row[5] = ~torch.isfinite(norm)
        torch.distributed.all_reduce(row)
        return row

    def _is_good(self, row: torch.Tensor) -> torch.Tensor:
        """Whether the loss and the gradients of all ranks are numbers, on the device."""
        return torch.isfinite(row[0 if self._options.calculate_per_token_loss else 2]) & (
            row[5] == 0
        )

    def _read(
        self, row: torch.Tensor, norm: torch.Tensor | None = None
    ) -> tuple[dict[str, float], int, bool, bool, float]:
        """Wait for the device, once: losses, tokens, is a gradient no number, stop, the norm."""
        norm = row.new_tensor(math.nan) if norm is None else norm
        both = torch.cat([row.double(), norm.to(row.device, torch.float64).reshape(1)])
        total, count, means, batches, tokens, bad, stops, grad_norm = both.tolist()
        per_token = self._options.calculate_per_token_loss
        loss = total / max(count, 1.0) if per_token else means / max(batches, 1.0)
        return {"lm loss": loss}, int(tokens), bad > 0, stops > 0, grad_norm
