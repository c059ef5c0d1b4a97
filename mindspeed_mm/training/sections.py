"""The sections of a run, from JSON or YAML files or from one file that holds them all."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mindspeed.config import ConfigError, Options, Spelling, build, parse_json
from mindspeed.config.yaml_file import read_yaml


@dataclass
class Sections:
    """What callbacks see as args.mm; None where nothing was given."""

    model: Any = None
    data: Any = None
    tool: Any = None


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
