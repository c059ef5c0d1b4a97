"""Megatron's own overlap of communication with computation: no patches."""

from mindspeed.features.base import MegatronFeature


class AsyncDdp(MegatronFeature):
    """Gradients that are reduced bucket by bucket while the backward pass still runs."""

    name = "async_ddp"
    title = "Asynchronous DDP"
    group = "Comm"
    megatron_flags = ("--overlap-grad-reduce",)


class OverlapParamGather(MegatronFeature):
    """Updated weights that are gathered while the next forward pass already runs."""

    name = "overlap_param_gather"
    title = "Weight-update communication hiding"
    group = "Comm"
    requires = ("distributed_optimizer", "async_ddp")
    megatron_flags = ("--overlap-param-gather",)
