"""Options of a run from the command line, a YAML file or both."""

import argparse
from collections.abc import Callable, Sequence

from mindspeed.config import ConfigError, Spelling, add_options, read_options, suggest_flags
from mindspeed_llm.data.instruction import split_parts, split_weights
from mindspeed_llm.training.options import SECTIONS, RunOptions, TrainOptions

LARGEST = 1e18
"""What is beyond it, or not a number, is a slip."""
OTHER_NAMES = {"--no-pad-to-seq-lengths": "variable_seq_lengths"}
"""Flags that were renamed upstream, under the name that is not the field's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every flag of training."""
    add_options(parser, TrainOptions, SECTIONS)
    for flag, field in OTHER_NAMES.items():
        parser.add_argument(
            flag,
            dest=field,
            action="store_true",
            default=argparse.SUPPRESS,
            help=f"The same as --{field.replace('_', '-')}.",
        )


def from_arguments(namespace: argparse.Namespace) -> TrainOptions:
    """Build the options of training and check them."""
    options = read_options(namespace, TrainOptions)
    check(options)
    return options


def parse(argv: Sequence[str] | None = None) -> TrainOptions:
    """Read the options of a script's command line."""
    parser = argparse.ArgumentParser(description="Train a language model.", allow_abbrev=False)
    add_arguments(parser)
    suggest_flags(parser)
    return from_arguments(parser.parse_args(argv))


def check(options: TrainOptions) -> None:
    """Refuse what can never work, before anything is loaded."""
    if not options.data_path:
        raise ConfigError("--data-path is missing: give the --output-prefix of preprocess")
    check_run(options)
    if options.load is None and not options.from_scratch:
        raise ConfigError(
            "--load is missing: give a model or a checkpoint, or --from-scratch for random weights"
        )
    if options.bf16 and options.fp16:
        raise ConfigError("--bf16 and --fp16 exclude each other: drop one")
    split_weights(options.data_path)
    start, end = split_parts(options.split)[1]
    if options.eval_interval and options.eval_iters and start == end:
        raise ConfigError(
            f"--eval-interval {options.eval_interval}: --split {options.split} leaves no data to "
            "evaluate on: give a share, such as --split 98,2,0, or drop --eval-interval"
        )


def check_run(options: RunOptions) -> None:
    """Refuse a run of any kind that has no length or learning rate, or numbers out of range."""
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
    for name, (is_fine, wish) in RANGES.items():
        value = getattr(options, name, None)  # not every kind has all of them
        if value is not None and not (-LARGEST < value < LARGEST and is_fine(value)):
            raise ConfigError(f"{Spelling.FLAG.with_value(name, value)}: give {wish}")


def _ranges() -> dict[str, tuple[Callable[[float], bool], str]]:
    """Return which numbers options may be, beyond their types."""
    counts = ("micro_batch_size", "global_batch_size", "seq_length", "train_iters", "log_interval")
    counts += ("save_interval", "keep_last", "pad_to_multiple_of", "eval_interval", "workers")
    counts += ("max_nan_iterations", "distributed_timeout_minutes", "n_subs")
    counts += ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    counts += ("expert_model_parallel_size", "make_vocab_size_divisible_by")
    positive = ("lr", "epochs", "adam_eps", "loss_scale", "initial_loss_scale", "min_loss_scale")
    positive += ("loss_scale_window", "init_method_std", "norm_epsilon", "rotary_base")
    not_negative = ("weight_decay", "clip_grad", "min_lr", "lr_warmup_iters", "lr_warmup_init")
    not_negative += ("eval_iters", "seed", "hysteresis")
    shares = ("attention_dropout", "hidden_dropout", "adam_beta1", "adam_beta2", "sgd_momentum")
    shares += ("lr_warmup_fraction", "lora_dropout")
    return (
        dict.fromkeys(counts, (lambda value: value >= 1, "1 or more"))
        | dict.fromkeys(positive, (lambda value: value > 0, "a number above 0"))
        | dict.fromkeys(not_negative, (lambda value: value >= 0, "0 or more"))
        | dict.fromkeys(shares, (lambda value: 0 <= value < 1, "a number from 0 to below 1"))
    )


RANGES = _ranges()
