"""A payload: a change to one input, and the commands that read that input."""

from collections.abc import Callable
from dataclasses import dataclass

Poison = Callable[[str], object]
"""Changes the inputs in the current folder; its argument is the canary."""
MCORE = ("convert mcore", "convert mcore layout", "posttrain mcore", "generate mcore")
SAVED = ("convert saved", "posttrain saved", "posttrain resume", "posttrain finetune")
SAVED += ("pretrain saved", "generate saved")
MM_SAVED = ("mm resume", "mm load", "mm convert dcp")
LORA = ("export-lora", "export-lora merge")
HF = ("convert hf", "posttrain hf", "pretrain hf", "generate hf", "chat")
MM_HF = ("mm convert hf", "mm train")
TOKENIZER = ("preprocess", "preprocess qwen")
HF_TOKENIZER = ("generate prompts", "chat", "posttrain raw")
TOKENS = ("posttrain hf", "show-batch")
DOCUMENTS = ("pretrain hf", "merge")
YAML = ("preprocess yaml", "convert yaml", "posttrain yaml", "pretrain yaml", "generate yaml")
YAML += ("chat yaml", "mm convert yaml", "mm train", "mm plan", "report", "enable")


@dataclass(frozen=True)
class Payload:
    """A change to one input."""

    name: str
    changed: tuple[str, ...]
    """The inputs that are changed, and so copied."""
    named: str
    """What the error has to name: the file, or the folder that was given where it is one of many
    that transformers reads."""
    commands: tuple[str, ...]
    poison: Poison
    is_harmless: bool = False
    """Whether the command may do its work: what was put there has no meaning to it."""
