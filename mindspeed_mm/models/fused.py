"""Fused operators in a model of transformers: norms, SwiGLU, attention by the fastest backend.

A module is changed only if its class computes, on a small sample, what the operator computes:
classes that merely look alike, such as a norm with 1 + weight, stay as they are.
"""

import logging
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import mindspeed.device
from mindspeed.ops.fusion_attention import sdpa
from mindspeed.ops.rms_norm import rms_norm
from mindspeed.ops.swiglu import silu_mul

logger = logging.getLogger(__name__)

PLAIN, FUSED = "sdpa", "mindspeed_sdpa"
_SIZE = 16


def is_wanted(asked: bool | None) -> bool:
    """Say whether to fuse; unasked, where the device has kernels for it."""
    return mindspeed.device.current().name != "cpu" if asked is None else asked


def fuse(model: nn.Module) -> Counter[str]:
    """Put operators to work in a model, in place; return how many of each."""
    found: Counter[str] = Counter()
    for module in model.modules():
        for name, computes, replacement in _KINDS:
            if computes(module):
                module.forward = replacement(module, module.forward)
                found[name] += 1
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) == PLAIN:
            config._attn_implementation_internal = _register_attention()
            found["attention"] += 1
    logger.info("fused operators: %s", ", ".join(f"{n} {what}" for what, n in found.items()))
    return found


def _fused_norm(module: Any, plain: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def forward(hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != module.weight.dtype:
            return plain(hidden_states)  # transformers then answers in the wider type
        return rms_norm(hidden_states, module.weight, _epsilon(module))

    return forward


def _fused_mlp(module: Any, plain: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def forward(*args: Tensor, **kwargs: Tensor) -> Tensor:
        (hidden,) = (*args, *kwargs.values())  # the parameter's name differs from class to class
        return module.down_proj(silu_mul(module.gate_proj(hidden), module.up_proj(hidden)))

    return forward


def _is_rms_norm(module: nn.Module) -> bool:
    epsilon, weight = _epsilon(module), getattr(module, "weight", None)
    is_alike = isinstance(epsilon, float) and isinstance(weight, nn.Parameter) and weight.dim() == 1
    if not is_alike or list(module.children()):
        return False
    gamma = torch.linspace(-1, 2, _SIZE)
    stand_in = SimpleNamespace(weight=gamma, variance_epsilon=epsilon, eps=epsilon)
    return _computes(module, stand_in, lambda x: rms_norm(x, gamma, epsilon))


def _is_swiglu(module: nn.Module) -> bool:
    if not all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        return False
    stand_in = SimpleNamespace(
        gate_proj=lambda x: 2 * x,
        up_proj=lambda x: x + 1,
        down_proj=lambda x: 3 * x,
        act_fn=module.act_fn,
        config=getattr(module, "config", None),
    )
    return _computes(module, stand_in, lambda x: 3 * silu_mul(2 * x, x + 1))


_KINDS = (("RMSNorm", _is_rms_norm, _fused_norm), ("SwiGLU", _is_swiglu, _fused_mlp))


def _computes(module: nn.Module, stand_in: Any, fused: Callable[[Tensor], Tensor]) -> bool:
    """Run the forward of a module's class on a stand-in, and compare."""
    sample = torch.linspace(-3, 4, 3 * _SIZE).view(3, _SIZE)
    try:
        found = type(module).forward(stand_in, sample)
    except (AttributeError, TypeError, RuntimeError):
        return False  # it needs more than that: not what is looked for
    return isinstance(found, Tensor) and torch.allclose(found, fused(sample), 1e-5, 1e-6)


def _epsilon(module: Any) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _register_attention() -> str:
    """Tell transformers of the attention, which knows the masks of its own; return the name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(FUSED, _attend)
    AttentionMaskInterface.register(FUSED, ALL_MASK_ATTENTION_FUNCTIONS[PLAIN])
    return FUSED


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend (B, N, S, H) as transformers' sdpa does; whole sequences by the fastest backend."""
    is_whole = attention_mask is None and query.shape[2] == key.shape[2]
    if not is_whole or kwargs.get("softcap") is not None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        plain = ALL_ATTENTION_FUNCTIONS[PLAIN]
        options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        return plain(module, query, key, value, attention_mask, **options, **kwargs)
    output = sdpa.attention(
        *(query, key, value),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        dropout=dropout,
        is_causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
    )
    return output.transpose(1, 2).contiguous(), None
