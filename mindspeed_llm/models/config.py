"""The configuration of a model of any family: what its weights and its Megatron model need."""

from functools import reduce
from typing import Any, Literal

from mindspeed.config import ConfigError, Options, Spelling
from mindspeed.features.moe.group_score import COUNTED

Scaling = Literal["none", "linear", "llama3", "yarn"]


class RotaryConfig(Options):
    """Rotary position embedding; the fields of a scaling count only where `scaling` names it."""

    base: float = 10000.0
    """Base of the frequencies."""
    scaling: Scaling = "none"
    """How positions beyond the trained length are reached."""
    factor: float = 1.0
    """How many times longer than the trained length."""
    original_length: int = 8192
    """Length the model was trained on (llama3, yarn)."""
    low_frequency_factor: float = 1.0
    """Wavelengths above original_length / this are scaled (llama3)."""
    high_frequency_factor: float = 4.0
    """Wavelengths below original_length / this stay (llama3)."""
    beta_fast: float = 32.0
    """Rotations above which a dimension is not scaled (yarn)."""
    beta_slow: float = 1.0
    """Rotations below which a dimension is fully scaled (yarn)."""
    mscale: float = 1.0
    """Weight of the attention temperature (yarn)."""
    mscale_all_dim: float = 0.0
    """Weight of the temperature taken out of the rotation and put on the softmax (yarn)."""
    truncate: bool = True
    """The first and the last scaled dimension are whole numbers (yarn)."""


class MoEConfig(Options):
    """Routed and shared experts."""

    num_experts: int
    """Routed experts in a layer."""
    topk: int
    """Experts that a token visits."""
    ffn_hidden_size: int
    """Width of one routed expert."""
    is_moe_layer: tuple[bool, ...]
    """For each layer: experts (true) or a dense MLP (false)."""
    shared_ffn_hidden_size: int | None = None
    """Width of all shared experts together; None where there are none."""
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    """How router logits become scores."""
    normalize_topk: bool = True
    """The weights of the chosen experts sum to 1 (before topk_scaling_factor)."""
    topk_scaling_factor: float | None = None
    """Factor on the weights of the chosen experts."""
    num_groups: int | None = None
    """Groups of experts of which only group_topk are considered for a token."""
    group_topk: int | None = None
    """Groups considered for a token."""
    group_score: Literal["max", "top2"] = "top2"
    """How a group is scored: by its best expert or by the sum of its best two."""
    expert_bias: bool = False
    """A bias chooses, but does not weigh, the experts (balancing without auxiliary loss)."""
    aux_loss_coeff: float = 0.0
    """Factor of the load-balancing loss."""

    @property
    def limits_groups(self) -> bool:
        """Return whether a token may not use the experts of all groups."""
        return bool(self.num_groups and self.group_topk and self.group_topk < self.num_groups)

    @property
    def other_group_score(self) -> Literal["max", "top2"] | None:
        """Return how groups are scored, None where that is what Megatron does by itself."""
        if not self.limits_groups:
            return None
        counted = self.topk // (self.group_topk or 1)
        return None if COUNTED[self.group_score] == counted else self.group_score


