"""The configuration of a run: from flags, from one YAML file, or both; a flag wins."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mindspeed.checkpoint.detection import detect
from mindspeed.config import (
    ConfigError,
    Options,
    Spelling,
    add_options,
    build,
    did_you_mean,
    parse_json,
    suggest_flags,
)
from mindspeed.config.suggest import nearest
from mindspeed.config.yaml_file import read_yaml
from mindspeed.distributed import environment
from mindspeed.distributed.parallel_dims import ParallelDims
from mindspeed.fsdp import FsdpOptions
from mindspeed.training.options import check_run
from mindspeed_mm.data.options import DataConfig
from mindspeed_mm.models.options import ModelConfig
from mindspeed_mm.training.options import INSTEAD, SECTIONS, MmOptions
from mindspeed_mm.training.profile import ToolConfig

ExtraArguments = Callable[[argparse.ArgumentParser], argparse.ArgumentParser | None]

FLAGS_IN_FILE = ("training", "gpt_args")
"""Entries of the one file that hold flags, as deeply nested as their writer likes."""
FILES = {"model": "mm_model", "data": "mm_data", "tool": "mm_tool"}
"""Entries of the one file that are sections, and the flags that name a file for each."""
FSDP2 = "fsdp2_config"
OLD_TOOL = "MM_TOOL_PATH"
DCP = "torch_dist"
"""What `detect` calls a folder that torch.distributed.checkpoint wrote."""


@dataclass
class Sections:
    """What callbacks see as args.mm; None where nothing was given."""

    model: Any = None
    data: Any = None
    tool: Any = None


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
    if (
        in_file
        and in_file.keys() <= FsdpOptions.model_fields.keys() - MmOptions.model_fields.keys()
    ):
        raise ConfigError(f"{path}: holds FSDP2 options only: give it as --fsdp2-config-path")
    own = dict(extra or {})
    for values in (in_file, given):
        own |= {name: values.pop(name) for name in own.keys() & values.keys()}
    if path:  # errors about the file use its spelling
        build(MmOptions, in_file, Spelling.KEY, source=path)
    fields = MmOptions.model_fields.keys()
    flags = {name: value for name, value in given.items() if name in fields}
    options = build(MmOptions, dict(defaults or {}) | in_file | flags, Spelling.FLAG)
    made = {name: _section(name, entries, options, path, schema or Schema()) for name in FILES}
    options = _with_data(options, made["data"])
    run = Run(options, _fsdp(entries, options, path), Sections(**made), own)
    check(run.options, run.fsdp)
    return run


def is_one_file(content: Mapping[str, Any]) -> bool:
    """Return whether a file is that of a whole run, not one of FSDP2 options only."""
    whole = (FSDP2, "fsdp2_config_path", "data", *FLAGS_IN_FILE)
    return isinstance(content.get("model"), dict) or any(name in content for name in whole)


def read_for_plan(path: str) -> tuple[FsdpOptions, ModelConfig | None]:
    """Read the model and its sharding from the one file."""
    flags, entries = _split(read_yaml(path))
    known = {name: value for name, value in flags.items() if name in MmOptions.model_fields}
    options = build(MmOptions, known, Spelling.KEY, source=path)
    model: ModelConfig | None = _section("model", entries, options, path, Schema())
    if model is not None:
        untied = options.untie_embeddings_and_output_weights
        model = model.for_run(untied=untied, on_meta=True)
    return _fsdp(entries, options, path), model


def _with_data(options: MmOptions, data: Any) -> MmOptions:
    """Take from the data section what it has and no flag gives: two values would be in force."""
    if not isinstance(data, DataConfig):
        return options
    loader = data.dataloader_param
    keys = {"micro_batch_size": "batch_size", "seed": "seed"}
    found = {
        flag: getattr(loader, key)
        for flag, key in keys.items()
        if key in loader.model_fields_set and flag not in options.model_fields_set
    }
    return options.model_copy(update=found)


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
    """Split flags from sections; null is the same as leaving a flag out."""
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


def _flatten(values: Any, path: str, flags: dict[str, Any]) -> None:
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is {values!r:.40}: give lines of `flag: value` below it")
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if isinstance(value, dict) and path:
            _flatten(value, f"{path}.{key}", flags)
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
            raise ConfigError(f"--bf16, but {source} has param_dtype: {values['param_dtype']}")
    return build(FsdpOptions, values, Spelling.KEY, source=source)


def read_section(path: str, name: str) -> dict[str, Any]:
    """Read a section: a whole JSON file, or a YAML file or its entry of that name."""
    if Path(path).suffix.lower() == ".json":
        return _read_json(path)
    content = read_yaml(path)
    return _must_be_section(content[name], f"{path}: {name}") if name in content else content


def make_section(options_class: type[Options] | None, values: dict[str, Any], source: str) -> Any:
    """Build a section strictly; without a class it is as free as the file: names with values."""
    if options_class is None:
        return _as_names(values)
    return build(options_class, values, Spelling.KEY, source=source)


def _must_be_section(value: Any, source: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{source} is {value!r:.40}: give lines of `key: value` below it")
    return value


def _read_json(path: str) -> dict[str, Any]:
    try:
        content = parse_json(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_once)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}): give a JSON file") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not valid JSON: {error}") from None
    return _must_be_section(content, path)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice} is given twice")
    return values


def _as_names(value: Any) -> Any:
    if isinstance(value, dict):
        return SimpleNamespace(**{str(key): _as_names(inner) for key, inner in value.items()})
    return [_as_names(inner) for inner in value] if isinstance(value, list) else value


def check(options: MmOptions, fsdp: FsdpOptions) -> None:
    """Raise ConfigError for what can never work, before process groups and models exist."""
    check_run(options)
    _check_refused(options)
    for key in ("param_dtype", "reduce_dtype", "output_dtype"):
        if getattr(fsdp, key) == "fp16":
            raise ConfigError(f"{key}: fp16: {INSTEAD['fp16'].replace('--bf16, or ', '')}")
    world = environment.world_size()
    fsdp.mesh_shape(world)
    ParallelDims(world=world, cp=options.context_parallel_size)
    _check_backend(options.distributed_backend)
    if fsdp.offload_to_cpu and not reaches_host(options.distributed_backend):
        from mindspeed import device

        here = device.current()
        host = device.known()["cpu"].backend
        raise ConfigError(
            "offload_to_cpu: true needs process groups that also reach host memory: give "
            f"--distributed-backend {here.name}:{here.backend},cpu:{host}"
        )
    if options.load is not None:
        _check_load(options.load)


def reaches_host(backend: str | None) -> bool:
    """Return whether process groups will reach host memory."""
    from mindspeed import device  # with torch, which the flags do not need

    return device.current().name == "cpu" or "cpu:" in (backend or "")


def _check_backend(given: str | None) -> None:
    """Raise for unknown names; those of other devices occur in scripts that moved here."""
    from mindspeed import device

    known = [(each.name, each.backend) for each in device.known().values()]
    names = {backend for _, backend in known} | {f"{name}:{backend}" for name, backend in known}
    for name in given.split(",") if given else ():
        if name.strip() not in names:
            raise ConfigError(
                f"--distributed-backend {given}: {name} is not known; {did_you_mean(name, names)}"
            )


def _check_refused(options: MmOptions) -> None:
    for name, instead in INSTEAD.items():
        value = getattr(options, name)
        if value != type(options).model_fields[name].default:
            raise ConfigError(f"{Spelling.FLAG.with_value(name, value)}: {instead}")


def _check_load(load: str) -> None:
    try:
        found = detect(load)
    except ConfigError as error:
        raise ConfigError(f"--load {error}") from None
    if found.kind not in (DCP, "hf"):
        raise ConfigError(
            f"--load {load}: holds Megatron's rank files: give a Hugging Face folder, or a "
            "checkpoint of this suite (mindspeed-mm convert makes one)"
        )
