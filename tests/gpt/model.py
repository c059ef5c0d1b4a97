"""Build this rank's chunks of the tiny GPT and its optimizer out of Megatron's parts."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.gpt.layout import FFN, HEADS, HIDDEN, SEQUENCE, VOCABULARY, Layout
from tests.gpt.weights import Shard

_FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "bias_activation_fusion": True,
        "add_bias_linear": False,
        "num_query_groups": 2,
    },
    "experts": {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "add_bias_linear": False,
    },
}


def transformer_config(layout: Layout) -> TransformerConfig:
    """Return the config that says all of a layout that a model needs to know."""
    granularity, method, num_layers = layout.recompute or (None, None, None)
    dtype = torch.bfloat16 if layout.bf16 else torch.float32
    return TransformerConfig(
        num_layers=layout.num_layers,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        hidden_dropout=layout.dropout,
        attention_dropout=layout.dropout,
        bf16=layout.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.virtual_stages,
        # Two stages are each other's next and previous at once; only this mode tells them apart.
        overlap_p2p_comm=layout.virtual_stages is not None,
        batch_p2p_comm=layout.virtual_stages is None,
        sequence_parallel=layout.sequence_parallel,
        recompute_granularity=granularity,
        recompute_method=method,
        recompute_num_layers=num_layers,
        **_FAMILIES[layout.family],
        moe_grouped_gemm=layout.family == "experts" and layout.spec == "te",
    )


def build_chunk(config: TransformerConfig, layout: Layout, stage: int | None) -> GPTModel:
    """Build the model of one (virtual) pipeline stage, with the weights its layers stand for."""
    # Older releases read the virtual stage from a global, newer ones take an argument.
    if stage is not None:
        parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
    newer = "vp_stage" in inspect.signature(GPTModel).parameters
    here = {"vp_stage": stage} if newer else {}
    gpt = layout.family == "gpt"
    chunk = GPTModel(
        config,
        _layer_spec(layout),
        VOCABULARY,
        SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **here),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **here),
        share_embeddings_and_output_weights=gpt,
        position_embedding_type="learned_absolute" if gpt else "rope",
        **here,
    ).cuda()  # learned positions start on the cpu
    for shard in shards(chunk):
        shard.values.copy_(shard.start())
    return chunk


def shards(chunk: torch.nn.Module) -> Iterator[Shard]:
    """Yield the parameters of a chunk as slices of global tensors; the values are not copies."""
    for entry in chunk.sharded_state_dict().values():
        for part in entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]:
            if isinstance(part, ShardedTensor):
                yield Shard(part.key, part.global_shape, part.global_slice(), part.data.detach())


def data_parallel(
    config: TransformerConfig, layout: Layout, chunk: GPTModel, *, first: bool
) -> DistributedDataParallel:
    """Wrap a chunk as Megatron's get_model does."""
    options = DistributedDataParallelConfig(
        use_distributed_optimizer=layout.distributed_optimizer,
        overlap_grad_reduce=layout.overlap_grad_reduce,
        overlap_param_gather=layout.overlap_param_gather,
        bucket_size=layout.bucket_size,
        grad_reduce_in_fp32=layout.bf16,
    )
    inner = Float16Module(config, chunk) if layout.bf16 else chunk
    return DistributedDataParallel(config, options, inner, disable_bucketing=not first)


def optimizer_config(layout: Layout) -> OptimizerConfig:
    """Return the same Adam for every layout."""
    return OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        weight_decay=0.1,
        # Some gradients are next to nothing, that of the keys' bias is rounding alone; a smaller
        # value would turn the rounding, which every cpu has its own of, into steps of full size.
        adam_eps=1e-3,
        # Out of reach: the norm is compared, and clipping would only spread its rounding.
        clip_grad=1e3,
        bf16=layout.bf16,
        params_dtype=torch.bfloat16 if layout.bf16 else torch.float32,
        use_distributed_optimizer=layout.distributed_optimizer,
    )


def _layer_spec(layout: Layout) -> Any:
    experts = {"num_experts": _FAMILIES[layout.family].get("num_moe_experts")}
    if layout.spec == "te":
        experts["moe_grouped_gemm"] = experts["num_experts"] is not None
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(**experts)
    normalization = _FAMILIES[layout.family].get("normalization")
    return gpt_layer_specs.get_gpt_layer_local_spec(**experts, normalization=normalization)
