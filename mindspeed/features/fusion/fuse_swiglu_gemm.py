"""SwiGLU in the epilogues of the GEMMs around it."""

from collections.abc import Iterator
from typing import Annotated, Any

from mindspeed import config
from mindspeed.config import Alias, ConfigError
from mindspeed.features.base import Context, Feature, Level
from mindspeed.patching import Patch


class FuseSwigluGemm(Feature):
    """Compute SwiGLU and its gradient in the epilogues of the GEMMs around it."""

    name = "fuse_swiglu_gemm"
    title = "SwiGLU inside GEMMs"
    group = "Fusion"
    level = Level.AFFINITY
    enabled_by = "fuse_swiglu_gemm"
    default_devices = ("cuda",)
    requires = ("fused_swiglu",)

    class Options(config.Options):
        """The switch."""

        fuse_swiglu_gemm: Annotated[bool | None, Alias("swiglu_in_product")] = None
        """Compute SwiGLU inside the GEMMs of a dense MLP (TE spec), by the package
        quack-kernels. Default: on a Hopper GPU where that is installed."""

    def check(self, options: Any, context: Context) -> None:
        """Refuse an option without effect: it needs a Hopper GPU and its package."""
        from mindspeed.device.hopper import QUACK

        if not QUACK.is_here():
            flag = context.name_of(options, "fuse_swiglu_gemm")
            raise ConfigError(
                f"{flag} needs a Hopper GPU and {QUACK.name}: pip install '{QUACK.requirement}' "
                f"(beside a CUDA 13 build of torch) or drop {flag}"
            )

    def patches(self, options: Any) -> Iterator[Patch]:
        """Let the fused MLPs that `fused_swiglu` builds use the kernels."""
        yield Patch.wrap(
            "megatron.core.transformer.mlp:MLP.__init__",
            "mindspeed.te.fused_mlp:wrap_mlp_init_in_epilogue",
            why="chosen when an MLP is built; no spec or argument reaches it",
        )
