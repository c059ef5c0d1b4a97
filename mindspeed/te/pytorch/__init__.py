"""`transformer_engine.pytorch` as far as megatron-core uses it."""

from mindspeed.te.pytorch import (
    attention,
    cpu_offload,
    cross_entropy,
    distributed,
    float8_tensor,
    fp8,
    module,
    ops,
    optimizers,
    permutation,
    router,
    tensor,
)
from mindspeed.te.pytorch.attention import DotProductAttention
from mindspeed.te.pytorch.cpu_offload import get_cpu_offload_context
from mindspeed.te.pytorch.cross_entropy import parallel_cross_entropy
from mindspeed.te.pytorch.distributed import CudaRNGStatesTracker, checkpoint
from mindspeed.te.pytorch.fp8 import (
    autocast,
    fp8_autocast,
    fp8_model_init,
    quantized_model_init,
)
from mindspeed.te.pytorch.module import (
    Fp8Padding,
    Fp8Unpadding,
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    RMSNorm,
)
from mindspeed.te.pytorch.permutation import (
    moe_permute,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from mindspeed.te.pytorch.transformer import TransformerLayer

__all__ = [
    "CudaRNGStatesTracker",
    "DotProductAttention",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
    "TransformerLayer",
    "attention",
    "autocast",
    "checkpoint",
    "cpu_offload",
    "cross_entropy",
    "distributed",
    "float8_tensor",
    "fp8",
    "fp8_autocast",
    "fp8_model_init",
    "get_cpu_offload_context",
    "module",
    "moe_permute",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "ops",
    "optimizers",
    "parallel_cross_entropy",
    "permutation",
    "quantized_model_init",
    "router",
    "tensor",
]
