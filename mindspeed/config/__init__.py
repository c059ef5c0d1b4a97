"""Typed, strict options with three front doors: flags, YAML files and keyword arguments."""

from mindspeed.config.errors import (
    ConfigError,
    RankConfigError,
    kind_of,
    parse_json,
    printable,
)
from mindspeed.config.explain import Spelling, build
from mindspeed.config.flags import add_flags, add_options, flag_name, from_namespace, read_options
from mindspeed.config.options import Alias, CommaSeparated, Options, SectionOptions
from mindspeed.config.suggest import did_you_mean, misspelt, nearest, one_of, suggest_flags
from mindspeed.config.yaml_file import load_yaml

__all__ = [
    "Alias",
    "CommaSeparated",
    "ConfigError",
    "Options",
    "RankConfigError",
    "SectionOptions",
    "Spelling",
    "add_flags",
    "add_options",
    "build",
    "did_you_mean",
    "flag_name",
    "from_namespace",
    "kind_of",
    "load_yaml",
    "misspelt",
    "nearest",
    "one_of",
    "parse_json",
    "read_options",
    "printable",
    "suggest_flags",
]
