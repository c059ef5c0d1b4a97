"""One copy of bfloat16 parameters instead of two."""

from collections.abc import Iterator
from typing import Any

from mindspeed import config
from mindspeed.config import ConfigError
from mindspeed.features.base import Context, Feature, Level
from mindspeed.patching import Patch


class ReuseFp32Param(Feature):
    """Keep float32 master weights as the bfloat16 parameters and 16 bits more."""

    name = "reuse_fp32_param"
    title = "BF16 parameter reuse"
    group = "Memory"
    level = Level.COMPAT
    enabled_by = "reuse_fp32_param"
    conflicts = {"optimizer_selection": "only fused_adamw updates weights that are kept so"}

    class Options(config.Options):
        """The switch."""

        reuse_fp32_param: bool = False
        """Keep 4 bytes a parameter instead of 6: no float32 copy beside the bfloat16 parameters,
        only the 16 bits that they lack. The numbers stay the same in every bit."""

    def check(self, options: Any, context: Context) -> None:
        """There is a copy to save only in bfloat16, and Adam alone updates halves."""
        if context.megatron is None:
            return
        flag = context.spelling.name_of("reuse_fp32_param")
        if not context.argument("bf16", False):
            raise ConfigError(f"{flag} needs --bf16: add it or drop {flag}")
        check_adam(flag, context)

    def patches(self, options: Any) -> Iterator[Patch]:
        """Set Megatron's own fields, and give its other optimizer the same mode."""
        yield from master_patches()


def check_adam(flag: str, context: Context) -> None:
    """Raise ConfigError unless FusedAdam itself updates the weights, by state in float32."""
    given = context.argument("optimizer", "adam")
    if given != "adam":
        raise ConfigError(f"{flag} needs --optimizer adam, not {given}: change one of them")
    for other in ("optimizer_cpu_offload", "use_megatron_fsdp", "use_custom_fsdp"):
        if context.argument(other, False):
            name = "--" + other.replace("_", "-")
            raise ConfigError(f"{flag} and {name} exclude each other: drop one")
    for moment in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype"):
        dtype = str(context.argument(moment, "fp32"))
        if dtype not in ("fp32", "torch.float32"):
            name = "--" + moment.replace("_", "-")
            raise ConfigError(f"{flag} needs {name} fp32, not {dtype}: change one of them")


def master_patches() -> Iterator[Patch]:
    """Yield the patches that put master weights into Adam's state."""
    package = "mindspeed.memory.reuse_fp32_param"
    yield Patch.wrap(
        "megatron.core.optimizer.optimizer_config:OptimizerConfig.__post_init__",
        f"{package}:wrap_config_post_init",
        why="another name of Megatron's mode, which it has for its distributed optimizer only",
    )
    yield Patch.wrap(
        "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params",
        f"{package}:wrap_float16_optimizer",
        why="its constructor makes float32 copies of all parameters",
    )
