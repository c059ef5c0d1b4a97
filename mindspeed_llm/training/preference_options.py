"""Typed options of post-training on preferences and rewards."""

from collections.abc import Callable

from mindspeed.config import ConfigError, Options, Spelling
from mindspeed.training.stages import check_read
from mindspeed_llm.losses.kinds import DpoLoss, SimpoLoss


class ReferenceOptions(Options):
    """The frozen reference of --stage dpo, kto, trl_ppo and grpo."""

    ref_model: str | None = None
    """Weights of the reference, as --load takes them (default: those of --load; with adapters the
    model without them, which takes no memory)."""
    precompute_ref_log_probs: bool = False
    """Compute the reference's log-probabilities of all samples once, keep them in --cache-dir, and
    train without the reference in memory (--stage dpo)."""
    no_overlap_reference: bool = False
    """Run the reference between two steps of the policy, instead of beside the step before on CUDA
    (--stage dpo and kto)."""


class PairOptions(Options):
    """Stages on pairs: --stage dpo, simpo and orm."""

    no_share_prompts: bool = False
    """Compute the common prompt of a pair for each of its sequences, instead of once."""


class DpoOptions(Options):
    """--stage dpo, and what --stage simpo shares with it."""

    dpo_beta: float = 0.1
    """How strongly the policy is kept near the reference."""
    dpo_loss_type: DpoLoss = "sigmoid"
    """The loss of a pair."""
    dpo_label_smoothing: float = 0.0
    """Share of pairs whose labels are expected to be wrong (sigmoid)."""
    pref_ftx: float = 0.0
    """Weight of the next-token loss of chosen completions in the loss; also with --stage simpo."""


class SimpoOptions(Options):
    """--stage simpo."""

    simpo_beta: float = 2.5
    """Scale of rewards, which are mean log-probabilities."""
    gamma_beta_ratio: float = 1.4
    """Margin of mean log-probabilities that the chosen completion is to have."""
    simpo_loss_type: SimpoLoss = "sigmoid"
    """The loss of a pair."""
    simpo_label_smoothing: float = 0.0
    """Share of pairs whose labels are expected to be wrong (sigmoid)."""


class KtoOptions(Options):
    """--stage kto."""

    kto_beta: float = 0.1
    """How strongly the policy is kept near the reference."""
    kto_desirable_weight: float = 1.0
    """Weight of desirable completions."""
    kto_undesirable_weight: float = 1.0
    """Weight of undesirable completions."""


class AcceptedStageOptions(Options):
    """Accepted without effect."""

    is_pairwise_dataset: bool = False
    """Accepted for existing scripts: the stage decides the kind of data."""
    refer_model_iter: int = 1
    """Accepted for existing scripts: --ref-model names the reference."""
    load_checkpoint_loosely: bool = False
    """Accepted for existing scripts: a value head that --load does not have is initialized."""
    no_post_layer_norm: bool = False
    """Known from existing scripts, and refused: reward models keep the norm before the head."""


PREFERENCE_SECTIONS = (ReferenceOptions, PairOptions, DpoOptions, SimpoOptions, KtoOptions)


class PreferenceOptions(
    AcceptedStageOptions, KtoOptions, SimpoOptions, DpoOptions, PairOptions, ReferenceOptions
):
    """The options of all stages that train on preferences."""


Check = tuple[Callable[[float], bool], str]
POSITIVE: Check = (lambda value: value > 0, "a number above 0")
NOT_NEGATIVE: Check = (lambda value: value >= 0, "0 or more")
HALF: Check = (lambda value: 0 <= value < 0.5, "a number from 0 to below 0.5")
LARGEST = 1e18
RANGES: dict[str, Check] = {
    **dict.fromkeys(("dpo_beta", "simpo_beta", "kto_beta"), POSITIVE),
    **dict.fromkeys(("pref_ftx", "gamma_beta_ratio"), NOT_NEGATIVE),
    **dict.fromkeys(("kto_desirable_weight", "kto_undesirable_weight"), NOT_NEGATIVE),
    **dict.fromkeys(("dpo_label_smoothing", "simpo_label_smoothing"), HALF),
}


def check_preferences(options: PreferenceOptions, stage: str) -> None:
    """Raise ConfigError for a number out of range, and for what a stage of any kind cannot use."""
    for name, (is_allowed, allowed) in RANGES.items():
        value = getattr(options, name)
        if not (value < LARGEST and is_allowed(value)):
            raise ConfigError(f"{Spelling.FLAG.with_value(name, value)}: give {allowed}")
    for prefix in ("dpo", "simpo"):
        kind = getattr(options, f"{prefix}_loss_type")
        smoothing = getattr(options, f"{prefix}_label_smoothing")
        if smoothing and kind != "sigmoid":
            raise ConfigError(
                f"--{prefix}-label-smoothing {smoothing:g}: is for --{prefix}-loss-type sigmoid, "
                f"not {kind}: drop one"
            )
    check_read(dict(options), stage)
    if options.no_post_layer_norm:
        raise ConfigError(
            "--no-post-layer-norm: the value head of a reward model follows the final norm, as in "
            "Hugging Face's classes, which read its export: drop it"
        )
    if options.no_overlap_reference and options.precompute_ref_log_probs:
        raise ConfigError(
            "--no-overlap-reference: has no effect with --precompute-ref-log-probs, which runs the "
            "reference before the first step: drop one"
        )
    if stage == "kto" and not options.kto_desirable_weight and not options.kto_undesirable_weight:
        raise ConfigError(
            "--kto-desirable-weight 0 and --kto-undesirable-weight 0: nothing would be trained: "
            "give one of them a weight above 0"
        )
