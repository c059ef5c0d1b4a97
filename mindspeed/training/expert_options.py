"""Options of mixtures of experts, and what a model without experts refuses."""

from typing import Annotated, Literal

from pydantic import Field

from mindspeed.config import ConfigError, Options, Spelling


class ExpertOptions(Options):
    """How tokens reach experts, and what is reported and trained of routers.

    Megatron has most of these options by the same name.
    """

    moe_grouped_gemm: bool | None = None
    """Multiply by the weights of all experts of a rank in one grouped GEMM. Default: on, but with
    --transformer-impl local."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens reach the ranks of their experts."""
    moe_expert_capacity_factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Drop the tokens of an expert beyond this many times its even share. Default: drop none."""
    moe_pad_expert_input_to_capacity: bool = False
    """Pad the tokens of every expert to its capacity."""
    moe_aux_loss_coeff: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Factor of the loss that balances the load of experts. Default: that of the model's
    config.json."""
    moe_router_load_balancing_type: Literal["aux_loss", "none"] | None = None
    """Whether that loss balances the load. Default: where its factor is not 0."""
    moe_z_loss_coeff: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Factor of the router z-loss, the mean squared logsumexp of a token's router logits, which
    keeps them small. Default: none."""
    moe_router_bias_update_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """What a step adds to or takes from the biases by which routers of DeepSeek-V3 choose experts,
    for even loads; 0 keeps them. Default: Megatron's, 0.001."""
    moe_shared_expert_overlap: bool = False
    """Run shared experts beside the collectives of the alltoall dispatcher."""
    overlap_moe_expert_parallel_comm: bool = False
    """Take the backward pass of a micro-batch and the forward pass of the next in turns, layer by
    layer, so that tokens of one travel to experts while the other computes. Pretraining and --stage
    sft, --bf16 or --fp16. Needs a Megatron that has this switch (0.16)."""
    delay_wgrad_compute: bool = False
    """With that, compute gradients of weights after those of inputs have been sent."""
    moe_router_fusion: bool | None = None
    """Choose the experts of all tokens by one kernel and score them for the auxiliary loss by
    another. Needs a Megatron that has this switch (0.16). Default: on CUDA."""
    moe_load_interval: Annotated[int, Field(ge=0)] | None = None
    """Steps between reports of the experts' load, drop rate and entropy; 0 for none. Default:
    --log-interval."""
    freeze_router: bool = False
    """Keep the weights of routers as they were loaded."""


def check_has_no_experts(options: ExpertOptions) -> None:
    """Raise ConfigError for an option of experts, which a dense model would ignore."""
    for name, info in ExpertOptions.model_fields.items():
        value = getattr(options, name)
        if value is not False and value != info.default:
            flag = Spelling.FLAG.name_of(name)
            raise ConfigError(f"{flag}: the model has no experts: drop it")


def check_shared_sequence(tp: int, sequence_parallel: bool) -> None:
    """Raise ConfigError for tensor parallelism under which Megatron trains no experts."""
    if tp > 1 and not sequence_parallel:
        raise ConfigError(
            f"--tensor-model-parallel-size {tp}: a mixture of experts is trained with tensor "
            "parallelism only if ranks also share the sequence: add --sequence-parallel, or use 1"
        )
