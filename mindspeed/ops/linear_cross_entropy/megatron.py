"""GPTModel's output layer and loss in one operator.

GPTModel calls its output layer and, right after, its loss. While labels are given, the layer
returns what the loss needs instead of the logits. A trainer that knows which rows have a label
says so by `losses_of`; the others cost nothing then.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mindspeed import device
from mindspeed.ops.linear_cross_entropy import linear_cross_entropy
from mindspeed.ops.linear_cross_entropy.labelled_rows import LabelledRows

# The part of the device's memory for logits that backward need not recompute.
MEMORY_FRACTION = 15


@dataclass(frozen=True)
class PendingLogits:
    """The logits of a layer before they are computed: its input and its weight."""

    layer: nn.Module
    hidden: Tensor
    weight: Tensor
    rows: LabelledRows | None = None
    """The rows whose loss counts, None for all."""

    def loss(self, labels: Tensor, memory: int) -> Tensor:
        """Return the loss (b, s) of labels (b, s), 0 where a row does not count."""
        from megatron.core import tensor_parallel
        from megatron.core.parallel_state import get_tensor_model_parallel_group

        if self.layer.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(self.hidden)
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(self.hidden)
        targets = labels = labels.transpose(0, 1).contiguous()
        if self.rows is not None:
            hidden, targets = self.rows.pick(hidden, labels)
        adds_in_place = self.layer.gradient_accumulation_fusion and self.weight.requires_grad
        losses = linear_cross_entropy(
            hidden,
            self.weight,
            targets,
            get_tensor_model_parallel_group(),
            fused=adds_in_place and hasattr(self.weight, "main_grad"),
            memory=memory,
        )
        if self.rows is not None:
            losses = self.rows.spread(losses, like=labels)
        return losses.transpose(0, 1).contiguous()


@contextmanager
def losses_of(model: Any, rows: LabelledRows | None) -> Iterator[None]:
    """Let a model, wrapped or not, compute the losses of some rows only where it can.

    The losses of other rows are 0, or what they are where the logits are not deferred.
    """
    while hasattr(model, "module"):
        model = model.module
    layer: Any = getattr(model, "output_layer", None)
    if layer is None or rows is None:
        yield
        return
    layer.labelled_rows = rows
    try:
        yield
    finally:
        del layer.labelled_rows


def wrap_caller_of_output_layer(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Defer the logits while labels are given and only the loss needs them."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        labels = signature.bind(self, *args, **kwargs).arguments.get("labels")
        if labels is None or not defers_logits(self):
            return original(self, *args, **kwargs)
        with _deferred_logits(self.output_layer):
            return original(self, *args, **kwargs)

    return run


def wrap_compute_language_model_loss(
    original: Callable[..., Tensor], memory: int | None
) -> Callable[..., Tensor]:
    """Compute the loss of deferred logits by the operator, saving `memory` bytes of them."""

    @functools.wraps(original)
    def compute_language_model_loss(self: Any, labels: Tensor, logits: Any) -> Tensor:
        if isinstance(logits, PendingLogits):
            return logits.loss(labels, memory or device.current().memory_total() // MEMORY_FRACTION)
        return original(self, labels, logits)

    return compute_language_model_loss


def defers_logits(model: Any) -> bool:
    """Return whether the loss of a model with this feature is computed from hidden states.

    The output layer has to be a plain GEMM whose logits go unchanged into the loss.
    """
    from megatron.core.config_logger import has_config_logger_enabled
    from megatron.core.tensor_parallel import ColumnParallelLinear

    layer: Any = getattr(model, "output_layer", None)
    config = model.config
    if (
        not model.post_process
        or type(layer) is not ColumnParallelLinear
        or "forward" in vars(layer)
        or layer._forward_hooks  # which want the logits, such as that of a padded vocabulary
    ):
        return False
    weight = (
        model.shared_embedding_or_output_weight()
        if model.share_embeddings_and_output_weights
        else layer.weight
    )
    return not (
        layer.bias is not None
        or layer.gather_output
        or config.defer_embedding_wgrad_compute
        or config.cpu_offloading
        or getattr(config, "mtp_num_layers", None)
        or getattr(config, "use_mup", False)
        or has_config_logger_enabled(config)
        or hasattr(weight, "__fsdp_param__")
        or weight.dtype != config.params_dtype
    )


@contextmanager
def _deferred_logits(layer: Any) -> Iterator[None]:
    def forward(
        input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Any, None]:
        if runtime_gather_output:
            logits: tuple[Any, None] = type(layer).forward(
                layer, input_, weight, runtime_gather_output
            )
            return logits
        rows = getattr(layer, "labelled_rows", None)
        return PendingLogits(layer, input_, layer.weight if weight is None else weight, rows), None

    # On the instance, so that the layer's hooks (Megatron gathers weights in one) still run.
    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward
