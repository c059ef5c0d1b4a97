"""The memory model of a run, from its options and the model that it built."""

from collections.abc import Sequence
from typing import Any

from mindspeed import device
from mindspeed.config import ConfigError
from mindspeed.features.activation import current
from mindspeed.features.selection import select
from mindspeed.tune.memory_model import Changes, MemoryModel
from mindspeed_llm.training.setup import Setup, requested_features

_SAME_NAME = (
    *("sequence_parallel", "reuse_fp32_param", "swap_optimizer", "swap_layer_input"),
    *("swap_attention", "recompute_norm", "tiled_mlp_size", "tiled_loss_size"),
)


def memory_model(setup: Setup, chunks: Sequence[Any], sizes: tuple[int, int]) -> MemoryModel:
    """Return the memory of this rank; `sizes` are the length and number of rows of a batch."""
    shape, options, dims = setup.shape, setup.options, setup.dims
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    count = sum(p.numel() for p in parameters)
    moe, fused = shape.moe, options.use_fused_swiglu
    return MemoryModel(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        mlp_size=moe.topk * moe.ffn_hidden_size + (moe.shared_ffn_hidden_size or 0)
        if moe
        else shape.ffn_hidden_size,
        query_size=shape.query_size,
        kv_size=shape.query_size if shape.mla else shape.kv_size,
        attention_size=shape.attention_size,
        num_heads=shape.num_attention_heads,
        vocab_size=setup.vocab_size,
        num_parameters=count,
        trained_fraction=sum(p.numel() for p in parameters if p.requires_grad) / max(count, 1),
        seq_length=sizes[0],
        micro_batch_size=sizes[1],
        tp=dims.tp,
        pp=dims.pp,
        cp=dims.cp,
        dp=dims.dp,
        width=2 if options.bf16 or options.fp16 else 4,
        distributed_optimizer=options.use_distributed_optimizer,
        recomputed_layers=_recomputed(setup),
        recompute_activation=options.recompute_activation_function,
        fused_mlp=device.current().name == "cuda" if fused is None else fused,
        has_rotary_tables=device.current().name == "cpu",
        **{name: getattr(options, name) for name in _SAME_NAME},
    )


def accepts(setup: Setup, changes: Changes) -> bool:
    """Whether the features of a run would accept further options."""
    options = setup.options.model_copy(update=dict(changes))
    try:
        select(current().registry, *requested_features(options, setup.shape, setup.dims))
    except ConfigError:
        return False
    return True


def _recomputed(setup: Setup) -> int:
    """Return how many layers of a pipeline stage are recomputed as a whole."""
    options, layers = setup.options, -(-setup.shape.num_layers // setup.dims.pp)
    if options.recompute_granularity != "full":
        return 0
    is_block = options.recompute_method == "block"
    return min(options.recompute_num_layers or layers, layers) if is_block else layers
