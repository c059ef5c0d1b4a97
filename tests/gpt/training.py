"""One rank's training of the tiny GPT through Megatron's own schedule and optimizer."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from tests.gpt.layout import GLOBAL_BATCH, SEQUENCE, VOCABULARY, Layout
from tests.gpt.model import (
    build_chunk,
    data_parallel,
    optimizer_config,
    shards,
    transformer_config,
)
from tests.gpt.weights import Shard


class Training:
    """This rank's share of the model, its optimizer and its data."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        parallel_state.initialize_model_parallel(layout.tp, layout.pp, layout.virtual_stages)
        model_parallel_cuda_manual_seed(1234)
        self.config = transformer_config(layout)
        stages = range(layout.virtual_stages) if layout.virtual_stages else [None]
        self.chunks = [build_chunk(self.config, layout, stage) for stage in stages]
        self.wrapped = [
            data_parallel(self.config, layout, chunk, first=chunk is self.chunks[0])
            for chunk in self.chunks
        ]
        self.optimizer = get_megatron_optimizer(optimizer_config(layout), self.wrapped)
        self._connect()

    def step(self) -> tuple[float | None, float]:
        """Train once on the global batch; return the loss (last stage only) and gradient norm."""
        loss = self.forward_backward()
        return loss, self.update()

    def forward_backward(self) -> float | None:
        """Compute this step's gradients; return this replica's loss where the last stage is."""
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[self._data() for _ in self.wrapped],
            model=self.wrapped,
            num_microbatches=self.layout.micro_batches,
            seq_length=SEQUENCE,
            micro_batch_size=self.layout.micro_batch,
            forward_only=False,
        )
        return sum(report["loss"] for report in reports) / len(reports) if reports else None

    def update(self) -> float:
        """Take the optimizer's step; return the norm of the gradient."""
        _, norm, _ = self.optimizer.step()
        return float(norm)

    def weights(self) -> list[Shard]:
        """Return this rank's slices of the weights."""
        if self.layout.overlap_param_gather:  # they arrive with the next forward, or when asked for
            for chunk in self.wrapped:
                chunk.start_param_sync(force_sync=True)
        mine = [shard for chunk in self.chunks for shard in shards(chunk)]
        return [replace(shard, values=shard.values.clone()) for shard in mine]

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return this rank's gradients by the names of its parameters."""
        named = [pair for chunk in self.chunks for pair in chunk.named_parameters()]
        return {name: parameter.main_grad.clone() for name, parameter in named}

    def _data(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(7)
        batch = torch.randint(VOCABULARY, (GLOBAL_BATCH, SEQUENCE + 1), generator=generator)
        mine = batch.chunk(self.layout.dp)[parallel_state.get_data_parallel_rank()]
        return iter(mine.split(self.layout.micro_batch))

    def _connect(self) -> None:
        """Tell the schedule what Megatron's training loop would tell it."""
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        if self.layout.overlap_grad_reduce:
            functions = [chunk.no_sync for chunk in self.wrapped]
            self.config.no_sync_func = functions if len(functions) > 1 else functions[0]


def destroy_groups() -> None:
    """Destroy Megatron's groups, so that the same ranks can train another layout."""
    parallel_state.destroy_model_parallel()
    # Megatron 0.12 keeps these, and takes a rank for one of a group that is there no more.
    for name in ("_EMBEDDING_GLOBAL_RANKS", "_POSITION_EMBEDDING_GLOBAL_RANKS"):
        setattr(parallel_state, name, None)
    # It appends those of the next layout to these.
    (parallel_state._HIERARCHICAL_CONTEXT_PARALLEL_GROUPS or []).clear()


def _forward_step(data: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[Any, Any]:
    tokens = next(data).cuda()
    positions = torch.arange(SEQUENCE, device=tokens.device).expand(len(tokens), -1)
    return model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]), _loss


def _loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    # Reported in double: what is compared are trainings, not orders of summation.
    return losses.float().mean(), {"loss": losses.double().mean().item()}
