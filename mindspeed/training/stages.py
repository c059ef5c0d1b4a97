"""The stages of post-training: what each keeps in memory, and the options that it reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed.config import ConfigError, Spelling, did_you_mean


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


ELSEWHERE = {"ppo": "trl_ppo", "rm": "orm", "dapo": "grpo"}
"""Names of stages in other trainers, whose letters are nearer to another stage here."""


def stage_named(name: str) -> Stage:
    """Return a stage; ConfigError for one that there is not."""
    if name not in STAGES:
        meant = did_you_mean(ELSEWHERE.get(name.lower(), name), STAGES)
        raise ConfigError(f"--stage {name} is not known; {meant}")
    return STAGES[name]


ONLINE = ("trl_ppo", "grpo")
"""The stages that sample completions."""
OPTIONS: Mapping[tuple[str, ...], Mapping[str, Any]] = {
    ("dpo",): {
        "dpo_beta": 0.1,
        "dpo_loss_type": "sigmoid",
        "dpo_label_smoothing": 0.0,
        "precompute_ref_log_probs": False,
    },
    ("simpo",): {
        "simpo_beta": 2.5,
        "gamma_beta_ratio": 1.4,
        "simpo_loss_type": "sigmoid",
        "simpo_label_smoothing": 0.0,
    },
    ("kto",): {"kto_beta": 0.1, "kto_desirable_weight": 1.0, "kto_undesirable_weight": 1.0},
    ("dpo", "simpo"): {"pref_ftx": 0.0},
    ("dpo", "simpo", "orm"): {"no_share_prompts": False},
    ("dpo", "kto"): {"no_overlap_reference": False},
    ("dpo", "kto", *ONLINE): {"ref_model": None},
    ONLINE: {
        "reward_fn": None,
        "reward_timeout": 60.0,
        "reward_model": None,
        "missing_eos_penalty": 0.0,
        "max_prompt_length": 512,
        "max_new_tokens": 128,
        "max_length": None,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "rollout_batch_size": None,
        "rollout_engine": None,
        "log_completions": 0,
        "ppo_epochs": 1,
        "num_mini_batches": 1,
        "clip_ratio": 0.2,
        "clip_ratio_high": None,
        "entropy_coeff": None,
    },
    ("trl_ppo",): {
        "critic_model": None,
        "kl_coef": 0.3,
        "kl_target": None,
        "kl_horizon": 10.0,
        "gamma": 1.0,
        "lam": 0.95,
        "cliprange_value": 0.2,
    },
    ("grpo",): {
        "num_generations": 8,
        "grpo_beta": 0.0,
        "grpo_loss_type": "grpo",
        "no_scale_rewards": False,
        "importance_sampling_level": "token",
        "mask_truncated_completions": False,
    },
}
"""The stages that read options, and the defaults of these, which every stage accepts."""


def check_read(values: Mapping[str, Any], stage: str) -> None:
    """Raise ConfigError for an option that the stage does not read, unless it is the default."""
    for readers, defaults in OPTIONS.items():
        for name, default in defaults.items():
            value = values.get(name, default)
            if stage not in readers and value != default:
                flag, wanted = Spelling.FLAG, " and ".join(readers)
                given = flag.name_of(name) if value is True else flag.with_value(name, value)
                raise ConfigError(f"{given}: is for --stage {wanted}, not {stage}: drop it")
