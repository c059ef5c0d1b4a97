"""The gradient of an embedding, added to `main_grad` row by row.

torch makes a dense gradient of the whole vocabulary for a few thousand tokens; with a tied weight
Megatron then adds it to that of the output layer, and the sum to main_grad: five passes over the
weight in every micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mindspeed.ops.matmul_add_fp32.main_grad import placeholder


class _Lookup(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight  # saved tensors come back without their attributes
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        (ids,), weight = ctx.saved_tensors, ctx.weight
        rows = grad.flatten(0, -2).to(weight.main_grad.dtype)
        weight.main_grad.index_add_(0, ids.flatten(), rows)
        # Of a tied weight the output layer has shown autograd a placeholder already.
        return None if weight.grad_added_to_main_grad else placeholder(weight), None


def wrap_embedding_init(original: Callable[..., None]) -> Callable[..., None]:
    """Keep in a VocabParallelEmbedding whether gradients are added to main_grad directly."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.gradient_accumulation_fusion = kwargs["config"].gradient_accumulation_fusion

    return init


def wrap_embedding_forward(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Look rows up so that their gradients go straight to main_grad.

    Shards of a vocabulary, which mask and reduce what they look up, stay Megatron's.
    """

    @functools.wraps(original)
    def forward(self: Any, input_: Tensor) -> Tensor:
        if not _is_served(self):
            return original(self, input_)
        # Megatron would add the placeholder of a tied weight to main_grad, for this gradient.
        self.weight.zero_out_wgrad = False
        return _Lookup.apply(self.weight, input_)

    return forward


def _is_served(module: Any) -> bool:
    weight = module.weight
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    return (
        module.gradient_accumulation_fusion
        and main_grad is not None
        and main_grad.dtype == torch.promote_types(weight.dtype, torch.float32)
        and hasattr(weight, "grad_added_to_main_grad")
        and weight.requires_grad
        and torch.is_grad_enabled()
        and module.num_embeddings_per_partition == module.num_embeddings
        and not module.reduce_scatter_embeddings
        and not torch.compiler.is_compiling()
    )
