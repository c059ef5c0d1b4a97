"""DeepSeek-V2 and V2-Lite: latent attention, routed and shared experts."""

from mindspeed_llm.models.deepseek2.shape import shape
from mindspeed_llm.models.deepseek2.weights import TABLE
from mindspeed_llm.models.family import Family

FAMILY = Family(
    name="deepseek2",
    model_types={"deepseek_v2": {"n_shared_experts": 2, "q_lora_rank": 1536}},
    aliases=("deepseek2_lite", "deepseek_v2"),
    shape=shape,
    table=TABLE,
    ignored=("qk_head_dim", "seq_aux"),  # the sum of two others; a way to average aux_loss_alpha
)
