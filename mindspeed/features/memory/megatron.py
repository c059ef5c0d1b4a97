"""Megatron's own ways to save memory: no patches, checked before any rank starts."""

from typing import Any

from mindspeed.config import ConfigError
from mindspeed.features.base import Context, MegatronFeature


class DistributedOptimizer(MegatronFeature):
    """Data-parallel ranks that share the optimizer state."""

    name = "distributed_optimizer"
    title = "Distributed optimizer"
    group = "Memory"
    megatron_flags = ("--use-distributed-optimizer",)

    def is_on(self, options: Any, context: Context) -> bool:
        """Megatron's FSDP and distributed Muon bring a sharded optimizer of their own."""
        switches = ("use_distributed_optimizer", "use_megatron_fsdp", "use_custom_fsdp")
        sharded = any(context.argument(switch) for switch in switches)
        return sharded or context.argument("optimizer") == "dist_muon"


class Recompute(MegatronFeature):
    """Activations that are computed again in the backward pass instead of being kept."""

    name = "recompute"
    title = "Recompute"
    group = "Memory"
    megatron_flags = (
        "--recompute-granularity",
        "--recompute-activations",
        "--recompute-method",
        "--recompute-num-layers",
    )

    def is_on(self, options: Any, context: Context) -> bool:
        """Either of two flags switches recomputation on."""
        switches = ("recompute_granularity", "recompute_activations")
        return any(context.argument(switch) for switch in switches)

    def check(self, options: Any, context: Context) -> None:
        """Full recomputation needs a method; selective recomputation takes none."""
        granularity = context.argument("recompute_granularity")
        method = context.argument("recompute_method")
        # The short flag wins over the long one, as in Megatron.
        if granularity == "full" and not context.argument("recompute_activations"):
            if method is None:
                raise ConfigError(
                    "--recompute-granularity full needs --recompute-method uniform or block"
                )
        elif method is not None:
            raise ConfigError(
                f"--recompute-method {method} is for --recompute-granularity full: add that flag "
                "or drop --recompute-method"
            )


def check_full_recompute(flag: str, context: Context) -> None:
    """Raise ConfigError unless layers are recomputed as a whole, which `flag` is about."""
    is_full = context.argument("recompute_granularity") == "full"
    if not is_full or context.argument("recompute_activations"):
        raise ConfigError(
            f"{flag} needs --recompute-granularity full: add it with --recompute-method, or drop "
            f"{flag}"
        )


def check_beside_recompute(flag: str, context: Context) -> None:
    """Raise ConfigError if Megatron recomputes parts of the layers that `flag` is about."""
    if context.argument("recompute_activations"):
        raise ConfigError(f"{flag} and --recompute-activations exclude each other: drop one")
    granularity = context.argument("recompute_granularity")
    if granularity == "selective":
        raise ConfigError(
            f"{flag} and --recompute-granularity selective exclude each other: drop one"
        )
    method = context.argument("recompute_method")
    if granularity == "full" and method == "uniform":
        raise ConfigError(
            f"{flag} needs layers that are not recomputed as a whole: use --recompute-method block "
            f"instead of uniform, or drop {flag}"
        )
