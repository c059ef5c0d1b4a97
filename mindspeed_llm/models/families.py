"""The families there are, found by name or by the config.json of a model."""

import importlib
import logging
from collections.abc import Collection
from pathlib import Path

from mindspeed.config import ConfigError, did_you_mean
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
        raise ConfigError(f"unknown model family {name}; {did_you_mean(_plain(name), known)}")
    return known[_plain(name)]


def family_of(config: HfConfig, named: str | None = None) -> Family:
    """Return the family of a config.json; a name given decides only where the config does not."""
    chosen = family_named(named) if named else None
    model_type = str(config.get("model_type", ""))
    by_type = {kind: family for family in families().values() for kind in family.model_types}
    found = by_type.get(model_type)
    if found is None and chosen is None:
        raise ConfigError(
            f"{config.source}: unknown model_type {model_type or '(none)'}; "
            f"{did_you_mean(model_type, by_type)} Or name the family with --model-type-hf"
        )
    if found and chosen and found is not chosen:
        logger.info("%s says %s: used instead of %s", config.source, found.name, named)
    family = found or chosen
    assert family is not None
    return family


def read_shape(
    folder: Path, tensors: Collection[str] | None = None, named: str | None = None
) -> ModelShape:
    """Return the shape of the HF model whose config.json is in `folder`."""
    config = HfConfig.read(folder)
    shape = family_of(config, named).shape(config, () if tensors is None else tensors)
    experts = shape.moe.num_experts if shape.moe else 1
    if shape.num_layers * max(experts, shape.num_query_groups) > LARGEST:
        raise ConfigError(
            f"{config.source}: {shape.num_layers} layers, {shape.num_query_groups} key/value heads "
            f"and {experts} expert(s) are more than any model has"
        )
    return shape


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "")
