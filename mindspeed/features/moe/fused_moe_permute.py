"""Fused permutation of tokens to their experts and back."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from mindspeed import config
from mindspeed.config import ConfigError
from mindspeed.features.base import Context, Feature, Level
from mindspeed.features.moe.experts import check_experts
from mindspeed.patching import Patch

SERVED = ("alltoall", "alltoall_seq", "flex")


class FusedMoePermute(Feature):
    """The same as Megatron's --moe-permute-fusion, under the name that documents use."""

    name = "fused_moe_permute"
    title = "Fused MoE permutation"
    group = "MoE"
    level = Level.ALGORITHM
    enabled_by = "use_fused_moe_token_permute_and_unpermute"
    megatron_flags = ("--moe-permute-fusion",)

    class Options(config.Options):
        """The switch."""

        use_fused_moe_token_permute_and_unpermute: bool = False
        """Move tokens to their experts and back by the fused operators."""

    def is_on(self, options: Any, context: Context) -> bool:
        """Either name switches it on."""
        return super().is_on(options, context) or bool(context.argument("moe_permute_fusion"))

    def check(self, options: Any, context: Context) -> None:
        """The document's rules for its flag; Megatron looks after its own."""
        if not options.use_fused_moe_token_permute_and_unpermute:
            return
        flag = context.spelling.name_of("use_fused_moe_token_permute_and_unpermute")
        check_experts(flag, context)
        dispatcher = context.argument("moe_token_dispatcher_type", "alltoall")
        if dispatcher not in SERVED:
            raise ConfigError(
                f"{flag} needs --moe-token-dispatcher-type {' or '.join(SERVED)}, not {dispatcher}"
            )
        is_padded = context.argument("moe_pad_expert_input_to_capacity", False)
        if context.argument("moe_expert_capacity_factor") is not None and not is_padded:
            raise ConfigError(
                f"{flag} with --moe-expert-capacity-factor needs "
                "--moe-pad-expert-input-to-capacity: add that or drop one"
            )

    def patches(self, options: Any) -> Iterator[Patch]:
        """Set Megatron's own field, which is what its dispatchers read."""
        if options.use_fused_moe_token_permute_and_unpermute:
            yield Patch.wrap(
                "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
                wrap_post_init,
                why="another name of Megatron's flag, which its configuration does not know",
            )


def wrap_post_init(original: Callable[..., None]) -> Callable[..., None]:
    """Set the field before `TransformerConfig` checks what goes with it."""

    @functools.wraps(original)
    def post_init(self: Any) -> None:
        if self.num_moe_experts is not None:
            self.moe_permute_fusion = True
        original(self)

    return post_init
