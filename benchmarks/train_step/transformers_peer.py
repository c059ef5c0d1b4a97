"""The same model in transformers: as it is, compiled, and with Liger's kernels."""

import torch


def sdpa(shape):
    """Build it with torch's scaled_dot_product_attention, and its grouped GEMM for experts."""
    model = (_qwen3_moe if shape.num_experts else _qwen2)(shape).to("cuda", torch.bfloat16)

    def loss(tokens, labels):
        return model(input_ids=tokens, labels=labels, shift_labels=labels).loss

    return model, loss


def _qwen3_moe(shape):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        moe_intermediate_size=shape.ffn,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.sequence,
        tie_word_embeddings=shape.is_tied,
        use_cache=False,
        attn_implementation="sdpa",
        experts_implementation="grouped_mm",
    )
    with torch.device("cuda"):
        return Qwen3MoeForCausalLM(config)


def _qwen2(shape):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.ffn,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.sequence,
        tie_word_embeddings=shape.is_tied,
        rope_theta=1000000.0,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return Qwen2ForCausalLM(config)


def compiled(shape):
    """Build it and compile the whole model."""
    model, _ = sdpa(shape)
    run = torch.compile(model)

    def loss(tokens, labels):
        return run(input_ids=tokens, labels=labels, shift_labels=labels).loss

    return model, loss


def liger(shape):
    """Build it with Liger's kernels in place of its own."""
    from liger_kernel.transformers import apply_liger_kernel_to_qwen2

    apply_liger_kernel_to_qwen2()
    return sdpa(shape)
