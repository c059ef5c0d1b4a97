"""Megatron's layers where they refuse or go wrong: norms, dtypes, YaRN, experts, embeddings, lists.

Norms of local specs: WrappedTorchNorm refuses sequence parallelism, zero-centred gamma and the
persist flag; `wrap_torch_norm` serves them. The final norm of a block of local layers is
Transformer Engine's when that is installed, and of an MoE block apex' LayerNorm when that is
installed, whatever the config's normalization; `wrap_block_submodules` makes it the norm of the
layers.

Mixed dtypes: a bare GPTModel with `params_dtype=torch.float16` has float32 norms and positions
beside float16 weights. An NPU multiplies the two; cpu and cuda refuse, so both are promoted first.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)


class _MarkedNorm(nn.Module):
    weight: nn.Parameter
    zero_centered_gamma: bool

    def adopt(self, config: Any) -> nn.Module:
        """Apply the settings of Megatron's config for norms."""
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        if self.zero_centered_gamma:
            nn.init.zeros_(self.weight)
        for param in self.parameters():
            # Each rank norms a part of the sequence: Megatron sums gradients with this mark.
            setattr(param, "sequence_parallel", config.sequence_parallel)  # noqa: B010
        return self

    def gamma(self) -> Tensor:
        """Return the factor itself, which may be stored less one."""
        return self.weight + 1 if self.zero_centered_gamma else self.weight


class LayerNorm(_MarkedNorm, nn.LayerNorm):
    """torch's LayerNorm, for a part of the sequence too."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of x."""
        weight, bias = self.gamma().to(x.dtype), self.bias.to(x.dtype)
        return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class RMSNorm(_MarkedNorm, nn.RMSNorm):
    """torch's RMSNorm, for a part of the sequence too."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of x."""
        weight = self.gamma().to(x.dtype)
        return nn.functional.rms_norm(x, self.normalized_shape, weight, self.eps)


def wrap_torch_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make `WrappedTorchNorm.__new__` build norms that sequence parallelism can use."""
    norms = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}

    @functools.wraps(original)
    def build(
        cls: type,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
    ) -> nn.Module:
        # The last three are unused upstream too; the config decides. Its persist and
        # memory-efficient flags choose a CUDA kernel and change no number.
        norm = norms.get(config.normalization)
        if norm is None:
            return original(cls, config, hidden_size, eps)
        return norm(hidden_size, eps=eps).adopt(config)

    return build


def wrap_block_submodules(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make `_get_block_submodules` end a block of local layers with the norm of those layers."""

    @functools.wraps(original)
    def submodules(config: Any, spec: Any, *args: Any, **kwargs: Any) -> Any:
        block = original(config, spec, *args, **kwargs)
        norm = getattr(getattr(spec, "submodules", None), "input_layernorm", None)
        norm = norm if _is_local(norm) else _other_than_apex(block.layer_norm, config)
        return dataclasses.replace(block, layer_norm=norm)

    return submodules


def _other_than_apex(norm: Any, config: Any) -> Any:
    """Return torch's norm where apex' has no such kind, as Megatron does without apex."""
    from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    is_refused = norm is FusedLayerNorm and config.normalization != "LayerNorm"
    return WrappedTorchNorm if is_refused else norm


def _is_local(norm: Any) -> bool:
    from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    return norm is FusedLayerNorm or norm is WrappedTorchNorm


_OPERANDS = ("input", "weight", "bias")


