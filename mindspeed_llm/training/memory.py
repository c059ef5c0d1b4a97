"""The memory model of a run, from its options, the model that it built and its micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mindspeed.features import selection
from mindspeed.features.activation import current
from mindspeed.ops.linear_cross_entropy.labelled_rows import LabelledRows
from mindspeed.ops.linear_cross_entropy.megatron import defers_logits
from mindspeed.tune import run_memory
from mindspeed.tune.memory_model import Changes, MemoryModel
from mindspeed_llm.training.setup import Setup, requested_features


@dataclass(frozen=True)
class BatchRows:
    """The rows of a micro-batch of this rank."""

    length: int
    samples: int
    labelled: int | None = None
    """Rows that losses are computed of, where they can be picked; None for all."""

    @classmethod
    def of(cls, tokens: torch.Tensor, labelled: LabelledRows | None) -> BatchRows:
        """Count the rows of tokens (B, S), which padding may have been kept out of."""
        samples, length = tokens.shape
        return cls(length, samples, None if labelled is None else len(labelled.index))


def memory_model(
    setup: Setup, chunks: Sequence[Any], rows: BatchRows, most: BatchRows
) -> MemoryModel:
    """Return the memory of this rank for a micro-batch; `most` are the rows that any can have."""
    _, context = requested_features(setup.options, setup.shape, setup.dims)
    moe = setup.shape.moe
    seen = {
        "seq_length": rows.length * setup.dims.cp,
        "micro_batch_size": rows.samples,
        "num_layers": setup.shape.num_layers,  # those that do nothing keep nothing
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size if moe else None,
    }
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    model = run_memory.memory_model({**(context.megatron or {}), **seen}, parameters)
    return replace(
        model,
        loss_rows=rows.labelled if _picks_rows(chunks) else None,
        max_tokens=most.length * most.samples,
    )


def _picks_rows(chunks: Sequence[Any]) -> bool:
    """Whether the loss is computed from hidden states, of which rows can be picked."""
    ends = [chunk for chunk in chunks if getattr(chunk, "post_process", False)]
    return "linear_cross_entropy" in current().report().on and all(map(defers_logits, ends))


def accepts(setup: Setup, changes: Changes) -> bool:
    """Whether the features of a run would accept further options."""
    requested = requested_features(setup.options, setup.shape, setup.dims)
    return selection.accepts(current().registry, *requested, changes)
