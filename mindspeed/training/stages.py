"""The stages of post-training, and what each keeps in memory beside one model and its samples."""

from dataclasses import dataclass

from mindspeed.config import ConfigError, did_you_mean


@dataclass(frozen=True)
class Stage:
    """What a run of a stage has in memory that fine-tuning on answers has not."""

    sequences: int = 1
    """Sequences of a sample, which a micro-batch holds at once."""
    has_reference: bool = False
    """There is a frozen model of the same sizes, unless it is the policy without its adapters."""
    has_value_head: bool = False
    """The output layer makes one value of a token, not logits."""
    uncounted: str = ""
    """What else there is, which depends on more than the sizes of the model."""


STAGES = {
    "sft": Stage(),
    "dpo": Stage(sequences=2, has_reference=True),
    "simpo": Stage(sequences=2),
    "kto": Stage(has_reference=True),
    "orm": Stage(sequences=2, has_value_head=True),
    "prm": Stage(),
    "trl_ppo": Stage(uncounted="the critic, frozen models and the cache of sampling"),
    "grpo": Stage(uncounted="frozen models and the cache of sampling"),
}


def stage_named(name: str) -> Stage:
    """Return a stage; ConfigError for one that there is not."""
    if name not in STAGES:
        raise ConfigError(f"--stage {name} is not known; {did_you_mean(name, STAGES)}")
    return STAGES[name]
