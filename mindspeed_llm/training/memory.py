"""The memory model of a run, from its options and the model that it built."""

from collections.abc import Sequence
from typing import Any

from mindspeed.features import selection
from mindspeed.features.activation import current
from mindspeed.tune import run_memory
from mindspeed.tune.memory_model import Changes, MemoryModel
from mindspeed_llm.training.setup import Setup, requested_features


def memory_model(setup: Setup, chunks: Sequence[Any], sizes: tuple[int, int]) -> MemoryModel:
    """Return the memory of this rank; `sizes` are the length and number of rows of a batch."""
    _, context = requested_features(setup.options, setup.shape, setup.dims)
    moe = setup.shape.moe
    seen = {
        "seq_length": sizes[0],
        "micro_batch_size": sizes[1],
        "num_layers": setup.shape.num_layers,  # those that do nothing keep nothing
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size if moe else None,
    }
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    return run_memory.memory_model({**(context.megatron or {}), **seen}, parameters)


def accepts(setup: Setup, changes: Changes) -> bool:
    """Whether the features of a run would accept further options."""
    requested = requested_features(setup.options, setup.shape, setup.dims)
    return selection.accepts(current().registry, *requested, changes)
