"""How groups of experts are scored, where a model was not trained by Megatron's rule."""

from collections.abc import Iterator
from typing import Any, Literal

from mindspeed import config
from mindspeed.features.base import Context, Feature, Level, bind
from mindspeed.features.moe.experts import check_experts
from mindspeed.patching import Patch

COUNTED = {"max": 1, "top2": 2}
"""Experts of a group whose scores count, by the name of the rule."""


class MoeGroupScore(Feature):
    """Choose groups of experts by their best score or by the sum of their best two."""

    name = "moe_group_score"
    title = "Scores of expert groups"
    group = "MoE"
    level = Level.COMPAT
    enabled_by = "moe_router_group_score"
    conflicts = {"moe_router_fusion": "its kernel scores groups by Megatron's rule"}

    class Options(config.Options):
        """The rule."""

        moe_router_group_score: Literal["max", "top2"] | None = None
        """How --moe-router-group-topk groups of experts are chosen: by their best expert (max,
        DeepSeek-V2) or by the sum of the best two (top2, DeepSeek-V3). Default: Megatron's rule,
        the sum of the best --moe-router-topk / --moe-router-group-topk."""

    def check(self, options: Any, context: Context) -> None:
        """There are routers."""
        check_experts(context.name_of(options, "moe_router_group_score"), context)

    def patches(self, options: Any) -> Iterator[Patch]:
        """Wrap the choice of groups."""
        counted = COUNTED[options.moe_router_group_score]
        yield Patch.wrap(
            "megatron.core.transformer.moe.moe_utils:group_limited_topk",
            bind("mindspeed.moe.group_scores:wrap_group_limited_topk", counted),
            why="Megatron derives how many scores count from two other sizes",
        )
