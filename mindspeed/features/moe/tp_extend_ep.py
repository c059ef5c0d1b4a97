"""Tensor-parallel ranks that share the number of experts instead of their weights."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from mindspeed import config
from mindspeed.config import ConfigError
from mindspeed.features.base import Context, Feature, Level
from mindspeed.features.moe.experts import check_experts, number_of_experts
from mindspeed.patching import Patch


class MoeTpExtendEp(Feature):
    """Expert layers with EP' = TP x EP and whole experts: one all-to-all and no TP collectives."""

    name = "moe_tp_extend_ep"
    title = "TP-extend-EP"
    group = "MoE"
    level = Level.ALGORITHM
    enabled_by = "moe_tp_extend_ep"
    conflicts = {"moe_bmm_mc2": "its operators gather tokens over the TP group of the experts"}

    class Options(config.Options):
        """The switch."""

        moe_tp_extend_ep: bool = False
        """Distribute whole experts over the ranks of TP x EP instead of splitting the weights of
        each over the TP group; the same as --expert-tensor-parallel-size 1 with TP times as many
        expert-parallel ranks."""

    def check(self, options: Any, context: Context) -> None:
        """The experts divide over TP x EP, and nothing else sets their parallelism."""
        if context.megatron is None:
            return
        flag = context.name_of(options, "moe_tp_extend_ep")
        check_experts(flag, context)
        tp = context.argument("tensor_model_parallel_size", 1)
        ep = context.argument("expert_model_parallel_size", 1)
        experts = number_of_experts(context)
        if experts % (tp * ep):
            raise ConfigError(
                f"{flag} distributes {experts} experts over {tp} x {ep} ranks of TP x EP: choose "
                f"parallel sizes whose product divides {experts}"
            )
        etp = context.argument("expert_tensor_parallel_size")
        if etp is not None and etp != tp:
            raise ConfigError(
                f"{flag} and --expert-tensor-parallel-size {etp} both set the tensor parallelism "
                "of experts: drop one"
            )
        if context.argument("moe_expert_capacity_factor") is not None:
            raise ConfigError(f"{flag} and --moe-expert-capacity-factor exclude each other")

    def patches(self, options: Any) -> Iterator[Patch]:
        """Change the two numbers where the groups and the configuration are made."""
        yield Patch.wrap(
            "megatron.core.parallel_state:initialize_model_parallel",
            wrap_initialize_model_parallel,
            why="the groups are made from arguments that the script passes",
        )
        yield Patch.wrap(
            "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
            wrap_post_init,
            why="the experts' sizes follow from the same numbers",
        )


def extended(tp: int, ep: int, etp: int | None) -> tuple[int, int]:
    """Return EP and ETP of the expert layers; ETP 1 says that they were computed already."""
    return (ep, 1) if etp == 1 else (tp * ep, 1)


def wrap_initialize_model_parallel(original: Callable[..., None]) -> Callable[..., None]:
    """Make the groups of experts for TP x EP ranks."""

    @functools.wraps(original)
    def initialize_model_parallel(
        tensor_model_parallel_size: int = 1, *args: Any, **kwargs: Any
    ) -> None:
        kwargs["expert_model_parallel_size"], kwargs["expert_tensor_parallel_size"] = extended(
            tensor_model_parallel_size,
            kwargs.get("expert_model_parallel_size", 1),
            kwargs.get("expert_tensor_parallel_size"),
        )
        original(tensor_model_parallel_size, *args, **kwargs)

    return initialize_model_parallel


def wrap_post_init(original: Callable[..., None]) -> Callable[..., None]:
    """Set the sizes before `TransformerConfig` checks them."""

    @functools.wraps(original)
    def post_init(self: Any) -> None:
        if self.num_moe_experts is not None:
            self.expert_model_parallel_size, self.expert_tensor_parallel_size = extended(
                self.tensor_model_parallel_size,
                self.expert_model_parallel_size,
                self.expert_tensor_parallel_size,
            )
        original(self)

    return post_init
