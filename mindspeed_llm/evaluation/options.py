"""Typed options of an evaluation, in sections."""

from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed.config import ConfigError, Options, Spelling
from mindspeed.features.registry import registry
from mindspeed.training.options import check_precision
from mindspeed_llm.generation.options import CheckpointOptions, ScriptOptions, can_be_written
from mindspeed_llm.training.architecture_options import ArchitectureOptions
from mindspeed_llm.training.options import ModelOptions


class EvaluationOptions(Options):
    """What to ask the model, and where the scores go."""

    tasks: tuple[str, ...] = ()
    """Tasks and groups of lm-evaluation-harness by name, or .yaml files with one."""
    include_path: tuple[str, ...] = ()
    """Folders with tasks of your own (.yaml)."""
    trust_task_code: bool = False
    """Let tasks of your own run the Python functions that their files name."""
    num_fewshot: int | None = None
    """Examples in front of each question (default: as the task says)."""
    limit: int | None = None
    """Take the first questions of each task only: for a trial, scores differ."""
    batch_size: int = 8
    """Questions that a copy of the model answers at the same time."""
    max_length: int | None = None
    """Longest question and answer together (default: what the model is meant for)."""
    hf_chat_template: bool = False
    """Ask through the tokenizer's chat template, examples as turns: for models that chat."""
    system: str = ""
    """What stands in front of every question."""
    seed: int = 1234
    """Fixes which examples are shown and what is sampled."""
    output: str | None = None
    """File for the scores and the settings of each task (.json)."""
    samples: str | None = None
    """File for each question with what the model said, one object a line (.jsonl)."""


SECTIONS = (EvaluationOptions, CheckpointOptions, ModelOptions, ArchitectureOptions, ScriptOptions)

if TYPE_CHECKING:
    FeatureOptions = Options
else:  # the switches of mindspeed's features (--use-fused-rmsnorm and the like)
    FeatureOptions = registry().options_class


class EvaluateOptions(
    EvaluationOptions,
    CheckpointOptions,
    ModelOptions,
    ArchitectureOptions,
    ScriptOptions,
    FeatureOptions,
):
    """All options of an evaluation."""


def check(options: EvaluateOptions) -> None:
    """Raise ConfigError for invalid options before anything is loaded."""
    if options.load is None:
        raise ConfigError("--load is missing: give a model or a checkpoint")
    if not options.tasks:
        raise ConfigError("--tasks is missing: give names of tasks, or .yaml files")
    check_precision(options.bf16, options.fp16)
    for name in ("output", "samples"):
        path = getattr(options, name)
        if path is not None and not can_be_written(Path(path)):
            raise ConfigError(f"--{name} {path}: give a file name in a folder that can be written")
    if options.output is not None and options.samples is not None:
        if Path(options.output).resolve() == Path(options.samples).resolve():
            raise ConfigError(
                f"--output and --samples are both {options.output}: give two files, or one of them"
            )
    lowest = {"num_fewshot": 0, "limit": 1, "batch_size": 1, "max_length": 2}
    for name, limit in lowest.items():
        value = getattr(options, name)
        if value is not None and value < limit:
            spelled = Spelling.FLAG.with_value(name, value)
            raise ConfigError(f"{spelled} is too small: give {limit} or more")
