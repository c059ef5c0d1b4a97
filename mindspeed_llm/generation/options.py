"""Typed options of text generation, in sections."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mindspeed.config import ConfigError, Options, Spelling, one_of
from mindspeed.features.registry import registry
from mindspeed.training.options import check_precision
from mindspeed_llm.training.architecture_options import ArchitectureOptions
from mindspeed_llm.training.options import AcceptedOptions, ModelOptions, TrainOptions

Task = Literal["greedy", "do_sample", "beam_search", "beam_search_with_sampling", "chat"]


class PromptOptions(Options):
    """What to continue, and where the answers go."""

    task: tuple[Task, ...] = ()
    """How to answer; several are done in turn (default: greedy where there are prompts, else
    chat)."""
    prompt: tuple[str, ...] = ()
    """Texts to continue; with a template, questions to answer."""
    prompts: str | None = None
    """File with one prompt a line (.txt) or an object with "prompt" a line (.jsonl)."""
    output: str | None = None
    """File for the answers, one object a line (.jsonl)."""
    batch_size: int = 8
    """Prompts that a copy of the model answers at the same time."""


class SamplingOptions(Options):
    """How each next token is chosen, and where an answer ends."""

    max_new_tokens: int = 128
    """Longest answer, in tokens."""
    max_length: int | None = None
    """Longest prompt and answer together (default: what the model is meant for)."""
    temperature: float = 0.7
    """Divides the logits before sampling; 0 always takes the best token."""
    top_k: int = 50
    """Sample among so many of the best tokens; 0 for all."""
    top_p: float = 0.95
    """Sample among the best tokens that together have this probability."""
    seed: int = 1234
    """Fixes what is sampled; a prompt is answered alike in every batch."""
    num_beams: int = 2
    """Answers that beam search follows at a time."""
    length_penalty: float = 1.0
    """Power of the length by which beam search divides scores: above 0 favours long answers."""
    early_stopping: bool = False
    """End beam search as soon as it has --num-beams whole answers."""
    add_eos_token: tuple[str, ...] = ()
    """More tokens that end an answer, beside the model's own and the template's."""
    use_kv_cache: bool = True
    """Keep the keys and values of what was read; without it every token reads all again."""


class ConversationOptions(Options):
    """How questions are put to the model."""

    prompt_type: str | None = None
    """Template of the questions, or tokenizer for the tokenizer's own (chat: the default)."""
    prompt_type_path: str | None = None
    """File of templates (default: configs/finetune/templates.json)."""
    hf_chat_template: bool = False
    """The same as --prompt-type tokenizer."""
    enable_thinking: Literal["true", "false", "none"] = "none"
    """Whether a template with thoughts asks for them (none: as the template does)."""
    system: str = ""
    """What stands in front of every conversation (default: the template's own)."""
    history_turns: int = 3
    """Earlier questions and answers that the model sees while talking."""


class CheckpointOptions(Options):
    """The weights, the tokenizer, and the ranks that share the model."""

    load: str | None = None
    """A Hugging Face model, a converted checkpoint in any layout, or a training checkpoint."""
    no_verify: bool = False
    """Do not compare the weights with the digests written beside them."""
    tokenizer_name_or_path: str | None = None
    """Folder of the tokenizer, or a .gguf file (default: the one beside the weights)."""
    tensor_model_parallel_size: int = 1
    """Ranks that share each layer's matrices."""
    pipeline_model_parallel_size: int = 1
    """Ranks that hold consecutive layers."""
    expert_model_parallel_size: int = 1
    """Ranks that share the experts of a layer."""
    expert_tensor_parallel_size: int | None = None
    """Ranks that share each expert's matrices. Default: --tensor-model-parallel-size."""
    distributed_timeout_minutes: int = 10
    """How long ranks wait for each other; while a question is typed, without limit."""


