"""Fused RMSNorm in models that are built from Megatron's local layer specs."""

from collections.abc import Iterator
from typing import Any

from mindspeed import config
from mindspeed.config import ConfigError
from mindspeed.features.base import Context, Feature, Level
from mindspeed.patching import Patch


class FusedRmsnorm(Feature):
    """Normalise by one operator that keeps its input and one number a row for backward."""

    name = "fused_rmsnorm"
    title = "Fused RMSNorm"
    group = "Fusion"
    level = Level.AFFINITY
    enabled_by = "use_fused_rmsnorm"
    default_devices = ("cuda",)

    class Options(config.Options):
        """The switch."""

        use_fused_rmsnorm: bool | None = None
        """Use the fused RMSNorm operator where a local layer spec normalises. Default: on CUDA."""

    def check(self, options: Any, context: Context) -> None:
        """The model must be normalised by RMSNorm."""
        given = context.argument("normalization")
        if given is not None and given != "RMSNorm":
            flag = context.spelling.name_of("use_fused_rmsnorm")
            raise ConfigError(
                f"{flag} needs --normalization RMSNorm, not {given}: change it or drop {flag}"
            )

    def patches(self, options: Any) -> Iterator[Patch]:
        """Wrap the construction of the local specs' norm."""
        yield Patch.wrap(
            "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
            "mindspeed.ops.norm.megatron:wrap_wrapped_torch_norm_new",
            why="local specs name this class, and it builds torch.nn.RMSNorm by itself",
        )
