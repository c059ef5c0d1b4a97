"""The memory model of a run, from Megatron's arguments under Megatron's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mindspeed import device
from mindspeed.distributed.attention_widths import attention_widths
from mindspeed.tune.memory_model import MemoryModel

NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size")
"""Arguments without which nothing is known."""
_SAME_NAME = (
    *("sequence_parallel", "reuse_fp32_param", "swap_optimizer", "swap_layer_input"),
    *("swap_attention", "recompute_norm", "recompute_keep_attention"),
)


def memory_model(
    arguments: Mapping[str, Any],
    parameters: Iterable[Any] | None = None,
    device_name: str | None = None,
) -> MemoryModel:
    """Return the memory of a rank of the first pipeline stage.

    Args:
        arguments: Megatron's; what is missing or None has Megatron's default.
        parameters: those of this rank, where they exist; else they are counted by a formula.
        device_name: the device, if not the one here: some fusions are on by default on cuda.
    """
    get = _getter(arguments)
    here = device_name or device.current().name
    fused = get("use_fused_swiglu")
    count, trained = _count(parameters, arguments)
    query, kv, attention = attention_widths(arguments)
    return MemoryModel(
        num_layers=get("num_layers"),
        hidden_size=get("hidden_size"),
        mlp_size=_mlp_size(arguments),
        query_size=query,
        kv_size=kv,
        attention_size=attention,
        num_heads=get("num_attention_heads"),
        vocab_size=_vocabulary(arguments),
        num_parameters=count,
        trained_fraction=trained,
        seq_length=get("seq_length"),
        micro_batch_size=get("micro_batch_size", 1),
        tp=get("tensor_model_parallel_size", 1),
        pp=get("pipeline_model_parallel_size", 1),
        cp=get("context_parallel_size", 1),
        dp=max(get("world_size", 1) // _model_ranks(arguments), 1),
        width=2 if get("bf16", False) or get("fp16", False) else 4,
        distributed_optimizer=get("use_distributed_optimizer", False),
        recomputed_layers=_recomputed(arguments),
        recompute_activation=get("recompute_activation_function", False),
        fused_mlp=here == "cuda" if fused is None else fused,
        has_rotary_tables=here == "cpu",
        tiled_mlp_size=get("tiled_mlp_size"),
        tiled_loss_size=get("tiled_loss_size"),
        **{name: get(name, False) for name in _SAME_NAME},
    )


def count_parameters(arguments: Mapping[str, Any]) -> int:
    """Return the parameters of a rank of the first pipeline stage, biases and norms apart.

    A layer has H (Q + 2 K) + A H of attention and 3 H F (2 H F without a gate) of its MLP, or that
    of each expert on this rank and H E of the router. The stage has V H, twice if it is the only
    one and the output layer has weights of its own.
    """
    get = _getter(arguments)
    hidden, tp, pp = (
        get("hidden_size"),
        get("tensor_model_parallel_size", 1),
        get("pipeline_model_parallel_size", 1),
    )
    query, kv, attention = attention_widths(arguments)
    gate = 3 if get("swiglu", False) else 2
    layer = hidden * (query + 2 * kv + attention) // tp
    if experts := get("num_experts"):
        expert_tp = get("expert_tensor_parallel_size") or tp
        local = experts // get("expert_model_parallel_size", 1)
        layer += gate * hidden * _expert_width(arguments) // expert_tp * local
        layer += gate * hidden * get("moe_shared_expert_intermediate_size", 0) // tp
        layer += hidden * experts
    else:
        layer += gate * hidden * _dense_width(arguments) // tp
    is_untied = get("untie_embeddings_and_output_weights", False)
    tables = 2 if is_untied and pp == 1 else 1
    return -(-get("num_layers") // pp) * layer + tables * hidden * _vocabulary(arguments) // tp


def _getter(arguments: Mapping[str, Any]) -> Any:
    def get(name: str, default: Any = None) -> Any:
        value = arguments.get(name)
        return default if value is None else value

    return get


def _count(parameters: Iterable[Any] | None, arguments: Mapping[str, Any]) -> tuple[int, float]:
    """Return the number of parameters, and the share that is trained."""
    if parameters is None:
        return count_parameters(arguments), 1.0
    sizes = [(p.numel(), p.requires_grad) for p in parameters]
    count = sum(size for size, _ in sizes)
    return count, sum(size for size, is_trained in sizes if is_trained) / max(count, 1)


def _dense_width(arguments: Mapping[str, Any]) -> int:
    get = _getter(arguments)
    hidden: int = get("hidden_size")
    if width := get("ffn_hidden_size"):
        return int(width)
    # As Megatron rounds it.
    return int(4 * hidden * 2 / 3) // 64 * 64 if get("swiglu", False) else 4 * hidden


def _expert_width(arguments: Mapping[str, Any]) -> int:
    return int(_getter(arguments)("moe_ffn_hidden_size") or _dense_width(arguments))


def _mlp_size(arguments: Mapping[str, Any]) -> int:
    """Return the width of the MLPs that a token goes through in one layer."""
    get = _getter(arguments)
    if not get("num_experts"):
        return _dense_width(arguments)
    shared: int = get("moe_shared_expert_intermediate_size", 0)
    return int(get("moe_router_topk", 2)) * _expert_width(arguments) + shared


def _vocabulary(arguments: Mapping[str, Any]) -> int:
    get = _getter(arguments)
    if padded := get("padded_vocab_size"):
        return int(padded)
    multiple = get("make_vocab_size_divisible_by", 128) * get("tensor_model_parallel_size", 1)
    return int(-(-get("vocab_size", 0) // multiple) * multiple)


def _model_ranks(arguments: Mapping[str, Any]) -> int:
    get = _getter(arguments)
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    tp, pp, cp = (int(get(name, 1)) for name in sizes)
    return tp * pp * cp


def _recomputed(arguments: Mapping[str, Any]) -> int:
    """Return how many layers of a pipeline stage are recomputed as a whole."""
    get = _getter(arguments)
    layers: int = -(-get("num_layers") // get("pipeline_model_parallel_size", 1))
    if get("recompute_granularity") != "full":
        return 0
    is_block = get("recompute_method") == "block"
    return min(get("recompute_num_layers") or layers, layers) if is_block else layers
