"""What is trained: its weights, its shape, its numbers."""

from typing import Literal

from mindspeed.config import Options


class ModelOptions(Options):
    """The model; every size is read from its config.json, and only checked where given here."""

    hf_cfg_dir: str | None = None
    """Folder with the config.json of the model, where --load has none."""
    model_type_hf: str | None = None
    """Family of the model, where its config.json does not tell."""
    num_layers: int | None = None
    """Layers, those of --noop-layers included."""
    hidden_size: int | None = None
    """Width of the model."""
    ffn_hidden_size: int | None = None
    """Width of its MLPs."""
    num_attention_heads: int | None = None
    """Query heads."""
    group_query_attention: bool = False
    """There are fewer key heads than query heads; --num-query-groups says how many."""
    num_query_groups: int | None = None
    """Key and value heads."""
    kv_channels: int | None = None
    """Size of a head."""
    max_position_embeddings: int | None = None
    """Longest sequence the model is meant for; may differ from its config.json."""
    vocab_size: int | None = None
    """Rows of the embedding, before padding."""
    padded_vocab_size: int | None = None
    """Rows of the embedding, with padding."""
    make_vocab_size_divisible_by: int = 1
    """Pad the embedding to a multiple of this and of --tensor-model-parallel-size."""
    norm_epsilon: float | None = None
    """Epsilon of the norms."""
    rotary_base: float | None = None
    """Base of the rotary embedding."""
    untie_embeddings_and_output_weights: bool = False
    """The output layer has weights of its own."""
    add_qkv_bias: bool = False
    """Query, key and value have a bias; found from the weights without this flag, too."""
    qk_layernorm: bool = False
    """Query and key heads are normalized."""
    swiglu: bool = False
    """MLPs are gated by SiLU, as in every family here."""
    normalization: Literal["RMSNorm"] | None = None
    """The norm, the same in every family here."""
    position_embedding_type: Literal["rope"] | None = None
    """The position embedding, the same in every family here."""
    disable_bias_linear: bool = False
    """Projections other than query, key and value have no bias."""
    transformer_impl: Literal["transformer_engine", "local"] = "transformer_engine"
    """Which of Megatron's layer specs to build; transformer_engine is served on every device."""
    bf16: bool = False
    """Compute in bfloat16, keep weights for the optimizer in float32."""
    fp16: bool = False
    """Compute in float16 with loss scaling, keep weights for the optimizer in float32."""
    attention_dropout: float = 0.0
    """Share of attention that is dropped."""
    hidden_dropout: float = 0.0
    """Share of hidden states that is dropped."""
    init_method_std: float = 0.02
    """Spread of new weights (--from-scratch)."""
    attention_softmax_in_fp32: bool = False
    """Compute the softmax of local attention in float32."""