class ScriptOptions(AcceptedOptions):
    """Accepted without effect."""

    micro_batch_size: int | None = None
    """Accepted for existing scripts: see --batch-size."""
    seq_length: int | None = None
    """Accepted for existing scripts: see --max-length."""
    no_load_optim: bool = False
    """Accepted for existing scripts: the optimizer is never loaded."""
    no_gradient_accumulation_fusion: bool = False
    """Accepted for existing scripts: there are no gradients."""
    moe_grouped_gemm: bool = False
    """Accepted for existing scripts: experts are multiplied in one grouped GEMM without it."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = "alltoall"
    """Accepted for existing scripts: tokens reach their experts by all-to-all."""
    moe_router_load_balancing_type: str | None = None
    """Accepted for existing scripts: there is no auxiliary loss."""
    moe_aux_loss_coeff: float | None = None
    """Accepted for existing scripts: there is no auxiliary loss."""
    moe_z_loss_coeff: float | None = None
    """Accepted for existing scripts: there is no z-loss."""


SECTIONS = (
    PromptOptions,
    SamplingOptions,
    ConversationOptions,
    CheckpointOptions,
    ModelOptions,
    ArchitectureOptions,
    ScriptOptions,
)

if TYPE_CHECKING:
    FeatureOptions = Options
else:  # the switches of mindspeed's features (--use-fused-rmsnorm and the like)
    FeatureOptions = registry().options_class


class GenerateOptions(
    PromptOptions,
    SamplingOptions,
    ConversationOptions,
    CheckpointOptions,
    ModelOptions,
    ArchitectureOptions,
    ScriptOptions,
    FeatureOptions,
):
    """All options of generation."""


NOT_SHARED = {
    *("prompt_type", "prompt_type_path"),
    *(ScriptOptions.model_fields.keys() - AcceptedOptions.model_fields.keys()),
}
"""Options that mean something else here, or nothing."""


def as_training(options: Options) -> TrainOptions:
    """Return the options of a training run whose model and layout are the same."""
    shared = options.model_fields_set & TrainOptions.model_fields.keys() - NOT_SHARED
    values = {name: getattr(options, name) for name in shared}
    return TrainOptions(**values | {"no_gradient_accumulation_fusion": True})


def check(options: GenerateOptions) -> None:
    """Raise ConfigError for invalid options before anything is loaded."""
    if options.load is None:
        raise ConfigError("--load is missing: give a model or a checkpoint")
    if options.hf_chat_template and options.prompt_type not in (None, "tokenizer"):
        raise ConfigError("--hf-chat-template and --prompt-type exclude each other: drop one")
    check_precision(options.bf16, options.fp16)
    if options.output is not None and not can_be_written(Path(options.output)):
        raise ConfigError(
            f"--output {options.output}: give a file name in a folder that can be written"
        )
    lowest = {"max_new_tokens": 1, "max_length": 1, "num_beams": 1, "batch_size": 1}
    lowest |= {"temperature": 0, "top_k": 0, "history_turns": 0}
    for name, limit in lowest.items():
        value = getattr(options, name)
        if value is not None and not value >= limit:
            spelled = Spelling.FLAG.with_value(name, value)
            raise ConfigError(f"{spelled} is too small: give {limit} or more")
    if not 0 < options.top_p <= 1:
        raise ConfigError(f"--top-p {options.top_p:g}: give a probability above 0, up to 1")


SAMPLED: tuple[Task, ...] = ("do_sample", "beam_search_with_sampling", "chat")
SEARCHED: tuple[Task, ...] = ("beam_search", "beam_search_with_sampling")
USED_BY: dict[str, tuple[Task, ...]] = {
    **dict.fromkeys(("temperature", "top_k", "top_p"), SAMPLED),
    **dict.fromkeys(("num_beams", "length_penalty", "early_stopping"), SEARCHED),
    "history_turns": ("chat",),
}
"""Which tasks read an option."""


def in_vain(options: GenerateOptions, tasks: Sequence[Task]) -> Iterator[str]:
    """Yield what is to be said about options that were given and that no task reads."""
    has_template = options.hf_chat_template or options.prompt_type or "chat" in tasks
    for name in ("system", "enable_thinking"):
        if getattr(options, name) not in ("", "none") and not has_template:
            yield (
                f"{Spelling.FLAG.name_of(name)}: no effect on prompts without a template: give "
                "--hf-chat-template or --prompt-type"
            )
    for name, users in USED_BY.items():
        is_given = name in options.model_fields_set
        is_greedy = name == "temperature" and options.temperature == 0
        if is_given and not is_greedy and not set(users) & set(tasks):
            yield (
                f"{Spelling.FLAG.name_of(name)}: no effect with --task {' '.join(tasks)}: "
                f"{one_of(users)} would read it"
            )


def can_be_written(path: Path) -> bool:
    """Return whether a file can be written here, or replaced."""
    return path.parent.is_dir() and not path.is_dir() and os.access(path.parent, os.W_OK)
