"""One update by a Megatron optimizer, clipped by the norm of its gradients, queued in one go.

Megatron's own `step` reads the norm on the host, then passes over all gradients to scale them. Here
the norm stays on the device and FusedAdam scales each gradient as it loads it, so the host queues
the update while backward still runs. Other optimizers are clipped as Megatron does it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed import device
from mindspeed.te.pytorch.optimizers.fused_adam import FusedAdam
from mindspeed.te.pytorch.optimizers.multi_tensor_apply import l2_norms


@torch.no_grad()
def gradient_norm(optimizer: Any) -> Tensor:
    """Return the norm of the prepared gradients over all ranks, a float64 scalar on the device."""
    grads: dict[Any, list[Tensor]] = {}
    for part in _parts(optimizer):
        group = part.get_grad_stats_parallel_group()
        grads.setdefault(group, []).extend(_grads(part))
    here = device.current().torch_device
    total = torch.zeros((), dtype=torch.float64, device=here)
    for group, members in grads.items():
        norms = l2_norms(members).to(here, torch.float32)
        square = torch.linalg.vector_norm(norms).square()
        torch.distributed.all_reduce(square, group=group)
        total += square
    return total.sqrt()


@torch.no_grad()
def update(optimizer: Any, norm: Tensor, is_good: Tensor) -> bool:
    """Take one step with the prepared gradients, clipped as the optimizer's config says.

    Args:
        norm: what `gradient_norm` returned.
        is_good: a boolean scalar on the device, the same on all ranks. If it is false, nothing is
            updated; where that shows on the device only, `retract` must follow.
    """
    parts = [part for part in _parts(optimizer) if not getattr(part, "is_stub_optimizer", False)]
    if all(isinstance(part.optimizer, FusedAdam) for part in parts):
        for part in parts:
            scale = torch.where(is_good, _clip_scale(part, norm), torch.nan)
            part.optimizer.grad_scale = scale.float()
    elif is_good:
        _clip(parts, float(norm))
    else:
        return False
    try:
        return bool(optimizer.step_with_ready_grads())
    finally:
        for part in parts:
            if isinstance(part.optimizer, FusedAdam):
                part.optimizer.grad_scale = None


def retract(optimizer: Any) -> None:
    """Take back the count of a step that was skipped on the device."""
    for part in _parts(optimizer):
        if isinstance(getattr(part, "optimizer", None), FusedAdam):
            for group in part.optimizer.param_groups:
                group["step"] = max(group.get("step", 0) - 1, 0)


def _parts(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _grads(part: Any) -> list[Tensor]:
    """Return the gradients that this rank counts; Megatron 0.19 has renamed the method."""
    if hasattr(part, "get_grads_for_grad_norm"):
        return list(part.get_grads_for_grad_norm())
    return list(part.get_main_grads_for_grad_norm())


def _clip_scale(part: Any, norm: Tensor) -> Tensor:
    limit = part.config.clip_grad
    return (limit / (norm + 1e-6)).clamp(max=1.0) if limit > 0 else torch.ones_like(norm)


def _clip(parts: list[Any], norm: float) -> None:
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    for part in parts:
        if part.config.clip_grad > 0 and (parameters := part.get_parameters()):
            clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, norm)
