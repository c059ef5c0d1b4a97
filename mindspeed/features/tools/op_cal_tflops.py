"""Model and hardware FLOP/s in the log line, counted operator by operator."""

from collections.abc import Iterator
from typing import Any

from mindspeed import config
from mindspeed.compat import megatron
from mindspeed.features.base import Feature, Level
from mindspeed.patching import Patch

PACKAGE = "mindspeed.tune.megatron"
COUNTER = "mindspeed.tune.flop_counter"
RECOMPUTED = {
    "megatron.core.tensor_parallel.random:checkpoint": "wrap_checkpoint",
    "megatron.core.tensor_parallel.random:CheckpointWithoutOutput.checkpoint": (
        "wrap_checkpoint_without_output"
    ),
    "megatron.core.extensions.transformer_engine:te_checkpoint": "wrap_te_checkpoint",
    "torch.utils.checkpoint:checkpoint": "wrap_checkpoint",
}
"""What recomputes activations, and the wrap that marks it."""


class OpCalTflops(Feature):
    """Count what a step multiplies, recomputed activations apart, and log it per second."""

    name = "op_cal_tflops"
    title = "TFLOPS by counting operators"
    group = "Tools"
    level = Level.COMPAT
    enabled_by = "op_cal_tflops"

    class Options(config.Options):
        """The switch."""

        op_cal_tflops: bool = False
        """Log model and hardware TFLOP/s per device, counted operator by operator in the first
        step."""

    def patches(self, options: Any) -> Iterator[Patch]:
        """Mark what is recomputed; wrap Megatron-LM's train loop where there is one."""
        for target, wrap in RECOMPUTED.items():
            yield Patch.wrap(
                target,
                f"{PACKAGE}:{wrap}",
                why="nothing else distinguishes a recomputed operator from one of the backward",
            )
        yield Patch.wrap(
            "mindspeed.ops.groupmatmul_add_fp32.triton_impl:_launch",
            f"{COUNTER}:wrap_grouped_kernel",
            why="a Triton kernel that multiplies is no operator of torch",
        )
        yield Patch.wrap(
            "mindspeed.ops.linear_cross_entropy.triton_impl:_write_logits",
            f"{COUNTER}:marks_recompute",
            why="logits that were not kept are computed again in its backward",
        )
        # Only Megatron-LM's own training package has a loop.
        if megatron.has_training():
            yield Patch.wrap(
                "megatron.training.training:train_step",
                f"{PACKAGE}:wrap_train_step",
                why="no callback surrounds a step",
            )
            yield Patch.wrap(
                "megatron.training.training:print_rank_last",
                f"{PACKAGE}:wrap_print_rank_last",
                why="the line is built inside training_log and handed to this function only",
            )
