"""Training adapters instead of weights."""

from typing import Literal

from mindspeed.config import Options

LORA_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


class LoraOptions(Options):
    """Low-rank adapters beside frozen weights; --lora-r or --lora-load switches them on."""

    lora_r: int | None = None
    """Rank of the adapters, such as 16; weights are frozen and only adapters are trained."""
    lora_alpha: float = 32
    """What an adapter adds is multiplied by this over the rank."""
    lora_dropout: float = 0.0
    """Share of an adapter's input that is dropped."""
    lora_target_modules: tuple[str, ...] = LORA_TARGETS
    """What gets adapters: Megatron's modules, or HF's such as q_proj and v_proj."""
    lora_load: str | None = None
    """Folder with adapters in peft's format to begin with; they have to fit the other options."""
    lora_fusion: bool = False
    """Accepted for existing scripts: the result is the same."""
    lora_register_forward_hook: tuple[Literal["word_embeddings", "input_layernorm"], ...] = ()
    """Accepted for existing scripts: gradients find their way without."""
