"""Typed options of post-training on sampled completions: --stage trl_ppo and grpo."""

from mindspeed.config import ConfigError, Options, Spelling
from mindspeed.training.stages import ONLINE
from mindspeed_llm.losses.kinds import GrpoLoss, RatioLevel
from mindspeed_llm.training.preference_options import NOT_NEGATIVE, POSITIVE, Check


class RewardOptions(Options):
    """Where the rewards of --stage trl_ppo and grpo come from."""

    reward_fn: str | None = None
    """Function that computes rewards, as path.py:function; the file is run. It is called with the
    lists prompts and completions, and with a list for every other field of the records."""
    reward_timeout: float = 60.0
    """Seconds that the function may take for the completions of a step."""
    reward_model: str | None = None
    """Reward model: a checkpoint of --stage orm, or a Hugging Face sequence-classification model
    of a supported family with the policy's tokenizer."""
    missing_eos_penalty: float = 0.0
    """Subtracted from the reward of a completion that does not end before its limit."""


class RolloutOptions(Options):
    """How --stage trl_ppo and grpo sample completions and train on them; a step is one rollout of
    --global-batch-size prompts, and --micro-batch-size completions are trained in one pass."""

    max_prompt_length: int = 512
    """Longest prompt, in tokens; of data files longer ones are left out."""
    max_new_tokens: int = 128
    """Longest completion, in tokens."""
    max_length: int | None = None
    """Longest prompt and completion together (default: what the model is meant for)."""
    temperature: float = 1.0
    """Divides the logits, where completions are sampled and where they are trained."""
    top_k: int = 0
    """Sample among so many of the best tokens; 0 for all."""
    top_p: float = 1.0
    """Sample among the best tokens that together have this probability."""
    rollout_batch_size: int | None = None
    """Prompts that a rank completes at a time (default: all of a step)."""
    rollout_engine: str | None = None
    """Function that makes another engine to sample with, as path.py:function; the file is run. It
    is called with the policy, and returns an object that has the method generate."""
    log_completions: int = 0
    """Completions of each step that are written to completions.jsonl in --save, with their prompts
    and rewards."""
    ppo_epochs: int = 1
    """Passes over the completions of a step."""
    num_mini_batches: int = 1
    """Updates in one pass, each on an equal part of the completions."""
    clip_ratio: float = 0.2
    """How far from 1 the ratio of new to old probabilities may go."""
    clip_ratio_high: float | None = None
    """How far above 1 it may go (default: --clip-ratio)."""
    entropy_coeff: float | None = None
    """Weight of the entropy in the loss (default: 0.001 with --stage trl_ppo, 0 with grpo)."""


class PpoOptions(Options):
    """--stage trl_ppo."""

    critic_model: str | None = None
    """Weights of the critic, as --load takes them (default: those of --load, with a new head)."""
    kl_coef: float = 0.3
    """Weight of the divergence from the reference in the rewards; 0 for none."""
    kl_target: float | None = None
    """Divergence a token to which --kl-coef is adapted, step by step."""
    kl_horizon: float = 10.0
    """How slowly it is adapted: a step changes it by at most a fifth, divided by this."""
    gamma: float = 1.0
    """Discount of rewards of later tokens."""
    lam: float = 0.95
    """Decay of advantages of later tokens (GAE)."""
    cliprange_value: float = 0.2
    """How far the value of a token may move from the one before the update."""


class GrpoOptions(Options):
    """--stage grpo."""

    num_generations: int = 8
    """Completions of every prompt, which are compared with each other."""
    grpo_beta: float = 0.0
    """Weight of the divergence from the reference in the loss; 0 for none, without reference."""
    grpo_loss_type: GrpoLoss = "grpo"
    """Mean over tokens: of each completion (grpo), of all (dapo), or by --max-new-tokens
    (dr_grpo)."""
    no_scale_rewards: bool = False
    """Do not divide advantages by the standard deviation of rewards."""
    importance_sampling_level: RatioLevel = "token"
    """Ratio of new to old probabilities that is clipped: that of each token, or for all tokens of a
    completion the geometric mean of theirs (GSPO; use a --clip-ratio of about 3e-4)."""
    mask_truncated_completions: bool = False
    """Do not train completions that reach their limit without an end; they stay in their groups."""


class AcceptedRolloutOptions(Options):
    """Accepted without effect."""

    do_sample: bool = False
    """Accepted for existing scripts: completions are always sampled."""


ROLLOUT_SECTIONS = (RewardOptions, RolloutOptions, PpoOptions, GrpoOptions)


class OnlineOptions(AcceptedRolloutOptions, GrpoOptions, PpoOptions, RolloutOptions, RewardOptions):
    """The options of all stages that train on sampled completions."""


COUNT: Check = (lambda value: value >= 1, "1 or more")
SHARE: Check = (lambda value: 0 <= value <= 1, "a number from 0 to 1")
RANGES: dict[str, Check] = {
    **dict.fromkeys(("max_prompt_length", "max_new_tokens", "max_length"), COUNT),
    **dict.fromkeys(("rollout_batch_size", "ppo_epochs", "num_mini_batches"), COUNT),
    **dict.fromkeys(("temperature", "reward_timeout", "kl_target", "kl_horizon"), POSITIVE),
    **dict.fromkeys(
        ("top_k", "log_completions", "clip_ratio", "clip_ratio_high", "kl_coef"), NOT_NEGATIVE
    ),
    **dict.fromkeys(("grpo_beta", "cliprange_value", "entropy_coeff"), NOT_NEGATIVE),
    "missing_eos_penalty": NOT_NEGATIVE,
    **dict.fromkeys(("gamma", "lam"), SHARE),
    "top_p": (lambda value: 0 < value <= 1, "a probability above 0, up to 1"),
    "num_generations": (lambda value: value >= 2, "2 or more"),
}
LARGEST = 1e18


def check_rollouts(options: OnlineOptions, stage: str, timeout_minutes: float) -> None:
    """Raise ConfigError for a number out of range, and for what is missing or of no use."""
    for name, (is_allowed, allowed) in RANGES.items():
        value = getattr(options, name)
        if value is not None and not (value < LARGEST and is_allowed(value)):
            raise ConfigError(f"{Spelling.FLAG.with_value(name, value)}: give {allowed}")
    if stage not in ONLINE:
        return
    sources = [name for name in ("reward_fn", "reward_model") if getattr(options, name) is not None]
    if not sources:
        raise ConfigError(
            f"--reward-fn is missing: --stage {stage} needs rewards: give --reward-fn "
            "path.py:function or --reward-model"
        )
    if options.rollout_engine is not None and options.rollout_batch_size is not None:
        raise ConfigError(
            f"--rollout-batch-size {options.rollout_batch_size}: has no effect with "
            "--rollout-engine, which gets all prompts of a step: drop one"
        )
    weight = "kl_coef" if stage == "trl_ppo" else "grpo_beta"
    for name in ("ref_model", "kl_target"):
        if getattr(options, name) is not None and not getattr(options, weight):
            unused = Spelling.FLAG.with_value(name, getattr(options, name))
            raise ConfigError(
                f"{unused}: has no effect with {Spelling.FLAG.with_value(weight, 0)}: drop it, or "
                "give a weight above 0"
            )
    if len(sources) > 1:
        raise ConfigError("--reward-fn and --reward-model exclude each other: drop one")
    if options.reward_timeout >= 60 * timeout_minutes:
        raise ConfigError(
            f"--reward-timeout {options.reward_timeout:g}: other ranks wait for "
            f"--distributed-timeout-minutes {timeout_minutes:g}: raise that, or give less seconds"
        )
