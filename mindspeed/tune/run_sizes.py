"""The sizes of a run: Megatron's arguments that decide about them, and what follows from those.

Whatever computes parameters, activations or messages from shapes starts here. No torch: features
are listed without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from typing_extensions import Self

from mindspeed.config import Options
from mindspeed.distributed.parallel_dims import padded_vocabulary

FLOAT = 4
"""Bytes of a float32."""


class AttentionWidths(NamedTuple):
    """Widths of all query heads, of all key heads, and of attention's output."""

    query: int
    key: int
    output: int


class RunSizes(Options):
    """Megatron's arguments by Megatron's names; what is missing has Megatron's default."""

    num_layers: int = 0
    hidden_size: int = 0
    ffn_hidden_size: int | None = None
    num_attention_heads: int = 0
    num_query_groups: int | None = None
    group_query_attention: bool = False
    kv_channels: int | None = None
    multi_latent_attention: bool = False
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    vocab_size: int | None = None
    padded_vocab_size: int | None = None
    make_vocab_size_divisible_by: int = 128
    untie_embeddings_and_output_weights: bool = False
    swiglu: bool = False
    num_experts: int | None = None
    moe_router_topk: int | None = None
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    seq_length: int = 0
    micro_batch_size: int = 1
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    world_size: int = 1
    """Ranks of the whole run."""
    sequence_parallel: bool = False
    bf16: bool = False
    fp16: bool = False
    use_distributed_optimizer: bool = False
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Take the sizes from Megatron's arguments, which Megatron has checked."""
        found = {name: arguments.get(name) for name in cls.model_fields}
        return cls.model_construct(**{n: value for n, value in found.items() if value is not None})

    @property
    def width(self) -> int:
        """Bytes of a weight and an activation."""
        return 2 if self.bf16 or self.fp16 else FLOAT

    @property
    def attention_widths(self) -> AttentionWidths:
        """The widths of attention, of all tensor-parallel ranks together."""
        heads = self.num_attention_heads
        if self.multi_latent_attention:
            query = heads * (self.qk_head_dim + self.qk_pos_emb_head_dim)
            return AttentionWidths(query, query, heads * self.v_head_dim)
        head = self.kv_channels or self.hidden_size // heads
        groups = self.num_query_groups if self.group_query_attention else None
        return AttentionWidths(heads * head, (groups or heads) * head, heads * head)

    @property
    def dense_width(self) -> int:
        """The width of an MLP that is no expert."""
        if self.ffn_hidden_size:
            return self.ffn_hidden_size
        # As Megatron rounds it.
        return int(4 * self.hidden_size * 2 / 3) // 64 * 64 if self.swiglu else 4 * self.hidden_size

    @property
    def expert_width(self) -> int:
        """The width of the MLP of one expert."""
        return self.moe_ffn_hidden_size or self.dense_width

    @property
    def topk(self) -> int:
        """Experts of a token, 0 of a dense model."""
        return (self.moe_router_topk or 2) if self.num_experts else 0

    @property
    def mlp_width(self) -> int:
        """The width of the MLPs that a token goes through in one layer."""
        if not self.num_experts:
            return self.dense_width
        return self.topk * self.expert_width + (self.moe_shared_expert_intermediate_size or 0)

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding of all tensor-parallel ranks together, padding included."""
        divisor, tp = self.make_vocab_size_divisible_by, self.tensor_model_parallel_size
        return self.padded_vocab_size or padded_vocabulary(self.vocab_size or 0, divisor, tp)

    @property
    def local_experts(self) -> int:
        """Experts of a layer on this rank, 0 of a dense model."""
        return (self.num_experts or 0) // self.expert_model_parallel_size

    @property
    def expert_tp(self) -> int:
        """Ranks that share the matrices of an expert."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Copies of the model."""
        tp, pp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        return max(self.world_size // (tp * pp * self.context_parallel_size), 1)

    @property
    def stage_layers(self) -> int:
        """Layers of a pipeline stage."""
        return -(-self.num_layers // self.pipeline_model_parallel_size)

    @property
    def recomputed_layers(self) -> int:
        """Layers of a pipeline stage that are recomputed as a whole."""
        if self.recompute_granularity != "full":
            return 0
        if self.recompute_method != "block":
            return self.stage_layers
        return min(self.recompute_num_layers or self.stage_layers, self.stage_layers)

    @property
    def num_parameters(self) -> int:
        """The parameters of a rank of the first pipeline stage, biases and norms apart.

        A layer has H (Q + 2 K) + A H of attention and 3 H F (2 H F without a gate) of its MLP, or
        that of each expert on this rank and H E of the router. The stage has V H, twice if it is
        the only one and the output layer has weights of its own.
        """
        hidden, tp = self.hidden_size, self.tensor_model_parallel_size
        widths = self.attention_widths
        matrices = hidden * (3 if self.swiglu else 2)
        layer = hidden * (widths.query + 2 * widths.key + widths.output) // tp
        if self.num_experts:
            layer += matrices * self.expert_width // self.expert_tp * self.local_experts
            layer += matrices * (self.moe_shared_expert_intermediate_size or 0) // tp
            layer += hidden * self.num_experts
        else:
            layer += matrices * self.dense_width // tp
        is_only_stage = self.pipeline_model_parallel_size == 1
        tables = 2 if self.untie_embeddings_and_output_weights and is_only_stage else 1
        return self.stage_layers * layer + tables * hidden * self.vocabulary // tp

    def adapter_parameters(self, rank: int) -> int:
        """Return the parameters that LoRA adds to this rank: an adapter beside every projection.

        One of (rows, columns) has rank * (rows + columns), of which TP shares what it shares of the
        projection. Mixtures have them in attention and in routed experts.
        """
        hidden, tp = self.hidden_size, self.tensor_model_parallel_size
        widths, matrices = self.attention_widths, 3 if self.swiglu else 2
        sides = 4 * hidden + (widths.query + 2 * widths.key + widths.output) // tp
        if self.num_experts:
            sides += self.local_experts * matrices * (hidden + self.expert_width // self.expert_tp)
        else:
            sides += matrices * (hidden + self.dense_width // tp)
        return self.stage_layers * rank * sides
