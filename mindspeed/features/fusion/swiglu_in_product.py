"""SwiGLU as part of the matrix products around it."""

from collections.abc import Iterator
from typing import Any

from mindspeed import config
from mindspeed.config import ConfigError
from mindspeed.features.base import Context, Feature, Level
from mindspeed.patching import Patch


class SwigluInProduct(Feature):
    """Compute SwiGLU and its gradient where the products around it write their output."""

    name = "swiglu_in_product"
    title = "SwiGLU inside products"
    group = "Fusion"
    level = Level.AFFINITY
    enabled_by = "swiglu_in_product"
    default_devices = ("cuda",)
    requires = ("fused_swiglu",)

    class Options(config.Options):
        """The switch."""

        swiglu_in_product: bool | None = None
        """Compute SwiGLU inside the products of a dense MLP (TE spec), by the package
        quack-kernels. Default: on a Hopper GPU where that is installed."""

    def check(self, options: Any, context: Context) -> None:
        """The package and its chip must be here: an option without effect would be asked for."""
        from mindspeed.device.hopper import QUACK

        if not QUACK.is_here():
            word = context.spelling.name_of("swiglu_in_product")
            raise ConfigError(
                f"{word} needs a Hopper GPU and {QUACK.name}: pip install '{QUACK.requirement}' "
                f"(beside a CUDA 13 build of torch) or drop {word}"
            )

    def patches(self, options: Any) -> Iterator[Patch]:
        """Tell the first product of an MLP what its output is for."""
        yield Patch.wrap(
            "megatron.core.transformer.mlp:MLP.forward",
            "mindspeed.ops.swiglu.megatron:wrap_mlp_forward",
            why="only the MLP knows that its first product goes into SwiGLU and nowhere else",
        )
