"""Optimizer state that waits for the next step in host memory."""

from collections.abc import Iterator
from typing import Any

from mindspeed import config
from mindspeed.config import ConfigError
from mindspeed.features.base import Context, Feature, Level
from mindspeed.features.memory.reuse_fp32_param import check_adam, master_patches
from mindspeed.patching import Patch


class SwapOptimizer(Feature):
    """Keep Adam's moments and the float32 part of the weights in host memory between steps."""

    name = "swap_optimizer"
    title = "Optimizer swap"
    group = "Memory"
    level = Level.COMPAT
    enabled_by = "swap_optimizer"
    conflicts = {"optimizer_selection": "only fused_adamw updates state that is on the host"}

    class Options(config.Options):
        """The switch."""

        swap_optimizer: bool = False
        """Keep the optimizer's state, float32 master weights included, in pinned host memory
        between steps; the update copies it in chunks, beside the computation."""

    def check(self, options: Any, context: Context) -> None:
        """Adam alone updates state in chunks, and its masters have to be in its state."""
        if context.megatron is None:
            return
        flag = context.spelling.name_of("swap_optimizer")
        if context.argument("fp16", False):
            raise ConfigError(f"{flag} needs --bf16 or float32, not --fp16: change one of them")
        check_adam(flag, context)

    def patches(self, options: Any) -> Iterator[Patch]:
        """Put the masters into Adam's state, and that on the host."""
        yield from master_patches()
        yield Patch.wrap(
            "megatron.core.optimizer.optimizer:MegatronOptimizer.__init__",
            "mindspeed.te.pytorch.optimizers.fused_adam:wrap_optimizer_init",
            why="Megatron builds the class it imported; no argument says where its state is kept",
        )
        yield Patch.wrap(
            "megatron.core.optimizer.distrib_optimizer:"
            "DistributedOptimizer._get_main_param_and_optimizer_states",
            "mindspeed.te.pytorch.optimizers.fused_adam:wrap_get_optimizer_states",
            why="in float32 it returns the state itself, which a save in the background reads late",
        )
