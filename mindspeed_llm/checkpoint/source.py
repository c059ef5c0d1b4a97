"""What every reader returns."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed.checkpoint.digests import Ranges
from mindspeed.config import ConfigError
from mindspeed_llm.checkpoint.assembly import Whole
from mindspeed_llm.checkpoint.mapped_file import MappedFile
from mindspeed_llm.models.shape import ModelShape

LISTED = 5
"""How many names an error lists."""


@dataclass
class Source:
    """The whole weights of a model, as views of files."""

    shape: ModelShape
    wholes: dict[str, Whole]
    files: list[MappedFile] = field(default_factory=list)
    ranges: Ranges = field(default_factory=dict)
    """What is read of files that hold other things as well."""

    def let_go(self) -> None:
        """Give back the memory of what has been read."""
        for file in self.files:
            file.let_go()


def check_names(found: Iterable[str], wanted: Iterable[str], where: str) -> None:
    """Raise unless exactly the wanted tensors are there."""
    have, want = set(found), set(wanted)
    problems = []
    if missing := sorted(want - have):
        problems.append(f"{_listed(missing)} missing")
    if unexpected := sorted(have - want):
        problems.append(f"{_listed(unexpected)} not expected")
    if problems:
        raise ConfigError(f"{where}: {' and '.join(problems)} (is the config that of this model?)")


def check_shape(where: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless a tensor has the shape that the config says."""
    if tuple(tensor.shape) != shape:
        raise ConfigError(
            f"{where}: {name} has the shape {tuple(tensor.shape)}, the config makes it {shape}"
        )
    if not tensor.is_floating_point():
        raise ConfigError(f"{where}: {name} holds {tensor.dtype}, not floating-point numbers")


def only_tensors(values: Mapping[Any, Any], where: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a state dictionary; what layers keep beside them is left out."""
    found = {}
    for name, value in values.items():
        if isinstance(name, str) and not name.endswith("_extra_state") and value is not None:
            if not isinstance(value, torch.Tensor):
                raise ConfigError(f"{where}: {name} is a {type(value).__name__}, not a tensor")
            found[name] = value
    return found


def _listed(names: list[str]) -> str:
    more = len(names) - LISTED
    shown = ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")
    return f"{shown} {'are' if len(names) > 1 else 'is'}"
