"""Shared experts by their number instead of their width."""

import functools
from collections.abc import Callable, Iterator
from typing import Annotated, Any

from pydantic import Field

from mindspeed import config
from mindspeed.config import ConfigError
from mindspeed.features.base import Context, Feature, Level, bind
from mindspeed.features.moe.experts import check_experts
from mindspeed.patching import Patch


class SharedExperts(Feature):
    """Experts that every token visits, n of them as one MLP n times as wide."""

    name = "shared_experts"
    title = "Shared experts"
    group = "MoE"
    level = Level.COMPAT
    enabled_by = "n_shared_experts"
    megatron_flags = ("--moe-shared-expert-intermediate-size", "--moe-shared-expert-overlap")

    class Options(config.Options):
        """How many."""

        n_shared_experts: Annotated[int, Field(ge=1)] | None = None
        """Experts that every token visits, each as wide as a routed one; the same as
        --moe-shared-expert-intermediate-size with that many times the width."""

    def check(self, options: Any, context: Context) -> None:
        """Both ways to say it agree."""
        if options.n_shared_experts is None or context.megatron is None:
            return
        check_experts(context.name_of(options, "n_shared_experts"), context)
        width = context.argument("moe_ffn_hidden_size") or context.argument("ffn_hidden_size")
        given = context.argument("moe_shared_expert_intermediate_size")
        if width is not None and given not in (None, options.n_shared_experts * width):
            flag = context.spelling.with_value("n_shared_experts", options.n_shared_experts)
            raise ConfigError(
                f"{flag} of width {width} contradicts --moe-shared-expert-intermediate-size "
                f"{given}: drop one or give {options.n_shared_experts * width}"
            )

    def is_on(self, options: Any, context: Context) -> bool:
        """Ours, or Megatron's own flag."""
        native = context.argument("moe_shared_expert_intermediate_size")
        return options.n_shared_experts is not None or native is not None

    def idle_fields(self, options: Any, is_on: bool) -> tuple[str, ...]:
        """There is no option beside the switch."""
        return ()

    def patches(self, options: Any) -> Iterator[Patch]:
        """Set Megatron's own field."""
        if options.n_shared_experts is not None:
            yield Patch.wrap(
                "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
                bind(f"{__name__}:wrap_post_init", options.n_shared_experts),
                why="another name of Megatron's option, which its configuration does not know",
            )


def wrap_post_init(original: Callable[..., None], num_shared: int) -> Callable[..., None]:
    """Set the width before `TransformerConfig` checks what goes with it."""

    @functools.wraps(original)
    def post_init(self: Any) -> None:
        if self.num_moe_experts is not None:
            ffn = self.ffn_hidden_size or 4 * self.hidden_size
            width = num_shared * (self.moe_ffn_hidden_size or ffn)
            given = self.moe_shared_expert_intermediate_size
            if given not in (None, width):
                raise ConfigError(
                    f"n_shared_experts={num_shared} makes a width of {width}, but "
                    f"moe_shared_expert_intermediate_size={given}: drop one"
                )
            self.moe_shared_expert_intermediate_size = width
        original(self)

    return post_init
