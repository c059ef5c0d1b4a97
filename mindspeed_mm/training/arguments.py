"""What a run is to do: from flags, from one YAML file, or both; a flag wins over the file."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mindspeed.config import ConfigError, Options, Spelling, add_options, build, suggest_flags
from mindspeed.config.suggest import nearest
from mindspeed.config.yaml_file import read_yaml
from mindspeed.fsdp import FsdpOptions
from mindspeed_mm.data.options import DataConfig
from mindspeed_mm.models.options import ModelConfig
from mindspeed_mm.training.checks import check
from mindspeed_mm.training.options import SECTIONS, MmOptions
from mindspeed_mm.training.sections import Sections, make_section, read_section
from mindspeed_mm.training.tool import ToolConfig

ExtraArguments = Callable[[argparse.ArgumentParser], argparse.ArgumentParser | None]

FLAGS_IN_FILE = ("training", "gpt_args")
"""Entries of the one file that hold flags, as deeply nested as their writer likes."""
FILES = {"model": "mm_model", "data": "mm_data", "tool": "mm_tool"}
"""Entries of the one file that are sections, and the flags that name a file for each."""
FSDP2 = "fsdp2_config"
OLD_TOOL = "MM_TOOL_PATH"


@dataclass(frozen=True)
class Run:
    """What a run is to do."""

    options: MmOptions
    fsdp: FsdpOptions
    mm: Sections
    extra: dict[str, Any] = field(default_factory=dict)
    """Arguments that the script added itself."""


@dataclass(frozen=True)
class Schema:
    """What the sections of a script may hold; None leaves one unchecked."""

    model: type[Options] | None = ModelConfig
    data: type[Options] | None = DataConfig
    tool: type[Options] | None = ToolConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file and every flag of training."""
    add_options(parser, MmOptions, SECTIONS)
    parser.usage = "%(prog)s [FILE.yaml] [flags]"
    parser.add_argument("file", nargs="?", metavar="FILE.yaml", help="the same as --config")


def parse(
    argv: Sequence[str] | None = None,
    *,
    extra_args_provider: ExtraArguments | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    schema: Schema | None = None,
) -> Run:
    """Read what a script's command line asks for."""
    parser = argparse.ArgumentParser(description="Train a model with FSDP2.", allow_abbrev=False)
    if extra_args_provider is not None:  # first: what a script declares for itself is its own
        parser = extra_args_provider(parser) or parser
    extra = _declared(parser)
    add_arguments(parser)
    suggest_flags(parser)
    namespace = parser.parse_args(argv)
    return from_arguments(namespace, extra=extra, defaults=args_defaults, schema=schema)


def from_arguments(
    namespace: argparse.Namespace,
    *,
    extra: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    schema: Schema | None = None,
) -> Run:
    """Put together what was given and check it."""
    given = dict(vars(namespace))
    path = _one_file(given.pop("file", None), given.pop("config", None))
    in_file, entries = _split(read_yaml(path)) if path else ({}, {})
    own = dict(extra or {})
    for values in (in_file, given):
        own |= {name: values.pop(name) for name in own.keys() & values.keys()}
    if path:  # errors about the file use its spelling
        build(MmOptions, in_file, Spelling.KEY, source=path)
    fields = MmOptions.model_fields.keys()
    flags = {name: value for name, value in given.items() if name in fields}
    options = build(MmOptions, dict(defaults or {}) | in_file | flags, Spelling.FLAG)
    made = {name: _section(name, entries, options, path, schema or Schema()) for name in FILES}
    run = Run(options, _fsdp(entries, options, path), Sections(**made), own)
    check(run.options, run.fsdp)
    return run


def is_one_file(content: Mapping[str, Any]) -> bool:
    """Say whether a file is that of a whole run, not one of FSDP2 options only."""
    whole = (FSDP2, "fsdp2_config_path", "data", *FLAGS_IN_FILE)
    return isinstance(content.get("model"), dict) or any(name in content for name in whole)


def read_for_plan(path: str) -> tuple[FsdpOptions, ModelConfig | None]:
    """Read what the one file says of the model and its sharding."""
    flags, entries = _split(read_yaml(path))
    known = {name: value for name, value in flags.items() if name in MmOptions.model_fields}
    options = build(MmOptions, known, Spelling.KEY, source=path)
    model: ModelConfig | None = _section("model", entries, options, path, Schema())
    if model is not None:
        untied = options.untie_embeddings_and_output_weights
        model = model.for_run(untied=untied, on_meta=True)
    return _fsdp(entries, options, path), model


def _declared(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the arguments that a script added and their defaults, which then give way to files."""
    found = {}
    for action in parser._actions:
        if action.dest != "help" and action.dest not in MmOptions.model_fields:
            found[action.dest], action.default = action.default, argparse.SUPPRESS
    return found


def _one_file(first: str | None, second: str | None) -> str | None:
    if first and second:
        raise ConfigError(f"{first} and --config {second} are two files: give one")
    return first or second


def _split(content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tell flags from sections; null says what leaving a flag out says."""
    entries = {name: content.pop(name) for name in (*FILES, FSDP2) if name in content}
    flags: dict[str, Any] = {}
    if OLD_TOOL in content:
        flags["mm_tool"] = content.pop(OLD_TOOL)
    for name in FLAGS_IN_FILE:
        _flatten(content.pop(name, None) or {}, name, flags)
    for name, value in content.items():
        near = nearest(name, (*FILES, FSDP2, *FLAGS_IN_FILE))
        if isinstance(value, dict) and near is not None:
            raise ConfigError(f"unknown section {name}; did you mean {near}?")
    _flatten(content, "", flags)
    return flags, {name: value for name, value in entries.items() if value is not None}


def _flatten(values: Any, place: str, flags: dict[str, Any]) -> None:
    if not isinstance(values, dict):
        raise ConfigError(f"{place} is {values!r:.40}: give lines of `flag: value` below it")
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if isinstance(value, dict) and place:
            _flatten(value, f"{place}.{key}", flags)
        elif name in flags:
            raise ConfigError(f"{name} is given twice in the file")
        elif value is not None:
            flags[name] = value


def _section(
    name: str, entries: dict[str, Any], options: MmOptions, path: str | None, schema: Schema
) -> Any:
    """Build a section from the file that a flag names, else from the one file."""
    wanted = getattr(schema, name)
    if (file := getattr(options, FILES[name])) is not None:
        return make_section(wanted, read_section(file, name), file)
    if name not in entries:
        return None
    if not isinstance(entries[name], dict):
        raise ConfigError(f"{path}: {name} is {entries[name]!r:.40}: give lines below it")
    return make_section(wanted, entries[name], f"{path}: {name}")


def _fsdp(entries: dict[str, Any], options: MmOptions, path: str | None) -> FsdpOptions:
    """Read how to shard; --bf16 fills in what it leaves open."""
    file, values = options.fsdp2_config_path, entries.get(FSDP2, {})
    if file is not None:
        values, source = read_yaml(file), file
    else:
        source = f"{path}: {FSDP2}"
    if not isinstance(values, dict):
        raise ConfigError(f"{source} is {values!r:.40}: give lines of `key: value` below it")
    if options.bf16:
        values = {"param_dtype": "bf16", "reduce_dtype": "fp32"} | values
        if values["param_dtype"] != "bf16":
            raise ConfigError(f"--bf16, but {source} says param_dtype: {values['param_dtype']}")
    return build(FsdpOptions, values, Spelling.KEY, source=source)
