"""Whether the common prompt of a pair is computed once: decided before the model is built."""

from importlib.machinery import PathFinder

from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.training.options import TrainOptions

STAGES = ("dpo", "simpo", "orm")
DROPOUTS = ("attention_dropout", "hidden_dropout", "lora_dropout")


def shares_prompts(options: TrainOptions, shape: ModelConfig) -> bool:
    """Return whether the sequences of a pair share the rows of their prompt."""
    is_asked = options.stage in STAGES and not options.no_share_prompts
    return is_asked and why_not_shared(options, shape) is None


def why_not_shared(options: TrainOptions, shape: ModelConfig) -> str | None:
    """Return what needs whole sequences; None if nothing does."""
    # Experts count tokens for their loads, capacities and losses; a dropped element of a prompt
    # would be the same one in both sequences.
    reasons = {
        "--context-parallel-size": options.context_parallel_size > 1,
        "--transformer-impl local": options.transformer_impl == "local",
        "--schedules-method": options.schedules_method is not None,
        "dropout": any(getattr(options, name) for name in DROPOUTS),
        "a mixture of experts": shape.moe is not None,
        "latent attention": shape.mla is not None,
        "attention with sinks": shape.attention_sinks,
        "multi-token prediction": bool(shape.mtp_num_layers),
        "NVIDIA's transformer_engine": _has_other_engine(),
    }
    return next((name for name, is_there in reasons.items() if is_there), None)


def _has_other_engine() -> bool:
    return PathFinder.find_spec("transformer_engine") is not None
