"""SwiGLU in the epilogues of the GEMMs around it."""

import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from mindspeed import config
from mindspeed.config import Alias, ConfigError
from mindspeed.features.base import Context, Effect, Feature, Level


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
            flag = context.spelling.name_of("fuse_swiglu_gemm")
            raise ConfigError(
                f"{flag} needs a Hopper GPU and {QUACK.name}: pip install '{QUACK.requirement}' "
                f"(beside a CUDA 13 build of torch) or drop {flag}"
            )

    def effects(self, options: Any) -> Iterator[Effect]:
        """Let the fused MLP, which `fused_swiglu` puts in, use the kernels."""
        yield Effect("SwiGLU is computed in the epilogue of fc1's GEMM", _enabled())


@contextmanager
def _enabled() -> Iterator[None]:
    # By name, as the factories of patches: what needs torch is imported when the feature goes on.
    with pkgutil.resolve_name("mindspeed.te.fused_mlp:swiglu_in_epilogue")():
        yield
