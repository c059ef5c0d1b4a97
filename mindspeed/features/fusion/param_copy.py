"""Model parameters that are written by the optimizer's own kernel."""

from collections.abc import Iterator
from typing import Any

from mindspeed import config
from mindspeed.features.base import Feature, Level
from mindspeed.patching import Patch


class ParamCopy(Feature):
    """Write the 16-bit model parameters in the pass of Adam that updates the float32 ones."""

    name = "param_copy"
    title = "Parameter copy fusion"
    group = "Fusion"
    level = Level.AFFINITY
    enabled_by = "fuse_param_copy"
    default_devices = ("cuda",)

    class Options(config.Options):
        """The switch."""

        fuse_param_copy: bool | None = None
        """Let Adam write the bf16 or fp16 model parameters as it updates the float32 ones, instead
        of a copy of each after the step. Default: on CUDA."""

    def patches(self, options: Any) -> Iterator[Patch]:
        """Give Adam the model parameters, and leave Megatron's copy the ones it has not written."""
        package, own = "megatron.core.optimizer", "mindspeed.te.pytorch.optimizers.param_copy"
        yield Patch.wrap(
            f"{package}.optimizer:MixedPrecisionOptimizer.step_with_ready_grads",
            f"{own}:wrap_step_with_ready_grads",
            why="the optimizer inside knows the float32 parameters only",
        )
        for owner in (
            "optimizer:Float16OptimizerWithFloat16Params",
            "distrib_optimizer:DistributedOptimizer",
        ):
            yield Patch.wrap(
                f"{package}.{owner}._copy_main_params_to_model_params",
                f"{own}:wrap_copy_main_params",
                why="it copies every parameter by a kernel of its own",
            )
