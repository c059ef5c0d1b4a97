"""Megatron's GPTModel: plain, with Liger's own patches, and under mindspeed."""

import os

import torch


def plain(shape, **options):
    """Build what pip gives: the local spec without a fused attention."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return _build(shape, get_gpt_layer_local_spec(normalization="RMSNorm"), **options)


def recompute(shape):
    """Build plain Megatron with its selective recompute of the attention."""
    return plain(shape, recompute_granularity="selective")


def liger(shape, **options):
    """Build the local spec with SDPA for its attention and Liger's own patches for the rest."""
    from liger_kernel.megatron import apply_liger_kernel_to_megatron
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    apply_liger_kernel_to_megatron(rms_norm=True, cross_entropy=True, swiglu=True)
    DotProductAttention.forward = _sdpa
    return plain(shape, **options)


def liger_with_optimizer(shape):
    """Build it with Megatron's optimizer."""
    return liger(shape, has_optimizer=True)


def ours(shape, *, features=None, **options):
    """Build the TE spec under the adaptor at level 2, as `pretrain_gpt.py` does by itself."""
    import mindspeed.megatron_adaptor  # noqa: F401  # isort: skip
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    import mindspeed

    mindspeed.enable(optimization_level=2, **(features or {}))
    spec = get_gpt_layer_with_transformer_engine_spec(
        shape.num_experts or None, bool(shape.num_experts), bool(shape.num_experts)
    )
    return _build(shape, spec, apply_rope_fusion=True, **options)


def fused_experts(shape):
    """Build ours with experts that gather tokens in their GEMMs, and one kernel for the choice."""
    return ours(shape, features={"moe_fused_experts": True}, moe_router_fusion=True)


def fused_experts_deterministic(shape):
    """Build the same for the same bits in every run, attention included."""
    features = {"moe_fused_experts": True, "npu_deterministic": True}
    return ours(shape, features=features, moe_router_fusion=True)


def router_apart(shape):
    """Build the same with Megatron's own choice of experts."""
    return ours(shape, features={"moe_fused_experts": True})


def experts_apart(shape):
    """Build ours with Megatron's experts and choice."""
    return ours(shape, features={"moe_fused_experts": False})


def deterministic(shape):
    """Build ours for the same bits in every run."""
    return ours(shape, features={"npu_deterministic": True})


def swiglu_apart(shape):
    """Build ours with SwiGLU as a separate op between its GEMMs, not fused into them."""
    return ours(shape, features={"fuse_swiglu_gemm": False})


def ours_with_optimizer(shape):
    """Build ours with Megatron's optimizer, weight gradients accumulated in float32."""
    return ours(shape, has_optimizer=True, gradient_accumulation_fusion=True)


def _sdpa(self, query, key, value, attention_mask, *args, **kwargs):
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=True
        )
    return out.permute(2, 0, 1, 3).flatten(2)


def _build(shape, spec, has_optimizer=False, **options):
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    os.environ.setdefault("LOCAL_RANK", "0")
    torch.distributed.init_process_group(backend, world_size=1, rank=0)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = _config(shape, **options)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=shape.vocabulary,
        max_sequence_length=shape.sequence,
        share_embeddings_and_output_weights=shape.is_tied,
        position_embedding_type="rope",
        rotary_base=1000000,
    )
    model = Float16Module(config, model.cuda())
    updates = []
    if has_optimizer:
        model, update = _with_optimizer(config, model)
        updates.append(update)

    def loss(tokens, labels):
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return model(tokens, positions, None, labels=labels).mean()

    return model, loss, *updates


def _with_optimizer(config, model):
    """Return the model with float32 gradients, and what updates its weights once they are there."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    wrapped = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model
    )
    settings = OptimizerConfig(optimizer="adam", lr=1e-5, bf16=True, params_dtype=torch.bfloat16)
    optimizer = get_megatron_optimizer(settings, [wrapped])

    def update():
        finalize_model_grads([wrapped])
        optimizer.step()
        optimizer.zero_grad()
        wrapped.zero_grad_buffer()

    return wrapped, update


def _config(shape, **options):
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        ffn_hidden_size=shape.ffn,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        add_bias_linear=False,
        add_qkv_bias=shape.has_qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        masked_softmax_fusion=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        attention_softmax_in_fp32=True,
        kv_channels=shape.head_size,
        **(_experts(shape) if shape.num_experts else {}),
        **options,
    )


def _experts(shape):
    return {
        "num_moe_experts": shape.num_experts,
        "moe_router_topk": shape.top_k,
        "moe_ffn_hidden_size": shape.ffn,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_permute_fusion": True,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "qk_layernorm": True,
    }
