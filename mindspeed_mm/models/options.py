"""The options of the model section: model.json, or `model:` of the YAML file of a run."""

from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from mindspeed.config import SectionOptions
from mindspeed.fsdp import Pattern

CHUNKS = {"chunk": 1024, "dynamic_chunk": 4096}


class LossConfig(SectionOptions):
    """How the loss is computed."""

    compute_mode: Literal["default", "chunk", "dynamic_chunk"] = "default"
    """default: from all logits at once; chunk: chunk_size positions of every sample at a time;
    dynamic_chunk: chunk_size tokens at a time for any batch size. With chunks, only one chunk of
    the logits is in memory at a time."""
    chunk_size: int | None = Field(default=None, ge=1)
    """Positions or tokens of a chunk; default 1024 positions or 4096 tokens."""
    loss_type: Literal["default", "per_token_loss", "per_sample_loss", "square_loss"] = "default"
    """default: mean over the tokens of a micro-batch; per_token_loss: over those of the whole
    step; per_sample_loss: over samples, each the mean of its tokens; square_loss: in between, a
    sample is weighted by the square root of its tokens."""
    router_aux_loss_coef: float = Field(default=0.0, ge=0.0)
    """Coefficient of the load-balancing loss of MoE models."""

    @property
    def chunk(self) -> int:
        """Positions or tokens of a chunk, in the chunked modes."""
        return self.chunk_size or CHUNKS[self.compute_mode]

    @model_validator(mode="after")
    def _chunk_is_used(self) -> "LossConfig":
        if self.chunk_size is not None and self.compute_mode == "default":
            raise ValueError("chunk_size is for compute_mode: chunk or dynamic_chunk")
        return self


class LoraConfig(SectionOptions):
    """Low-rank adapters by peft; everything else is frozen."""

    r: int = Field(default=8, ge=1)
    """Rank of the adapters."""
    alpha: int = Field(default=16, ge=1)
    """Scale of the adapter output, times r."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout before the adapters."""
    target_modules: tuple[str, ...] = Field(min_length=1)
    """Linear layers that get an adapter: patterns like
    model.language_model.layers.{*}.self_attn.q_proj, or the last part of their names, like
    q_proj."""

    def as_peft(self) -> dict[str, Any]:
        """Return the contents of peft's adapter_config.json, with target_modules as given."""
        return {
            "peft_type": "LORA",
            "r": self.r,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "target_modules": list(self.target_modules),
            "bias": "none",
        }


class SubmodelConfig(SectionOptions):
    """A part of the model; values of config.json are accepted and not needed."""

    freeze: bool = False
    """Do not train this part."""
    attn_implementation: str | None = None
    """Attention of this part."""
    attn_layout: str | None = None
    """Accepted, not needed."""


class ImageEncoderConfig(SectionOptions):
    """The image encoder."""

    vision_encoder: SubmodelConfig = SubmodelConfig()
    """The vision tower, without its projector."""
    vision_projector: SubmodelConfig = SubmodelConfig()
    """The projector into the embedding space of the decoder."""


class TextDecoderConfig(SubmodelConfig):
    """The text decoder; sizes are accepted and not needed: config.json has them."""

    num_layers: int | None = None
    """Accepted, not needed."""
    hidden_size: int | None = None
    """Accepted, not needed."""
    num_attention_heads: int | None = None
    """Accepted, not needed."""
    num_query_groups: int | None = None
    """Accepted, not needed."""
    ffn_hidden_size: int | None = None
    """Accepted, not needed."""
    max_position_embeddings: int | None = None
    """Accepted, not needed."""
    vocab_size: int | None = None
    """Accepted, not needed."""


class ModelConfig(SectionOptions):
    """The model, its source, and what of it is trained."""

    model_config = ConfigDict(protected_namespaces=())  # pydantic keeps "model_" for itself

    model_id: str | None = None
    """A class of ModelHub; default the class in config.json."""
    init_from_hf_path: str | None = None
    """Hugging Face folder with config.json and, unless the weights come from --load, weights."""
    trust_remote_code: bool = False
    """Run the Python files of that folder. Only for folders you would run yourself."""
    attn_implementation: str | None = None
    """Attention of transformers: eager, sdpa, flash_attention_2, ...; default its own choice."""
    fused_ops: bool | None = None
    """Use the operators of mindspeed for norms, SwiGLU and attention; default where the device has
    kernels for them. Modules that do not match an operator stay unchanged."""
    tie_word_embeddings: bool | None = None
    """Whether embedding and head are tied; default as in config.json. An untied head starts as a
    copy of the embedding."""
    freeze: tuple[str, ...] = ()
    """Modules that are not trained: patterns like model.visual.blocks.{0-15}."""
    image_encoder: ImageEncoderConfig = ImageEncoderConfig()
    """The image encoder."""
    text_decoder: TextDecoderConfig = TextDecoderConfig()
    """The text decoder."""
    loss_cfg: LossConfig = LossConfig()
    """How the loss is computed."""
    lora: LoraConfig | None = None
    """Train LoRA adapters only."""
    init_model_with_meta_device: bool = False
    """Build on the meta device, shard, then load weights: no rank ever holds the full model."""

    @field_validator("freeze")
    @classmethod
    def _are_patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            Pattern(text)
        return value

    def for_run(self, *, untied: bool, on_meta: bool) -> "ModelConfig":
        """Return these options with the flags of a run applied."""
        flags: dict[str, bool] = {}
        if untied:
            flags["tie_word_embeddings"] = False
        if on_meta:
            flags["init_model_with_meta_device"] = True
        return self.model_copy(update=flags)
