"""Buffers of communicators, sized for each process group."""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mindspeed import config
from mindspeed.config import ConfigError, flag_name
from mindspeed.distributed import group_buffers as buffers
from mindspeed.distributed.environment import is_rank_zero
from mindspeed.distributed.group_buffers import Messages
from mindspeed.features.base import Context, Feature, Level
from mindspeed.features.parallel.context_parallel import chosen
from mindspeed.patching import Patch
from mindspeed.tune.run_sizes import RunSizes

if TYPE_CHECKING:
    from mindspeed.device import Device

logger = logging.getLogger(__name__)

UNKNOWN_FACTOR = -1.0
_SIZES = ("seq_length", "micro_batch_size", "hidden_size", "num_attention_heads")


class GroupBuffers(Feature):
    """Give each communicator a buffer for its messages instead of one size for all."""

    name = "hccl_group_buffer"
    title = "Communicator buffers"
    group = "Comm"
    level = Level.COMPAT
    enabled_by = "hccl_group_buffer"

    class Options(config.Options):
        """Sizes by group, or the request to compute them."""

        hccl_group_buffer: str | None = None
        """Buffer of the communicators of a process group in MiB, by Megatron's name of the group:
        "dp:200;tp:300;ep:400". Other groups keep the default of the backend."""

        hccl_group_buffer_adaptive: bool = False
        """Size the buffers of TP, PP, CP and EP groups for the largest message of the run; sizes in
        --hccl-group-buffer come first."""

        hccl_ep_group_buffer_adaptive_factor: float = UNKNOWN_FACTOR
        """Rows that the busiest expert rank receives, relative to balanced experts (1 = balanced),
        for the buffers of expert groups. Default: -1, which leaves them alone."""

    def is_on(self, options: Any, context: Context) -> bool:
        """Sizes are given or wanted."""
        return options.hccl_group_buffer is not None or options.hccl_group_buffer_adaptive

    def idle_fields(self, options: Any, is_on: bool) -> tuple[str, ...]:
        """The factor counts where sizes are computed."""
        is_read = is_on and options.hccl_group_buffer_adaptive
        return () if is_read else ("hccl_ep_group_buffer_adaptive_factor",)

    def check(self, options: Any, context: Context) -> None:
        """Sizes are legal, and what they are computed from is known."""
        _given(options, context)
        factor = options.hccl_ep_group_buffer_adaptive_factor
        if not options.hccl_group_buffer_adaptive:
            return
        spelled = context.spelling.with_value("hccl_ep_group_buffer_adaptive_factor", factor)
        if factor != UNKNOWN_FACTOR and not 0 < factor < float("inf"):
            raise ConfigError(
                f"{spelled}: give a number above 0 (1 for balanced experts), or -1 to leave expert "
                "groups alone"
            )
        is_known = context.megatron is not None
        if is_known and factor != UNKNOWN_FACTOR and not context.argument("num_experts"):
            raise ConfigError(f"{spelled}: the model has no experts: drop it")
        if is_known or context.client is not None:  # else the script may still come
            messages_of(options, context)

    def patches(self, options: Any) -> Iterator[Patch]:
        """Wrap the function that returns the options of a group."""
        yield Patch.wrap(
            "megatron.core.parallel_state:get_nccl_options",
            wrap_get_nccl_options,
            why="the file that Megatron reads sets what NCCL has, and no buffer of HCCL's",
        )


def wrap_get_nccl_options(
    original: Callable[[str, Mapping[str, Any]], Any],
) -> Callable[[str, Mapping[str, Any]], Any]:
    """Add the buffer of a group to its options."""
    said: list[str] = []

    @functools.wraps(original)
    def get_nccl_options(pg_name: str, nccl_comm_cfgs: Mapping[str, Any]) -> Any:
        from mindspeed import device  # imports torch, which listing the features must not need
        from mindspeed.features import activation

        active, here = activation.current(), device.current()
        sizes = plan(active.options, active.context)
        _report(sizes, here, said)
        found = original(pg_name, nccl_comm_cfgs)
        try:
            return here.group_options(sizes[pg_name], found) if pg_name in sizes else found
        except device.DeviceError as error:
            raise ConfigError(str(error)) from None

    return get_nccl_options


def _report(sizes: Mapping[str, int], here: "Device", said: list[str]) -> None:
    """Log what is set, or that nothing can be, once for the groups of a run."""
    text = buffers.in_words(sizes)
    if said != [text] and is_rank_zero():
        if here.group_buffers is None:
            why = f"{here.backend} keeps no buffers by communicator"
            logger.warning("--hccl-group-buffer %s has no effect: %s", text, why)
        else:
            logger.info("communicator buffers by %s: %s", here.group_buffers, text)
    said[:] = [text]


def plan(options: Any, context: Context) -> dict[str, int]:
    """Return MiB by group: those given, and before them those computed."""
    computed: dict[str, int] = {}
    if options.hccl_group_buffer_adaptive:
        computed = messages_of(options, context).buffers()
    return computed | _given(options, context)


def messages_of(options: Any, context: Context) -> Messages:
    """Return what the messages of a run follow from; ConfigError if that is not known."""
    arguments = context.megatron if context.megatron is not None else context.client or {}
    context = replace(context, megatron=arguments)
    missing = [name for name in _SIZES if not context.argument(name)]
    if missing:
        flag = context.name_of(options, "hccl_group_buffer_adaptive")
        raise ConfigError(
            f"{flag} needs {', '.join(map(flag_name, missing))}, from the arguments of a "
            "Megatron-LM script or those given to repatch: add what is missing, or give sizes by "
            "--hccl-group-buffer"
        )
    get, sizes = context.argument, RunSizes.of(arguments)
    tp, widths = sizes.tensor_model_parallel_size, sizes.attention_widths
    stage_width = buffers.FLOAT if get("fp32_residual_connection", False) else sizes.width
    declared = options.use_multiparameter_pipeline_model_parallel
    factor = options.hccl_ep_group_buffer_adaptive_factor
    is_extended = options.moe_tp_extend_ep
    return Messages(
        seq_length=sizes.seq_length,
        micro_batch_size=sizes.micro_batch_size,
        hidden_size=sizes.hidden_size,
        query_size=widths.query,
        kv_size=widths.key,
        head_size=widths.query // sizes.num_attention_heads,
        width=sizes.width,
        stage_width=None if declared else stage_width,
        tp=tp,
        pp=sizes.pipeline_model_parallel_size,
        cp=sizes.context_parallel_size,
        ep=sizes.expert_model_parallel_size * (tp if is_extended else 1),
        expert_tp=1 if is_extended else sizes.expert_tp,
        sequence_parallel=sizes.sequence_parallel,
        cp_comm_type=chosen(options, arguments).comm_type,
        has_mask=get("create_attention_mask_in_dataloader", False),
        topk=sizes.topk,
        dispatcher=get("moe_token_dispatcher_type", "allgather"),
        ep_factor=None if factor == UNKNOWN_FACTOR else factor,
    )


def _given(options: Any, context: Context) -> dict[str, int]:
    text = options.hccl_group_buffer
    if text is None:
        return {}
    return buffers.parse(text, context.spelling.with_value("hccl_group_buffer", text))
