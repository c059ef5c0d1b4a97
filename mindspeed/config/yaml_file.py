"""Options from a YAML file."""

import os
import re
from pathlib import Path
from typing import Any, TypeVar

import yaml

from mindspeed.config.errors import ConfigError
from mindspeed.config.explain import Spelling, build
from mindspeed.config.options import Options

OptionsT = TypeVar("OptionsT", bound=Options)


def load_yaml(path: str | os.PathLike[str], options_class: type[OptionsT]) -> OptionsT:
    """Read options from a YAML file, strictly."""
    return build(options_class, read_yaml(path), Spelling.KEY, source=str(path))


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a YAML file that maps keys to values; an empty file maps nothing."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path}: cannot be read ({reason}): give a YAML file") from None
    text = re.sub(r"[ \t]*\t[ \t]*$", "", text, flags=re.MULTILINE)  # PyYAML refuses a tab there
    try:
        content = yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not valid YAML: {_one_line(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: holds a {type(content).__name__}: give lines of `key: value`")
    return {str(key): value for key, value in content.items()}


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, with numbers like 1e-5 read as numbers and repeated keys refused."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    seen: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key} is given twice", key_node.start_mark
            )
        seen[key] = loader.construct_object(value_node, deep=True)
    return seen


def _one_line(error: yaml.YAMLError) -> str:
    problem = getattr(error, "problem", None) or str(error)
    mark = getattr(error, "problem_mark", None)
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return " ".join(f"{place}{problem}".split())


# YAML 1.1 wants a dot and a sign in a float, so PyYAML reads 1e-5 as text.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)
_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
