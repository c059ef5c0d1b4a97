"""How tensors of a Hugging Face folder become those of a model: most by a name, some joined.

The rules are those of transformers itself, for the model class and every model inside.
"""

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Tensors = Mapping[str, torch.Tensor]


@dataclass
class Recipe:
    """Tensors of files that together make one or more tensors of a model."""

    sources: list[str] = field(default_factory=list)
    name: str = ""
    """The tensor of the model, where it is the only source unchanged."""
    convert: "_Converting | None" = None
    """Makes the tensors of the model from the sources, where that takes more than a name."""

    def apply(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Return the tensors of the model."""
        if self.convert is None:
            return {self.name: tensors[self.sources[0]]}
        return self.convert(tensors)


def recipes(model: nn.Module | None, sources: Iterable[str], names: Iterable[str]) -> list[Recipe]:
    """Return what becomes of the tensors of a folder; `names` are those of the model."""
    plain = as_in_transformers(model)
    if plain is None:
        return [Recipe([source], source) for source in sources]
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(plain)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    by_pattern = {p: converter for converter in converters for p in converter.source_patterns}
    known = dict.fromkeys(names, True)
    found: dict[str, Recipe] = {}
    converted: dict[str, _Converting] = {}
    for source in sorted(sources, key=dot_natural_key):
        name, pattern = rename_source_key(
            source, renamings, converters, plain.base_model_prefix, known
        )
        if pattern is None:
            found[source] = Recipe([source], name)
            continue
        converting = converted.setdefault(name, _Converting(plain, by_pattern[pattern], name, {}))
        converting.patterns[source] = pattern
        found.setdefault(name, Recipe([], convert=converting)).sources.append(source)
    return list(found.values())


def ignored(model: nn.Module, name: str) -> bool:
    """Return whether a tensor of a file without a place in the model may be left out.

    The model says so itself, or it is a buffer that older files hold and the model computes.
    """
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    is_buffer = any(name == buffer for buffer, _ in model.named_buffers())
    return is_buffer or any(re.search(pattern, name) for pattern in patterns)


def as_in_transformers(model: Any) -> Any:
    """Return the skeleton of a model's class in transformers, if it comes from one.

    The rules are written for that class, not for one derived from it or wrapped by FSDP2.
    """
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return None
    classes = (c for c in type(model).__mro__ if c.__module__.startswith("transformers.models."))
    plain = next((c for c in classes if issubclass(c, PreTrainedModel)), None)
    if plain is None:
        return None
    with torch.device("meta"):
        return plain._from_config(copy.deepcopy(model.config))


@dataclass(frozen=True)
class _Converting:
    """Runs one converter of transformers over its sources."""

    model: Any
    converter: Any
    name: str
    patterns: dict[str, str]
    """The pattern of the converter that each source matches."""

    def __call__(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        converter = copy.deepcopy(self.converter)
        for source, pattern in self.patterns.items():
            converter.add_tensor(self.name, source, pattern, tensors[source])
        made = converter.convert(self.name, model=self.model, config=self.model.config)
        return {k: v[0] if isinstance(v, list) else v for k, v in made.items()}
