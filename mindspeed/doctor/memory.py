"""What a run needs, part by part, and what would make it fit: from its flags or its YAML file."""

from __future__ import annotations

import argparse
import ast
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindspeed.config import (
    ConfigError,
    Spelling,
    add_flags,
    flag_name,
    from_namespace,
    parse_json,
)
from mindspeed.config.suggest import misspelt
from mindspeed.config.yaml_file import read_yaml
from mindspeed.distributed.parallel_dims import check_model
from mindspeed.features.base import Context
from mindspeed.features.registry import registry
from mindspeed.features.selection import accepts, select
from mindspeed.training.expert_options import (
    ExpertOptions,
    check_has_no_experts,
    check_shared_sequence,
)
from mindspeed.training.options import check_precision
from mindspeed.training.stages import OPTIONS, Stage, check_read, stage_named
from mindspeed.tune.memory_model import (
    Changes,
    MemoryModel,
    as_flags,
    best_savings,
    fitting,
    in_gib,
)
from mindspeed.tune.run_memory import NEEDED, memory_model
from mindspeed.tune.run_sizes import RunSizes

MODEL_FOLDERS = ("hf_cfg_dir", "load")
HUGGING_FACE = {
    "num_layers": ("num_hidden_layers",),
    "hidden_size": ("hidden_size",),
    "ffn_hidden_size": ("intermediate_size",),
    "num_attention_heads": ("num_attention_heads",),
    "num_query_groups": ("num_key_value_heads",),
    "kv_channels": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "moe_router_topk": ("num_experts_per_tok",),
    "moe_ffn_hidden_size": ("moe_intermediate_size",),
}
"""Megatron's names, and those in the config.json of a Hugging Face model."""
DEFAULT_LORA_RANK = 16
"""Rank of adapters that are loaded, where it is not given."""


class RunOptions(RunSizes):
    """The sizes of a run, where its model is, and what of it is trained beside which others."""

    hf_cfg_dir: str | None = None
    load: str | None = None
    stage: str = "sft"
    lora_r: int | None = None
    lora_load: str | None = None
    lora_train_router: bool = False
    ref_model: str | None = None
    precompute_ref_log_probs: bool = False

    @property
    def lora_rank(self) -> int:
        """The rank of the adapters, 0 without any."""
        return self.lora_r or (DEFAULT_LORA_RANK if self.lora_load else 0)

    @property
    def keeps_reference(self) -> bool:
        """Whether a reference is in memory beside the policy.

        It is not where it is the policy without its adapters, or freed before the first step.
        """
        is_policy = self.lora_rank and not self.lora_train_router and self.ref_model is None
        return not (is_policy or self.precompute_ref_log_probs)


@dataclass(frozen=True)
class Fit:
    """The memory of a run, and what would change it."""

    model: MemoryModel
    available: int
    best: Sequence[tuple[Changes, int]]
    changes: Changes
    smaller: MemoryModel
    """The run with these changes: those that make it fit, or all that save something."""
    unread: Sequence[str]
    """Words of the run that say nothing about memory, or that are not known here."""
    uncounted: str = ""
    """What the run keeps in memory and no formula has."""

    @property
    def fits(self) -> bool | None:
        """Whether the run fits as it is; None where what is not counted decides."""
        is_within = self.model.total() <= self.available
        return None if is_within and self.uncounted else is_within

    def lines(self) -> list[str]:
        """Return the section of the report."""
        parts = {**self.model.parts(), "sum": self.model.total(), "device": self.available}
        width = max(map(len, parts))
        lines = [f"memory of a rank, first pipeline stage, for {self.model.batch}:"]
        lines += [f"  {name:<{width}}  {in_gib(size):>10}" for name, size in parts.items()]
        if self.best:
            lines.append("what would save most:")
            lines += [f"  {in_gib(size):>10}  {as_flags(changes)}" for changes, size in self.best]
        lines.append(self._verdict())
        if self.unread:
            lines.append(f"not read, since no formula has them: {' '.join(self.unread)}")
        return lines

    def as_record(self) -> dict[str, Any]:
        """Return the section as values."""
        return {
            "parts": self.model.parts(),
            "total": self.model.total(),
            "available": self.available,
            "fits": self.fits,
            "uncounted": self.uncounted,
            "savings": [{"flags": as_flags(each), "bytes": size} for each, size in self.best],
            "changed": {"flags": as_flags(self.changes), "total": self.smaller.total()},
        }

    def _verdict(self) -> str:
        if self.fits:
            return "fits"
        if self.fits is None:
            left = in_gib(self.available - self.model.total())
            return f"fits only if {left} are enough for what is not counted: {self.uncounted}"
        if not self.changes:
            return "does not fit, and no flag would save anything: use more ranks"
        needs = f"{in_gib(self.smaller.total())} with {as_flags(self.changes)}"
        if self.smaller.total() <= self.available:
            besides = f", but for {self.uncounted}" if self.uncounted else ""
            return f"does not fit; would fit{besides}: {needs}"
        return f"does not fit, not even with every flag that saves something: {needs}"


def examine(words: Sequence[str], available: int, device_name: str | None = None) -> Fit:
    """Return what a run needs; `words` are its flags, after the name of a YAML file if it has one.

    ConfigError is raised for sizes that are missing and for what the run would refuse: by its
    features, a stage that there is not, options of another stage, options of experts on a dense
    model, two precisions.
    """
    known, parser = registry(), _parser()
    has_file = bool(words) and not words[0].startswith("-")
    others = _take_file(parser, words[0]) if has_file else {}
    namespace, rest = parser.parse_known_args(words[has_file:])
    others |= _named(rest)
    _check_spelling(parser, others)
    options = from_namespace(known.options_class, namespace)
    run = from_namespace(RunOptions, namespace)
    stage = stage_named(run.stage)
    check_read({**others, **dict(run)}, run.stage)
    check_precision(run.bf16, run.fp16)
    arguments = {**others, **vars(namespace), **dict(run)}
    if arguments.get("multi_latent_attention"):
        raise ConfigError(
            "--multi-latent-attention: latent attention has no formula here: drop it for the "
            "memory of a model with attention of full width"
        )
    for name, value in _model_sizes(run).items():
        if not arguments.get(name):
            arguments[name] = value
    if missing := [name for name in NEEDED if not arguments.get(name)]:
        raise ConfigError(
            f"--memory: {', '.join(map(flag_name, missing))} missing: give the flags of the run, "
            "or its YAML file; --load or --hf-cfg-dir with a config.json gives the sizes of a model"
            f"{_without_config(run)}"
        )
    _check_sizes(arguments)
    context = Context(Spelling.FLAG, megatron=arguments, device=device_name)
    try:
        select(known, options, context)
    except TypeError as error:  # a number that is none, of a flag that is not declared here
        raise ConfigError(f"--memory: a value of the run is wrong: correct it ({error})") from None
    _check_experts(arguments, others)
    model = _run_memory(run, stage, arguments, device_name)
    would = functools.partial(accepts, known, options, context)
    changes, smaller = fitting(model, available, would)
    unread = list(map(flag_name, others))
    best = best_savings(model, would)
    return Fit(model, available, best, changes, smaller, unread, stage.uncounted)


def _check_experts(arguments: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Raise ConfigError for options that a model with, or without, experts refuses."""
    sizes = RunSizes.of(arguments)
    tp, pp = sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size
    check_model(
        world=max(sizes.world_size, tp * pp * sizes.context_parallel_size),
        tp=tp,
        pp=pp,
        cp=sizes.context_parallel_size,
        ep=sizes.expert_model_parallel_size,
        etp=sizes.expert_tensor_parallel_size,
        num_experts=sizes.num_experts or 0,
    )
    if sizes.num_experts:
        check_shared_sequence(tp, sizes.sequence_parallel)
    else:
        given = {name: others[name] for name in ExpertOptions.model_fields if name in others}
        check_has_no_experts(ExpertOptions.model_construct(**given))


def _run_memory(
    run: RunOptions, stage: Stage, arguments: dict[str, Any], device_name: str | None
) -> MemoryModel:
    """Return the memory of a run with its adapters, its reference and all rows of its samples."""
    if stage.has_value_head:
        arguments = arguments | {"untie_embeddings_and_output_weights": False}
    model = memory_model(arguments, device_name=device_name)
    has_frozen = stage.has_reference and run.keeps_reference
    adapters = RunSizes.of(arguments).adapter_parameters(run.lora_rank)
    count = model.num_parameters + adapters
    return replace(
        model,
        vocab_size=0 if stage.has_value_head else model.vocab_size,
        num_parameters=count,
        trained_fraction=adapters / count if adapters else 1.0,
        frozen_parameters=model.num_parameters if has_frozen else 0,
        micro_batch_size=model.micro_batch_size * stage.sequences,
    )


def _check_spelling(parser: argparse.ArgumentParser, others: Mapping[str, Any]) -> None:
    """Raise ConfigError for a slip of the keys: the estimate would be that of another run."""
    stages = [name for defaults in OPTIONS.values() for name in defaults]
    known = [action.dest for action in parser._actions] + stages
    for name in others:
        if name not in stages and (meant := misspelt(name, known)):
            raise ConfigError(
                f"--memory: {flag_name(name)} is not known: did you mean {flag_name(meant)}?"
            )


def _check_sizes(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for sizes, of flags or of a config.json, that no model has."""
    for name, info in RunOptions.model_fields.items():
        value = arguments.get(name)
        if value is None or info.annotation not in (int, int | None):
            continue
        if not isinstance(value, int) or not 0 < value < 2**40:
            raise ConfigError(f"{flag_name(name)} {value!r}: give a whole number above 0")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mindspeed doctor --memory", add_help=False, allow_abbrev=False
    )
    add_flags(parser, RunOptions)
    add_flags(parser, registry().options_class)
    return parser


def _take_file(parser: argparse.ArgumentParser, path: str) -> dict[str, Any]:
    """Make the values of a YAML file the defaults of flags; return those of no flag."""
    fields = {action.dest for action in parser._actions}
    given = {key.replace("-", "_"): value for key, value in read_yaml(path).items()}
    values = {key: value for key, value in given.items() if value is not None}  # the default
    parser.set_defaults(**{key: value for key, value in values.items() if key in fields})
    return {key: value for key, value in values.items() if key not in fields}


def _named(words: Sequence[str]) -> dict[str, Any]:
    """Return the values of flags that are not declared here, by name: features check some."""
    found: dict[str, list[Any]] = {}
    for word in words:
        if word.startswith("--"):
            flag, sign, value = word.partition("=")
            values = found.setdefault(flag.lstrip("-").replace("-", "_"), [])
            values[:] = [_literal(value)] if sign else []
        elif not found:
            raise ConfigError(f"--memory: {word!r} belongs to no flag: a YAML file comes first")
        else:
            values.append(_literal(word))
    return {
        name: values if len(values) > 1 else values[0] if values else True
        for name, values in found.items()
    }


def _literal(word: str) -> Any:
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


def _without_config(run: RunOptions) -> str:
    """Return, as the end of an error, which folders of the run have no config.json."""
    given = [(name, value) for name in MODEL_FOLDERS if (value := getattr(run, name))]
    found = [
        f"{flag_name(name)} {value} has none"
        for name, value in given
        if not (Path(value) / "config.json").is_file()
    ]
    return "".join(f"; {each}" for each in found)


def _model_sizes(run: RunOptions) -> Mapping[str, Any]:
    """Return the sizes in the config.json of the run's model, if it has one."""
    folders = [Path(given) for name in MODEL_FOLDERS if (given := getattr(run, name))]
    for path in (folder / "config.json" for folder in folders):
        if not path.is_file():
            continue
        try:
            content = parse_json(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read ({error})") from None
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: is no config of a model")
        if content.get("kv_lora_rank"):
            raise ConfigError(f"{path}: latent attention has no formula here: give sizes by flags")
        found = {
            ours: next((content[name] for name in theirs if content.get(name)), None)
            for ours, theirs in HUGGING_FACE.items()
        }
        # Every family that transformers has in this form is gated and shares keys among heads.
        is_tied = content.get("tie_word_embeddings", False)
        found |= {"untie_embeddings_and_output_weights": not is_tied}
        return found | {"swiglu": True, "group_query_attention": True}
    return {}
