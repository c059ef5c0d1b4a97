"""Options that every kind of training has: optimizer, schedule, checkpoints, log."""

from collections.abc import Callable
from typing import Literal

from mindspeed.config import ConfigError, Options, Spelling

LARGEST = 1e18
"""Numbers beyond this, and those that are not finite, are typing errors."""


class OptimizerOptions(Options):
    """AdamW or SGD."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """AdamW, or SGD with momentum."""
    weight_decay: float = 0.01
    """Decay of weights; biases and norms do not decay."""
    clip_grad: float = 1.0
    """Largest norm of the gradient; 0 for no limit."""
    adam_beta1: float = 0.9
    """Decay rate of the mean of gradients."""
    adam_beta2: float = 0.999
    """Decay rate of the mean of squared gradients."""
    adam_eps: float = 1e-8
    """Keeps Adam from dividing by zero."""
    sgd_momentum: float = 0.9
    """Momentum of SGD."""
    max_nan_iterations: int = 5
    """Stop after so many steps in a row whose loss or gradient is not finite; such steps change
    no weight."""


class ScheduleOptions(Options):
    """The length of the run and the learning rate over it."""

    train_iters: int | None = None
    """Steps."""
    epochs: float | None = None
    """Passes over the data, instead of --train-iters."""
    lr: float | None = None
    """Highest learning rate."""
    min_lr: float = 0.0
    """Lowest learning rate after the highest."""
    lr_decay_style: Literal["constant", "linear", "cosine", "WSD"] = "linear"
    """How the learning rate decays."""
    lr_decay_iters: int | None = None
    """Steps until it is lowest (default: all)."""
    lr_warmup_iters: int = 0
    """Steps until it is highest."""
    lr_warmup_fraction: float | None = None
    """The same as a share of --lr-decay-iters."""
    lr_warmup_init: float = 0.0
    """Learning rate at the start of the warm-up."""
    lr_wsd_decay_iters: int | None = None
    """Steps of the decay at the end, for WSD (default: a tenth)."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential"] = "linear"
    """Shape of that decay."""


class CheckpointOptions(Options):
    """Where weights are loaded from and checkpoints saved to."""

    load: str | None = None
    """Weights to start from: a Hugging Face model, a converted checkpoint in any layout, or a
    training checkpoint to resume from."""
    from_scratch: bool = False
    """Start from random weights; without it --load must hold weights."""
    save: str | None = None
    """Directory for checkpoints. If it holds one, the run resumes from it and ignores --load."""
    no_auto_resume: bool = False
    """Start from the beginning although --save holds a checkpoint, which will be replaced."""
    save_interval: int | None = None
    """Steps between checkpoints; one is also saved at the end."""
    async_save: bool = False
    """Continue training while a checkpoint is written; its tensors are copied first."""
    keep_last: int | None = None
    """Keep only so many of the newest checkpoints (default: all)."""
    finetune: bool = False
    """Load only the weights of --load: start with step 0 and a new optimizer."""
    no_verify: bool = False
    """Do not compare the files that are loaded with the digests written beside them."""
    no_load_optim: bool = False
    """Do not load the optimizer's state."""
    no_save_optim: bool = False
    """Do not save it: smaller checkpoints, but resuming from them resets Adam."""
    seed: int = 1234
    """Seed of new weights, the order of samples and dropout."""


class LogOptions(Options):
    """What is logged, where and how often."""

    log_interval: int = 1
    """Steps between lines."""
    log_file: str | None = None
    """The same numbers as lines of JSON (default: log.jsonl in --save)."""
    tensorboard_dir: str | None = None
    """The same numbers for TensorBoard."""
    report_to: tuple[Literal["tensorboard", "wandb", "none"], ...] = ()
    """Trackers that get the same numbers: tensorboard (in --tensorboard-dir, else in --save) and
    wandb, which has to be installed."""
    eval_interval: int | None = None
    """Steps between evaluations on the validation data."""
    eval_iters: int = 0
    """Steps of one evaluation; 0 for none."""


class RunOptions(LogOptions, CheckpointOptions, ScheduleOptions, OptimizerOptions):
    """Options of any training run."""


def check_run(options: RunOptions) -> None:
    """Raise ConfigError if the length or the learning rate is missing, or a number out of range."""
    if options.lr is None:
        raise ConfigError("--lr is missing: give the highest learning rate, such as 1e-5")
    if (options.train_iters is None) == (options.epochs is None):
        raise ConfigError("give one of --train-iters and --epochs: the length of the run")
    if options.eval_interval and "eval_iters" not in options.model_fields_set:
        raise ConfigError(
            f"--eval-interval {options.eval_interval}: give --eval-iters too, the steps of one "
            "evaluation"
        )
    if options.eval_iters and not options.eval_interval:
        raise ConfigError(
            f"--eval-iters {options.eval_iters}: give --eval-interval too, the steps between "
            "evaluations"
        )
    for name in ("save", "log_file", "tensorboard_dir"):
        if getattr(options, name) == "":  # as from an unset variable of a shell
            flag = Spelling.FLAG.name_of(name)
            raise ConfigError(f"{flag} is empty: give a path, or leave it out")
    from mindspeed.training.trackers import check_trackers

    check_trackers(options)
    for name, (is_allowed, allowed) in RANGES.items():
        value = getattr(options, name, None)  # not every suite has all of them
        if value is None or (-LARGEST < value < LARGEST and is_allowed(value)):
            continue
        if is_allowed(value):
            allowed += f" that is smaller than {LARGEST:g}"
        raise ConfigError(f"{Spelling.FLAG.with_value(name, value)}: give {allowed}")


def check_precision(bf16: bool, fp16: bool) -> None:
    """Raise ConfigError if a run would compute in two precisions."""
    if bf16 and fp16:
        raise ConfigError("--bf16 and --fp16 exclude each other: drop one")


def _ranges() -> dict[str, tuple[Callable[[float], bool], str]]:
    """Return which values options may have, beyond their types."""
    counts: tuple[str, ...] = ("micro_batch_size", "global_batch_size", "seq_length")
    counts += ("train_iters", "log_interval", "lr_decay_iters", "lr_wsd_decay_iters")
    counts += ("save_interval", "keep_last", "pad_to_multiple_of", "eval_interval", "workers")
    counts += ("max_nan_iterations", "distributed_timeout_minutes", "n_subs")
    counts += ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    counts += ("expert_model_parallel_size", "make_vocab_size_divisible_by")
    positive: tuple[str, ...] = ("lr", "epochs", "adam_eps", "loss_scale", "initial_loss_scale")
    positive += ("min_loss_scale",)
    positive += ("loss_scale_window", "init_method_std", "norm_epsilon", "rotary_base")
    not_negative: tuple[str, ...] = ("weight_decay", "clip_grad", "min_lr", "lr_warmup_iters")
    not_negative += ("lr_warmup_init", "num_workers")
    not_negative += ("eval_iters", "seed", "hysteresis")
    fractions: tuple[str, ...] = ("attention_dropout", "hidden_dropout", "adam_beta1")
    fractions += ("adam_beta2", "sgd_momentum")
    fractions += ("lr_warmup_fraction", "lora_dropout")
    return (
        dict.fromkeys(counts, (lambda value: value >= 1, "1 or more"))
        | dict.fromkeys(positive, (lambda value: value > 0, "a number above 0"))
        | dict.fromkeys(not_negative, (lambda value: value >= 0, "0 or more"))
        | dict.fromkeys(fractions, (lambda value: 0 <= value < 1, "a number from 0 to below 1"))
    )


RANGES = _ranges()
