"""Options of a mixture of experts in training; Megatron has most of them by the same name."""

from typing import Annotated, Literal

from pydantic import Field

from mindspeed.config import Options


class ExpertOptions(Options):
    """How tokens reach experts, and what is reported and trained of routers."""

    moe_grouped_gemm: bool = False
    """Multiply by the weights of all experts of a rank in one grouped GEMM."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens reach the ranks of their experts."""
    moe_expert_capacity_factor: Annotated[float, Field(gt=0)] | None = None
    """Drop the tokens of an expert beyond this many times its even share. Default: drop none."""
    moe_pad_expert_input_to_capacity: bool = False
    """Pad the tokens of every expert to its capacity."""
    moe_shared_expert_overlap: bool = False
    """Run shared experts beside the collectives of the alltoall dispatcher."""
    moe_router_fusion: bool | None = None
    """Choose the experts of all tokens by one kernel and score them for the auxiliary loss by
    another. Needs a Megatron that has this switch (0.16). Default: on CUDA."""
    moe_load_interval: Annotated[int, Field(ge=0)] | None = None
    """Steps between reports of the experts' load, drop rate and entropy; 0 for none. Default:
    --log-interval."""
    freeze_router: bool = False
    """Keep the weights of routers as they were loaded."""
