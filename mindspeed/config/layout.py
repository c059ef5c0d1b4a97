"""Sizes of a parallel layout that must divide each other, checked before any rank starts."""

from __future__ import annotations

from mindspeed.config.errors import ConfigError


def check_layout(
    *,
    world_size: int = 1,
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    num_attention_heads: int | None = None,
    num_query_groups: int | None = None,
    num_layers: int | None = None,
) -> None:
    """Raise ConfigError, in the words of Megatron's flags, for a layout that cannot be built."""
    tp, pp, cp = tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size
    flags = {
        "--tensor-model-parallel-size": tp,
        "--pipeline-model-parallel-size": pp,
        "--context-parallel-size": cp,
    }
    for flag, size in flags.items():
        if size < 1:
            raise ConfigError(f"{flag} {size} is too small: it must be at least 1")
    if world_size % (tp * pp * cp):
        product = " x ".join(f"{flag} {size}" for flag, size in flags.items() if size > 1)
        raise ConfigError(
            f"{world_size} rank(s) cannot hold {product} = {tp * pp * cp} ranks a model copy: "
            f"start a multiple of {tp * pp * cp} ranks or lower a size"
        )
    _must_divide("--tensor-model-parallel-size", tp, "--num-attention-heads", num_attention_heads)
    if num_query_groups is not None and num_query_groups > tp:
        _must_divide("--tensor-model-parallel-size", tp, "--num-query-groups", num_query_groups)
    _must_divide("--pipeline-model-parallel-size", pp, "--num-layers", num_layers)


def _must_divide(flag: str, size: int, whole_flag: str, whole: int | None) -> None:
    if whole is not None and whole % size:
        divisors = [str(n) for n in range(1, whole + 1) if whole % n == 0]
        raise ConfigError(
            f"{flag} {size} does not divide {whole_flag} {whole}: use {', '.join(divisors)}"
        )
