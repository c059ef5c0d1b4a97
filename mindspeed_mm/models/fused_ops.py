"""Fused operators in a model of transformers: norms, SwiGLU, attention by the fastest backend.

A module is replaced only if its class matches the operator numerically on a small sample: classes
that are merely similar, such as a norm with 1 + weight, stay as they are.
"""

import copy
import inspect
import logging
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import mindspeed.device
from mindspeed.ops.fusion_attention import sdpa
from mindspeed.ops.norm import rms_norm
from mindspeed.ops.swiglu import silu_mul

logger = logging.getLogger(__name__)

PLAIN, FUSED = "sdpa", "mindspeed_sdpa"
PACKED = "mindspeed_flash_sdpa"
"""For vision towers that pack all images into one sequence: an implementation with `flash` in its
name gets the sequence and its cumulative lengths, others one call per window, of hundreds."""
_SIZE = 16


def is_enabled(fused_ops: bool | None) -> bool:
    """Return whether to fuse; by default where the device has kernels for it."""
    return mindspeed.device.current().name != "cpu" if fused_ops is None else fused_ops


def fuse(model: nn.Module) -> Counter[str]:
    """Replace modules by fused operators in place; return the count of each."""
    found: Counter[str] = Counter()
    for module in model.modules():
        for name, matches, replacement in _OPERATORS:
            if matches(module):
                module.forward = replacement(module, module.forward)
                found[name] += 1
    found["attention"] = _fuse_attention(model)
    found = +found  # drop zero counts
    logger.info("fused operators: %s", ", ".join(f"{n} {name}" for name, n in found.items()))
    return found


def _fuse_attention(model: nn.Module) -> int:
    """Set our attention in the configs; return the number of configs."""
    found = 0
    users: dict[int, list[Any]] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) == PLAIN:
            users.setdefault(id(config), []).append(module)
    for modules in users.values():
        if any(depends_on_name(type(module)) for module in modules):
            continue
        config = modules[0].config
        config._attn_implementation_internal = register_attention(FUSED, _attend, PLAIN)
        found += 1
        if any(map(_takes_packed, modules)):
            # In a copy: no model can be built from a config with an unknown `flash` name.
            config = copy.copy(config)
            config._attn_implementation_internal = register_attention(PACKED, _attend_packed, PLAIN)
            for module in modules:
                module.config = config
    return found


def depends_on_name(module_class: type) -> bool:
    """Return whether the code of a class compares the attention's name with `sdpa`.

    Under another name it computes something else, such as attention without its own mask.
    """
    codes = [
        inspect.unwrap(value).__code__
        for base in module_class.__mro__
        for value in vars(base).values()
        if inspect.isfunction(value) and not base.__module__.startswith("transformers.modeling_")
    ]
    return any(
        "_attn_implementation" in code.co_names
        and any(PLAIN in (c if isinstance(c, tuple) else (c,)) for c in code.co_consts)
        for code in codes
    )


def _fused_norm(module: Any, plain: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def forward(hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != module.weight.dtype:
            return plain(hidden_states)  # transformers then returns the wider dtype
        return rms_norm(hidden_states, module.weight, _epsilon(module))

    return forward


def _fused_mlp(module: Any, plain: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def forward(*args: Tensor, **kwargs: Tensor) -> Tensor:
        (hidden,) = (*args, *kwargs.values())  # the parameter's name differs from class to class
        return module.down_proj(silu_mul(module.gate_proj(hidden), module.up_proj(hidden)))

    return forward


def _is_rms_norm(module: nn.Module) -> bool:
    epsilon, weight = _epsilon(module), getattr(module, "weight", None)
    is_similar = (
        isinstance(epsilon, float) and isinstance(weight, nn.Parameter) and weight.dim() == 1
    )
    if not is_similar or list(module.children()):
        return False
    gamma = torch.linspace(-1, 2, _SIZE)
    fake = SimpleNamespace(weight=gamma, variance_epsilon=epsilon, eps=epsilon)
    return _matches(module, fake, lambda x: rms_norm(x, gamma, epsilon))


def _is_swiglu(module: nn.Module) -> bool:
    if not all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        return False
    fake = SimpleNamespace(
        gate_proj=lambda x: 2 * x,
        up_proj=lambda x: x + 1,
        down_proj=lambda x: 3 * x,
        act_fn=module.act_fn,
        config=getattr(module, "config", None),
    )
    return _matches(module, fake, lambda x: 3 * silu_mul(2 * x, x + 1))


_OPERATORS = (("RMSNorm", _is_rms_norm, _fused_norm), ("SwiGLU", _is_swiglu, _fused_mlp))


def _matches(module: nn.Module, fake: Any, fused: Callable[[Tensor], Tensor]) -> bool:
    """Run the forward of a module's class on a fake module, and compare."""
    sample = torch.linspace(-3, 4, 3 * _SIZE).view(3, _SIZE)
    if len(inspect.signature(type(module).forward).parameters) != 2:
        return False  # it takes more than one input, such as the gate of a gated norm
    try:
        found = type(module).forward(fake, sample)
    except (AttributeError, TypeError, RuntimeError):
        return False  # it needs other attributes: another kind of module
    return isinstance(found, Tensor) and torch.allclose(found, fused(sample), 1e-5, 1e-6)


def _epsilon(module: Any) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _takes_packed(module: nn.Module) -> bool:
    return "cu_seqlens" in inspect.signature(type(module).forward).parameters


def register_attention(name: str, attend: Callable[..., Any], masks: str) -> str:
    """Register an attention with transformers, with the masks of another one; return its name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[masks])
    return name


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
    """Attend (B, N, S, H) like transformers' sdpa; unmasked sequences by the fastest backend."""
    is_unmasked = attention_mask is None and query.shape[2] == key.shape[2]
    is_plain = all(kwargs.get(name) is None for name in ("softcap", "position_bias"))
    if not is_unmasked or not is_plain:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        plain = ALL_ATTENTION_FUNCTIONS[PLAIN]
        options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        return plain(module, query, key, value, attention_mask, **options, **kwargs)
    output = sdpa.attention(
        *(query, key, value),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        dropout=dropout,
        is_causal=_is_causal(module, is_causal),
    )
    return output.transpose(1, 2).contiguous(), None


def _is_causal(module: Any, given: bool | None) -> bool:
    return getattr(module, "is_causal", True) if given is None else given


def _attend_packed(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend (1, N, T, H) within the documents given by the cumulative lengths."""
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        return _attend(module, query, key, value, attention_mask, **kwargs)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if max_length_q is not None and max_length_k is not None and sdpa.supports_flash(q, k, v):
        scaling, is_causal = kwargs.get("scaling"), _is_causal(module, kwargs.get("is_causal"))
        output = sdpa.flash_attention(
            *(q, k, v),
            scale=q.shape[-1] ** -0.5 if scaling is None else scaling,
            dropout=kwargs.get("dropout", 0.0),
            window=(-1, 0 if is_causal else -1),
            documents=sdpa.Documents(
                cu_seq_lens_q.int(), cu_seq_lens_k.int(), max_length_q, max_length_k
            ),
        )
        return output[None], None
    lengths_q, lengths_k = (ends.diff().tolist() for ends in (cu_seq_lens_q, cu_seq_lens_k))
    documents = zip(query.split(lengths_q, 2), key.split(lengths_k, 2), value.split(lengths_k, 2))
    return torch.cat([_attend(module, *each, None, **kwargs)[0] for each in documents], 1), None
