"""Megatron-style command-line flags, generated from an options class.

`add_options` and `read_options` are for a command that also takes a YAML file: a flag wins over it.
"""

import argparse
import re
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic.fields import FieldInfo

from mindspeed.config.errors import ConfigError
from mindspeed.config.explain import Spelling, build
from mindspeed.config.options import (
    CommaSeparated,
    Options,
    aliases,
    choices,
    element,
    without_none,
)
from mindspeed.config.yaml_file import load_yaml

OptionsT = TypeVar("OptionsT", bound=Options)


def flag_name(field: str) -> str:
    """Return the flag of a field: use_fused_swiglu is --use-fused-swiglu."""
    return Spelling.FLAG.name_of(field)


def add_flags(
    parser: argparse._ActionsContainer,
    options_class: type[Options],
    defaults: Options | None = None,
) -> None:
    """Add one flag per field with its aliases, except those that the parser already has.

    `defaults` are the values of flags that are not given; without it, the defaults of the class.
    """
    for field, info in options_class.model_fields.items():
        if flag_name(field) in parser._option_string_actions:
            continue
        default = info.get_default(call_default_factory=True)
        if info.is_required():  # not in the namespace unless given, and reported as missing then
            default = argparse.SUPPRESS
        default = default if defaults is None else getattr(defaults, field)
        keywords = _keywords(info, default)
        action = parser.add_argument(flag_name(field), dest=field, **keywords)
        action.help = keywords["help"]  # Python 3.10 adds the default once more to that of switches
        for alias in aliases(info):
            # In the namespace only where it is given, so that errors can name what was typed.
            keywords = _keywords(info, default) | {"default": argparse.SUPPRESS}
            keywords["help"] = f"Old name of {flag_name(field)}."
            parser.add_argument(flag_name(alias), dest=alias, **keywords)


def from_namespace(
    options_class: type[OptionsT],
    namespace: argparse.Namespace,
    defaults: Options | None = None,
) -> OptionsT:
    """Take the fields of an options class out of a parsed namespace; other names are not ours."""
    given, values = dict(vars(namespace)), {} if defaults is None else dict(defaults)
    for name, field in options_class.accepted_names().items():
        unset = values.get(field, options_class.model_fields[field].default)
        if name in given and name != field and given.get(field) == unset:
            given.pop(field, None)  # the default of the flag whose old name was given
    return build(options_class, options_class.merge(values, given), Spelling.FLAG)


def add_options(
    parser: argparse.ArgumentParser,
    options_class: type[Options],
    sections: Sequence[type[Options]] = (),
) -> None:
    """Add --config and a flag for every option, under the titles of its sections if there are."""
    parser.usage = "%(prog)s [--config FILE] [flags]"  # all of them would fill a screen
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these options")
    for section in sections:
        words = re.findall("[A-Z][a-z]*", section.__name__.removesuffix("Options"))
        title = " ".join(words).lower()
        add_flags(parser.add_argument_group(title, section.__doc__), section)
    add_flags(parser.add_argument_group("mindspeed") if sections else parser, options_class)
    for action in parser._actions:
        if action.dest in options_class.accepted_names():
            action.default = argparse.SUPPRESS  # what is not given may be in the file


def read_options(namespace: argparse.Namespace, options_class: type[OptionsT]) -> OptionsT:
    """Build the options that were given, by a flag or in the file; the others count as not set."""
    if namespace.config:
        values = load_yaml(namespace.config, options_class).as_given()
        for name, value in values.items():
            if "\0" in str(value):  # no path and no command line can hold it
                raise ConfigError(f"{namespace.config}: {name} holds a NUL character")
        given = vars(namespace)
        namespace = argparse.Namespace(**given | options_class.merge(values, given))
    return from_namespace(options_class, namespace)


def _keywords(info: FieldInfo, default: Any) -> dict[str, Any]:
    """Return the add_argument keywords of a field."""
    keywords: dict[str, Any] = {"default": default, "help": _help(info, default)}
    annotation, is_optional = without_none(info.annotation)
    if annotation is bool:
        # A switch that is off by default needs no --no-x; one that is on, or that the device
        # decides when it is not given, needs a way to be off.
        both = default or is_optional
        return keywords | {"action": argparse.BooleanOptionalAction if both else "store_true"}
    if CommaSeparated in info.metadata:
        return keywords | {"type": str, "metavar": "N,N,..."}
    if (item := element(annotation)) is not None:
        annotation, keywords["nargs"] = item, "+"
    if values := choices(annotation):
        return keywords | {"type": type(values[0]), "choices": values}
    return keywords | {"type": annotation, "metavar": _metavar(annotation)}


def _metavar(annotation: Any) -> str:
    return {int: "N", float: "X"}.get(annotation, "TEXT")


def _help(info: FieldInfo, default: Any) -> str:
    text = " ".join((info.description or "").split()).replace("%", "%%")
    if default in (None, False, "", (), argparse.SUPPRESS):
        return text
    shown: object = " ".join(map(str, default)) if _is_list(default) else default
    return f"{text} (default: {shown})"


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
