"""Losses that Megatron adds to the gradients itself, as metrics of a step.

Megatron keeps each of them, without its coefficient, as a sum over the layers and micro-batches of
this rank. The mean over all ranks needs how many values that sum has.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mindspeed_llm.training.model import RoleModel

LOAD_BALANCING, Z_LOSS = "load_balancing_loss", "z_loss"
"""The losses of routers, as Megatron names them."""
MTP_LOSS = "mtp loss"
"""The cross entropy of multi-token prediction."""
SumAndCount = tuple[Tensor | float, Tensor | float]


def take_added_losses(model: RoleModel, num_micro_batches: int) -> dict[str, SumAndCount]:
    """Return the losses of a step by name, the same names on every rank; Megatron forgets them.

    Nothing waits for the device.
    """
    config = model.config
    found: dict[str, SumAndCount] = {}
    routed = len(model.routers) * num_micro_batches
    if config.num_moe_experts is not None and config.moe_router_load_balancing_type != "none":
        # Each of the ranks that share a sequence has a part of the sum over its experts.
        ranks = config.tensor_model_parallel_size * config.context_parallel_size
        found[LOAD_BALANCING] = _take_of_routers(LOAD_BALANCING), routed / ranks
    if config.num_moe_experts is not None and config.moe_z_loss_coeff is not None:
        found[Z_LOSS] = _take_of_routers(Z_LOSS), float(routed)
    if config.mtp_num_layers and config.mtp_loss_scaling_factor:
        found[MTP_LOSS] = _take_of_further_tokens(num_micro_batches)
    return found


def mean_losses(names: Sequence[str], totals: Sequence[float]) -> dict[str, float]:
    """Return the mean of each loss from sums and counts of all ranks, one after the other."""
    pairs = zip(names, totals[::2], totals[1::2], strict=True)
    return {name: total / count for name, total, count in pairs if count}


def _take_of_routers(name: str) -> Tensor | float:
    """Return the sum of a loss over the layers of this rank; 0 where it has none."""
    entry = _router_losses().pop(name, None)
    if entry is None:
        return 0.0
    values: Tensor = entry["values"] if isinstance(entry, dict) else entry.values
    return values.sum()


def _router_losses() -> Any:
    """Return where this release of Megatron keeps the losses of routers by name."""
    try:
        # Where it exists, the function of earlier releases returns a copy.
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:
        pass
    else:
        return get_moe_metrics_tracker().metrics
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    name = "get_moe_layer_wise_logging_tracker"  # 0.12 has it in the second
    return getattr(moe_utils if hasattr(moe_utils, name) else parallel_state, name)()


def _take_of_further_tokens(num_micro_batches: int) -> SumAndCount:
    """Return the sum over layers, which the last pipeline stage has.

    As in the loss of next tokens, a micro-batch without a label one token on counts with loss 0.
    """
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    tracker = MTPLossLoggingHelper.tracker
    values = tracker.pop("loss_values" if "loss_values" in tracker else "values", None)
    if values is None:
        return 0.0, 0.0
    is_known = values.isfinite()
    return values.where(is_known, 0.0).sum(), is_known.sum() * num_micro_batches
