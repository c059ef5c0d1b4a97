"""The memory model of a run, from Megatron's arguments under Megatron's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mindspeed import device
from mindspeed.tune.memory_model import MemoryModel
from mindspeed.tune.run_sizes import RunSizes

NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
"""Arguments without which nothing is known."""
_SWITCHES = (
    *("reuse_fp32_param", "swap_optimizer", "swap_layer_input", "swap_attention"),
    *("recompute_norm", "recompute_keep_attention"),
)
"""Options of features that the model has by the same name."""


def memory_model(
    arguments: Mapping[str, Any],
    parameters: Iterable[Any] | None = None,
    device_name: str | None = None,
) -> MemoryModel:
    """Return the memory of a rank of the first pipeline stage; ValueError if sizes are missing.

    Args:
        arguments: Megatron's and those of features; what is missing or None has its default.
        parameters: those of this rank, where they exist; else they are counted by a formula.
        device_name: the device, if not the one here: some fusions are on by default on cuda.
    """
    if missing := [name for name in NEEDED if not arguments.get(name)]:
        raise ValueError(f"the sizes of the run are not known: {', '.join(missing)}")
    sizes = RunSizes.of(arguments)
    here = device_name or device.current().name
    fused = arguments.get("use_fused_swiglu")
    count, trained = (sizes.num_parameters, 1.0) if parameters is None else _count(parameters)
    widths = sizes.attention_widths
    return MemoryModel(
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        mlp_size=sizes.mlp_width,
        query_size=widths.query,
        kv_size=widths.key,
        attention_size=widths.output,
        num_heads=sizes.num_attention_heads,
        vocab_size=sizes.vocabulary,
        num_parameters=count,
        trained_fraction=trained,
        seq_length=sizes.seq_length,
        micro_batch_size=sizes.micro_batch_size,
        tp=sizes.tensor_model_parallel_size,
        pp=sizes.pipeline_model_parallel_size,
        cp=sizes.context_parallel_size,
        dp=sizes.data_parallel_size,
        sequence_parallel=sizes.sequence_parallel,
        width=sizes.width,
        distributed_optimizer=sizes.use_distributed_optimizer,
        recomputed_layers=sizes.recomputed_layers,
        recompute_activation=bool(arguments.get("recompute_activation_function")),
        fused_mlp=here == "cuda" if fused is None else fused,
        has_rotary_tables=here == "cpu",
        tiled_mlp_size=arguments.get("tiled_mlp_size"),
        tiled_loss_size=arguments.get("tiled_loss_size"),
        **{name: bool(arguments.get(name)) for name in _SWITCHES},
    )


def _count(parameters: Iterable[Any]) -> tuple[int, float]:
    """Return the number of parameters, and the share that is trained."""
    sizes = [(p.numel(), p.requires_grad) for p in parameters]
    count = sum(size for size, _ in sizes)
    return count, sum(size for size, is_trained in sizes if is_trained) / max(count, 1)