class MLAConfig(Options):
    """Multi-head latent attention."""

    q_lora_rank: int | None
    """Rank of the compressed query; None where queries are not compressed."""
    kv_lora_rank: int
    """Rank of the compressed key and value."""
    qk_head_dim: int
    """Part of a query and key head without positions."""
    qk_pos_emb_head_dim: int
    """Part of a query and key head with rotary positions."""
    v_head_dim: int
    """Size of a value head."""

    @property
    def q_head_dim(self) -> int:
        """Return the size of a whole query head."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    @property
    def kv_up_head_dim(self) -> int:
        """Return the rows of one head in the up projection of key and value."""
        return self.qk_head_dim + self.v_head_dim

    @property
    def kv_down_size(self) -> int:
        """Return the width of the compressed key and value with the shared rotary part."""
        return self.kv_lora_rank + self.qk_pos_emb_head_dim


class ModelConfig(Options):
    """A decoder-only model with RMSNorm, gated SiLU MLPs and rotary positions."""

    family: str
    """Name of the family, as in mindspeed_llm.models.registry."""
    num_layers: int
    """Decoder layers, without those of multi-token prediction."""
    hidden_size: int
    """Width of the residual stream."""
    ffn_hidden_size: int
    """Width of a dense MLP."""
    num_attention_heads: int
    """Query heads."""
    num_query_groups: int
    """Key and value heads."""
    kv_channels: int
    """Size of a head."""
    vocab_size: int
    """Rows of the embedding in the HF weights."""
    max_position_embeddings: int
    """Longest sequence the model supports."""
    norm_epsilon: float = 1e-6
    """Epsilon of every RMSNorm."""
    tied: bool = False
    """The output layer is the embedding."""
    qkv_bias: bool = False
    """The query, key and value projections have a bias."""
    linear_bias: bool = False
    """Every other projection of attention and MLP has a bias."""
    qk_layernorm: bool = False
    """Query and key heads are normalized."""
    sliding_window: int | None = None
    """Positions a query sees; None where it sees all before it."""
    window_layers: tuple[bool, ...] = ()
    """For each layer: whether it has the sliding window; empty where all have it."""
    attention_sinks: bool = False
    """Every head has a trained logit that takes a share of its softmax and has no value."""
    swiglu_limit: float | None = None
    """Clamp of gate and up, with gpt-oss' activation: quick GELU of the gate times up + 1."""
    rotary: RotaryConfig = RotaryConfig()
    """Rotary position embedding."""
    moe: MoEConfig | None = None
    """Experts; None in a dense model."""
    mla: MLAConfig | None = None
    """Latent attention; None where attention has separate heads."""
    mtp_num_layers: int = 0
    """Layers for multi-token prediction that have weights."""
    num_labels: int = 0
    """Outputs of a head that scores tokens, instead of an output layer; 0 in a language model."""

    @property
    def query_size(self) -> int:
        """Return the width of all query heads."""
        head = self.mla.q_head_dim if self.mla else self.kv_channels
        return self.num_attention_heads * head

    @property
    def kv_size(self) -> int:
        """Return the width of all key heads, which is that of all value heads."""
        return self.num_query_groups * self.kv_channels

    @property
    def kv_up_size(self) -> int:
        """Return the rows of all heads in the up projection of key and value."""
        assert self.mla is not None
        return self.num_attention_heads * self.mla.kv_up_head_dim

    @property
    def attention_size(self) -> int:
        """Return the input width of the output projection of attention."""
        head = self.mla.v_head_dim if self.mla else self.kv_channels
        return self.num_attention_heads * head

    @property
    def two_hidden(self) -> int:
        """Return the width of an embedding and a hidden state, which MTP concatenates."""
        return 2 * self.hidden_size

    @property
    def no_linear_bias(self) -> bool:
        """Return whether projections other than query, key and value have no bias."""
        return not self.linear_bias

    @property
    def untied(self) -> bool:
        """Return whether the output layer has weights of its own."""
        return not self.tied

    @property
    def has_output_weights(self) -> bool:
        """Return whether there is an output layer over the vocabulary with its own weights."""
        return self.untied and not self.num_labels

    @property
    def q_is_compressed(self) -> bool:
        """Return whether latent attention compresses its queries."""
        return self.mla is not None and self.mla.q_lora_rank is not None

    @property
    def q_is_direct(self) -> bool:
        """Return whether latent attention projects its queries at once."""
        return self.mla is not None and self.mla.q_lora_rank is None

    def is_moe_layer(self, layer: int) -> bool:
        """Return whether a layer has experts; a layer of multi-token prediction is as the last."""
        return self.moe is not None and self.moe.is_moe_layer[min(layer, self.num_layers - 1)]

    def mlp_width(self, layer: int) -> int:
        """Return the width of the MLP of a token in a layer, that of all its experts together."""
        if self.moe is None or not self.is_moe_layer(layer):
            return self.ffn_hidden_size
        return self.moe.topk * self.moe.ffn_hidden_size + (self.moe.shared_ffn_hidden_size or 0)

    def with_value_head(self) -> "ModelConfig":
        """Return the configuration of the same model with one value a token as its output."""
        return self.model_copy(update={"num_labels": 1, "tied": False, "mtp_num_layers": 0})

    def get(self, path: str) -> Any:
        """Return the value of a dotted field or property name; None below a missing part."""
        return reduce(lambda value, name: value and getattr(value, name), path.split("."), self)


def language_model(config: ModelConfig, source: str | None) -> ModelConfig:
    """Return the configuration of a model that is to predict tokens; raise if it cannot."""
    if config.num_labels:
        raise ConfigError(
            f"--load {source}: is a reward model, which has no output layer: load a language model "
            f"(completions are scored by posttrain_gpt.py with --reward-model {source})"
        )
    return config


SWITCHES = {
    "untie_embeddings_and_output_weights": "untied",
    "add_qkv_bias": "qkv_bias",
    "add_dense_bias": "linear_bias",
    "qk_layernorm": "qk_layernorm",
    "disable_bias_linear": "no_linear_bias",
    "multi_latent_attention": "mla",
    "moe_router_enable_expert_bias": "moe.expert_bias",
    "norm_topk_prob": "moe.normalize_topk",
}
"""Options that assert a property of the model, each with the field that must be true."""


def contradictions(options: Options, model: ModelConfig) -> list[str]:
    """Return the switches that are on in the options of a command and do not fit the model."""
    return [
        f"{Spelling.FLAG.name_of(options.name_given(name))} (not in this model)"
        for name, field in SWITCHES.items()
        if getattr(options, name, False) and not model.get(field)
    ]


def refuse_contradictions(wrong: list[str]) -> None:
    """Raise, naming each, if there are any."""
    if wrong:
        raise ConfigError(f"not the model that is loaded: {'; '.join(wrong)}: drop these flags")
