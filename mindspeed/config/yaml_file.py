"""Options from a YAML file."""

import os
import re
from pathlib import Path
from typing import Any, TypeVar

import yaml

from mindspeed.config.errors import ConfigError, kind_of
from mindspeed.config.explain import Spelling, build
from mindspeed.config.options import Options

OptionsT = TypeVar("OptionsT", bound=Options)

LARGEST = 1 << 20
"""Bytes; PyYAML needs a second for some 200,000."""
DEEPEST = 50
MOST_NODES = 100_000
"""Values of a file with every alias written out."""


def load_yaml(path: str | os.PathLike[str], options_class: type[OptionsT]) -> OptionsT:
    """Read options from a YAML file, strictly."""
    return build(options_class, read_yaml(path), Spelling.KEY, source=str(path))


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a YAML file that maps keys to values; an empty file maps nothing."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ConfigError(f"{path}: is larger than {LARGEST >> 20} MiB: give a YAML file")
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path}: cannot be read ({reason}): give a YAML file") from None
    text = re.sub(r"[ \t]*\t[ \t]*(?=\r?$)", "", text, flags=re.MULTILINE)  # PyYAML refuses it
    try:
        values = yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not valid YAML: {_one_line(error)}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds {kind_of(values)}: give lines of `key: value`")
    return {str(key): value for key, value in values.items()}


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, with numbers like 1e-5 read as numbers and repeated keys refused.

    Depth and size are bounded while the file is read: aliases of aliases grow exponentially when
    their values are compared or printed, and deep nesting exceeds Python's stack.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._nodes = 0
        self._sizes: dict[int, int] = {}  # values in a finished node, by its id

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node as PyYAML does, and count what it holds."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        before, is_alias = self._nodes, isinstance(event, yaml.AliasEvent)
        self._depth += 1
        if self._depth > DEEPEST:
            raise _problem(f"it is nested deeper than {DEEPEST} levels", event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias and id(node) not in self._sizes:
            raise _problem(f"the alias {event.anchor} stands in its own value", event.start_mark)
        self._nodes += self._sizes[id(node)] if is_alias else 1
        if self._nodes > MOST_NODES:
            raise _problem(f"it holds more than {MOST_NODES:,} values", event.start_mark)
        self._sizes.setdefault(id(node), self._nodes - before)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct a value as PyYAML does, whose own errors for some tags are no YAML errors."""
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, str):
                value.encode()  # a lone surrogate can be written as an escape
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            kind = node.tag.rpartition(":")[2]
            raise _problem(f"{node.value!r:.40} is not a valid {kind}", node.start_mark) from None
        return value


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    seen: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise _problem("a key must be text or a number", key_node.start_mark)
        key = loader.construct_object(key_node, deep=True)
        if key in seen:
            raise _problem(f"the key {key} is given twice", key_node.start_mark)
        seen[key] = loader.construct_object(value_node, deep=True)
    return seen


def _problem(text: str, mark: yaml.Mark) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, text, mark)


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
