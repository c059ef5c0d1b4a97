"""The families there are, found by name or by the config.json of a model."""

import importlib
import logging
from collections.abc import Collection
from pathlib import Path

from mindspeed.config import ConfigError, one_of
from mindspeed_llm.models.family import Family
from mindspeed_llm.models.hf_config import HfConfig
from mindspeed_llm.models.shape import ModelShape

logger = logging.getLogger(__name__)

LARGEST = 1_000_000
"""Layers times heads or experts; more is damage or meant to keep us busy."""
_PACKAGES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek2", "deepseek3")


def families() -> dict[str, Family]:
    """Return every family under every name it has."""
    found: dict[str, Family] = {}
    for package in _PACKAGES:
        family: Family = importlib.import_module(f"mindspeed_llm.models.{package}").FAMILY
        for name in (family.name, *family.aliases):
            found[_plain(name)] = family
    return found


def family_named(name: str) -> Family:
    """Return the family of a --model-type-hf or of ModelShape.family."""
    known = families()
    if _plain(name) not in known:
        raise ConfigError(f"model family {name} is not supported: give {one_of(sorted(known))}")
    return known[_plain(name)]


def family_of(config: HfConfig, named: str | None = None) -> Family:
    """Return the family of a config.json; a name given decides only where the config does not."""
    chosen = family_named(named) if named else None
    model_type = str(config.get("model_type", ""))
    by_type = {kind: family for family in families().values() for kind in family.model_types}
    found = by_type.get(model_type)
    if found is None and (chosen is None or _is_known_elsewhere(model_type)):
        instead = "" if chosen is None else f", and it is not {named}"
        if not model_type:
            instead = ": name the family with --model-type-hf"
        raise ConfigError(
            f"{config.source}: model_type {model_type or '(none)'} is not supported{instead}; "
            f"supported: {', '.join(sorted(by_type))}"
        )
    if found and chosen and found is not chosen:
        logger.info("%s says %s: used instead of %s", config.source, found.name, named)
    family = found or chosen
    assert family is not None
    return family


def _is_known_elsewhere(model_type: str) -> bool:
    """Return whether transformers has an architecture of its own under this name."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


def read_shape(
    folder: Path, tensors: Collection[str] | None = None, named: str | None = None
) -> ModelShape:
    """Return the shape of the HF model whose config.json is in `folder`."""
    config = HfConfig.read(folder)
    family = family_of(config, named)
    kind = _model_type(config, family, named)
    config = config.of_type(kind, family.model_types[kind])
    shape = family.shape(config, () if tensors is None else tensors)
    config.refuse_unread(family.name, family.ignored)
    experts = shape.moe.num_experts if shape.moe else 1
    if shape.num_layers * max(experts, shape.num_query_groups) > LARGEST:
        raise ConfigError(
            f"{config.source}: {shape.num_layers} layers, {shape.num_query_groups} key/value heads "
            f"and {experts} expert(s) are more than any model has"
        )
    return shape


def _model_type(config: HfConfig, family: Family, named: str | None) -> str:
    """Return which of its model types a model is: as it says, as it is named, or the first."""
    for name in (str(config.get("model_type", "")), named):
        if name in family.model_types:
            return name
    return next(iter(family.model_types))


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "")
