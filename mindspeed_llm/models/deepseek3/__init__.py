"""DeepSeek-V3 and R1: V2 with sigmoid routing, a choosing bias and multi-token prediction."""

from mindspeed_llm.models.deepseek3.shape import shape
from mindspeed_llm.models.deepseek3.weights import TABLE
from mindspeed_llm.models.family import Family

_DEFAULTS = {
    "max_position_embeddings": 4096,
    "q_lora_rank": 1536,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
}

FAMILY = Family(
    name="deepseek3",
    model_types={"deepseek_v3": _DEFAULTS},
    aliases=("deepseek_v3", "deepseek_r1"),
    shape=shape,
    table=TABLE,
    # The sum of two others; balancing by a bias has no auxiliary loss.
    ignored=("qk_head_dim", "aux_loss_alpha", "seq_aux"),
)
