"""DeepSeek-V3 and R1: V2 with sigmoid routing, a choosing bias and multi-token prediction."""

from mindspeed_llm.models.deepseek3.shape import shape
from mindspeed_llm.models.deepseek3.weights import TABLE
from mindspeed_llm.models.family import Family

FAMILY = Family(
    name="deepseek3",
    model_types=("deepseek_v3",),
    aliases=("deepseek_v3", "deepseek_r1"),
    shape=shape,
    table=TABLE,
)