def promote(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Promote the operands of a linear function to the wider type where they differ."""

    @functools.wraps(original)
    def linear(*args: Any, **kwargs: Any) -> Tensor:
        operands = dict(zip(_OPERANDS, args)) | {n: kwargs[n] for n in _OPERANDS if n in kwargs}
        if operands["input"].dtype == operands["weight"].dtype:
            return original(*args, **kwargs)
        wider = torch.promote_types(operands["input"].dtype, operands["weight"].dtype)
        _warn_once(operands["input"].dtype, operands["weight"].dtype, wider)
        promoted = {n: t if t is None else t.to(wider) for n, t in operands.items()}
        positional = [promoted.pop(n) for n, _ in zip(_OPERANDS, args)]
        return original(*positional, *args[len(_OPERANDS) :], **(kwargs | promoted))

    return linear


def keep_type(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap Megatron's masked softmax so that probabilities have the type of the scores."""

    @functools.wraps(original)
    def forward(self: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return original(self, input, *args, **kwargs).to(input.dtype)

    return forward


@functools.cache
def _warn_once(given: torch.dtype, weight: torch.dtype, wider: torch.dtype) -> None:
    logger.warning(
        "linear layers received %s inputs for %s weights and compute in %s; "
        "get_model() casts the whole model to one type",
        *(str(dtype).removeprefix("torch.") for dtype in (given, weight, wider)),
    )


def wrap_yarn_init(original: Callable[..., None]) -> Callable[..., None]:
    """Build a YaRN rotary embedding on the cpu, whatever the caller passes."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        given.arguments["use_cpu_initialization"] = True
        original(*given.args, **given.kwargs)

    return __init__


def wrap_data_parallel(original: Callable[..., None]) -> Callable[..., None]:
    """Mark the experts of a model before its gradients are bucketed.

    Megatron reduces the gradients of a parameter with `allreduce = False` over the ranks that hold
    the same expert, and all others over data-parallel ranks.
    """

    @functools.wraps(original)
    def __init__(self: Any, config: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        _mark_experts(module)
        original(self, config, module, *args, **kwargs)

    return __init__


def _mark_experts(model: nn.Module) -> None:
    """Mark the experts of every layer whose tensor parallelism is one of their own."""
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer

    for layer in model.modules():
        experts = getattr(layer, "experts", None)
        if not isinstance(layer, BaseMoELayer) or experts is None:
            continue
        size, dense_size = _tensor_sizes(layer.config)
        if size == dense_size:
            continue
        for parameter in experts.parameters():
            # With expert parallelism Megatron does so itself.
            if layer.config.expert_model_parallel_size == 1:
                parameter.allreduce = False
            # The norm of the gradient asks for the rank among tensor-parallel ranks, which says
            # nothing about whole experts: each of them counts, and so do their biases.
            if size == 1:
                parameter.tensor_model_parallel = True


def _tensor_sizes(config: Any) -> tuple[int, int]:
    """Return how many ranks split an expert, and how many another layer."""
    dense_size = config.tensor_model_parallel_size
    size = config.expert_tensor_parallel_size
    return dense_size if size is None else size, dense_size


def wrap_layer_init(original: Callable[..., None]) -> Callable[..., None]:
    """Let a list of cp_comm_type begin with the first layer.

    Layers count from 1. Releases that index the list by that number give every layer the type of
    the next one, and the last layer an IndexError.
    """
    if "cp_comm_type[self.layer_number]" not in inspect.getsource(original):
        return original

    @functools.wraps(original)
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        given = config.cp_comm_type
        config.cp_comm_type = [None, *given] if isinstance(given, list) else given
        try:
            original(self, config, *args, **kwargs)
        finally:
            config.cp_comm_type = given

    return __init__


def wrap_allreduce_word_embedding_grads(original: Callable[..., None]) -> Callable[..., None]:
    """Leave out the gradient of an embedding that is not trained, on all stages alike."""
    from megatron.core.utils import get_attr_wrapped_model

    @functools.wraps(original)
    def allreduce_word_embedding_grads(
        model: list[Any], config: Any, *args: Any, **kwargs: Any
    ) -> None:
        for chunk in model:
            module = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
            is_tied = getattr(module, "share_embeddings_and_output_weights", False)
            if is_tied or getattr(config, "mtp_num_layers", 0):
                weight = module.shared_embedding_or_output_weight()
                if weight is not None and not weight.requires_grad:
                    return
        original(model, config, *args, **kwargs)

    return allreduce_word_embedding_grads


def wrap_routing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Count the tokens that chose an expert, without those that pad it to its capacity."""

    @functools.wraps(original)
    def routing(self: Any, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        config = self.config
        is_padded = self.enable_expert_bias and config.moe_pad_expert_input_to_capacity
        if not (is_padded and torch.is_grad_enabled()):
            return original(self, logits, *args, **kwargs)
        counts = self.local_tokens_per_expert.clone()
        probs, routing_map = original(self, logits, *args, **kwargs)
        # Padding is in the map, without weight.
        self.local_tokens_per_expert.copy_(counts + (routing_map & (probs > 0)).sum(0))
        return probs, routing_map

    return routing


def wrap_should_free_input(original: Callable[..., bool]) -> Callable[..., bool]:
    """Keep the input of experts where a rank has one of them; later releases do by themselves."""
    if list(inspect.signature(original).parameters) != ["name", "is_moe", "config"]:
        return original

    @functools.wraps(original)
    def should_free_input(name: str, is_moe: bool, config: Any) -> bool:
        if is_moe and name == "mlp" and config.num_moe_experts == config.expert_model_parallel_size:
            return False
        return original(name, is_moe, config)

    return should_free_input


def wrap_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Recompute functions of other things than tensors, too."""

    @functools.wraps(original)
    def checkpoint(
        function: Callable[..., Any], distribute_saved_activations: bool, *args: Any
    ) -> Any:
        others = [None if isinstance(each, Tensor) else each for each in args]
        if not any(each is not None for each in others):
            return original(function, distribute_saved_activations, *args)

        def of_tensors(*tensors: Tensor | None) -> Any:
            given = (t if other is None else other for t, other in zip(tensors, others))
            return function(*given)

        tensors = (each if other is None else None for each, other in zip(args, others))
        return original(of_tensors, distribute_saved_activations, *tensors)

    return checkpoint


def wrap_further_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Recompute a layer of multi-token prediction by itself.

    The number of layers that are recomputed at once is that of the decoder.
    """

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.config
        if config.recompute_num_layers is None:
            return original(self, *args, **kwargs)
        self.config = copy.copy(config)
        self.config.recompute_num_layers = 1
        try:
            return original(self, *args, **kwargs)
        finally:
            self.config = config

    return forward
