"""Llama's weight names, of which other families take their parts."""

from mindspeed_llm.models.rules import Cut, copy, qkv, stack
from mindspeed_llm.models.table import WeightTable

MODEL = (
    copy(
        "embedding.word_embeddings.weight",
        "model.embed_tokens.weight",
        "vocab_size",
        "hidden_size",
        cut=Cut.VOCABULARY,
    ),
    copy("decoder.final_layernorm.weight", "model.norm.weight", "hidden_size"),
    copy(
        "output_layer.weight",
        "lm_head.weight",
        "vocab_size",
        "hidden_size",
        cut=Cut.VOCABULARY,
        when="untied",
    ),
)

NORMS = (
    copy("input_layernorm.weight", "input_layernorm.weight", "hidden_size"),
    copy("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "hidden_size"),
)

ATTENTION = (
    qkv(
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "hidden_size",
    ),
    qkv(
        "self_attention.linear_qkv.bias",
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        when="qkv_bias",
    ),
    copy(
        "self_attention.linear_proj.weight",
        "self_attn.o_proj.weight",
        "hidden_size",
        "attention_size",
        cut=Cut.COLUMNS,
    ),
    copy(
        "self_attention.linear_proj.bias",
        "self_attn.o_proj.bias",
        "hidden_size",
        when="linear_bias",
    ),
)

MLP = (
    stack(
        "mlp.linear_fc1.weight",
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "ffn_hidden_size",
        "hidden_size",
    ),
    stack(
        "mlp.linear_fc1.bias",
        ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
        "ffn_hidden_size",
        when="linear_bias",
    ),
    copy(
        "mlp.linear_fc2.weight",
        "mlp.down_proj.weight",
        "hidden_size",
        "ffn_hidden_size",
        cut=Cut.COLUMNS,
    ),
    copy("mlp.linear_fc2.bias", "mlp.down_proj.bias", "hidden_size", when="linear_bias"),
)

TABLE = WeightTable(model=MODEL, layer=NORMS + ATTENTION, dense=MLP)
