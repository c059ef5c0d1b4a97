"""The registry of model families, by name or by the config.json of a model.

A module of `mindspeed_llm.models.families` that declares `FAMILY` is a family.
"""

import functools
import importlib
import logging
import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed.config import ConfigError, one_of
from mindspeed_llm.models import families as family_modules
from mindspeed_llm.models.config import ModelConfig, MoEConfig
from mindspeed_llm.models.hf_config import CLASSIFIER, MANY, HfConfig
from mindspeed_llm.models.weight_table import WeightTable

logger = logging.getLogger(__name__)

LARGEST = 1_000_000
"""Limit of layers times heads or experts; more is damage or a denial of service."""


@dataclass(frozen=True)
class Family:
    """A family: its names, how its HF config is read, and its weight table."""

    name: str
    model_types: Mapping[str, Mapping[str, Any]]
    """The model_type of its config.json files, each with the defaults of transformers for missing
    keys where these are not the defaults of every family."""
    read_config: Callable[[HfConfig, Collection[str]], ModelConfig]
    """Takes the config and the names of the HF tensors, from which some fields are detected."""
    table: WeightTable
    aliases: tuple[str, ...] = ()
    """Other names for --model-type-hf."""
    ignored: tuple[str, ...] = ()
    """Keys of its config.json files that change no number, beside those of every family."""


@functools.cache
def families() -> dict[str, Family]:
    """Return every family under each of its names."""
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(family_modules.__path__):
        family: Family = importlib.import_module(f"{family_modules.__name__}.{module.name}").FAMILY
        for name in (family.name, *family.aliases):
            found[_normalized(name)] = family
    return found


def family_named(name: str) -> Family:
    """Return the family of a --model-type-hf or of ModelConfig.family."""
    known = families()
    if _normalized(name) not in known:
        raise ConfigError(f"model family {name} is not supported: give {one_of(sorted(known))}")
    return known[_normalized(name)]


def family_of(config: HfConfig, named: str | None = None) -> Family:
    """Return the family of a config.json; a name given decides only where the config does not."""
    chosen = family_named(named) if named else None
    model_type = str(config.get("model_type", ""))
    by_type = {kind: family for family in families().values() for kind in family.model_types}
    found = by_type.get(model_type)
    if found is None and (chosen is None or _is_transformers_type(model_type)):
        instead = "" if chosen is None else f", and it is not {named}"
        if not model_type:
            instead = ": name the family with --model-type-hf"
        raise ConfigError(
            f"{config.source}: model_type {model_type or '(none)'} is not supported{instead}; "
            f"supported: {', '.join(sorted(by_type))}"
        )
    if found and chosen and found is not chosen:
        logger.info("%s is of family %s: used instead of %s", config.source, found.name, named)
    family = found or chosen
    assert family is not None
    return family


def _is_transformers_type(model_type: str) -> bool:
    """Return whether transformers has an architecture of its own under this name."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


def read_model_config(
    folder: Path,
    tensors: Collection[str] | None = None,
    named: str | None = None,
    *,
    from_scratch: bool = False,
) -> ModelConfig:
    """Return the configuration of the HF model whose config.json is in `folder`.

    Weights may lack the layers of multi-token prediction that a config.json names; a model that is
    trained from scratch has them.
    """
    config = HfConfig.read(folder)
    family = family_of(config, named)
    kind = _model_type(config, family, named)
    config = config.of_type(kind, family.model_types[kind])
    model = family.read_config(config, () if tensors is None else tensors)
    if from_scratch:
        model = _with_further_tokens(model, family, config)
    if labels := _num_labels(config):
        model = model.model_copy(update={"num_labels": labels, "tied": False, "mtp_num_layers": 0})
    config.refuse_unread(family.name, family.ignored)
    experts = model.moe.num_experts if model.moe else 1
    if model.num_layers * max(experts, model.num_query_groups) > LARGEST:
        raise ConfigError(
            f"{config.source}: {model.num_layers} layers, {model.num_query_groups} key/value heads "
            f"and {experts} expert(s) are more than any model has"
        )
    if model.moe:
        _check_routing(model.moe, config.source)
    return model


def _with_further_tokens(model: ModelConfig, family: Family, config: HfConfig) -> ModelConfig:
    if not family.table.mtp:
        return model
    further = config.integer("num_nextn_predict_layers", default=0, least=0, most=MANY)
    if further and model.tied:
        raise ConfigError(
            f"{config.source}: num_nextn_predict_layers {further}: needs an output layer of its "
            "own: set it to 0, or tie_word_embeddings to false"
        )
    return model.model_copy(update={"mtp_num_layers": further})


def _check_routing(moe: MoEConfig, source: str) -> None:
    """Raise ConfigError for numbers by which no router can choose."""
    if moe.aux_loss_coeff < 0:
        raise ConfigError(
            f"{source}: the factor of the auxiliary loss is {moe.aux_loss_coeff:g}: "
            "it must be at least 0"
        )
    groups, chosen = moe.num_groups or 1, moe.group_topk or 1
    if chosen > groups or moe.num_experts % groups:
        raise ConfigError(
            f"{source}: topk_group is {chosen}, n_group {groups}, with {moe.num_experts} experts: "
            "n_group must divide them and topk_group be at most n_group"
        )
    allowed = moe.num_experts // groups * chosen
    if moe.topk > allowed:
        raise ConfigError(
            f"{source}: num_experts_per_tok is {moe.topk}: a token can choose among {allowed} "
            "experts only"
        )


def _num_labels(config: HfConfig) -> int:
    """Return the outputs of a sequence-classification model, 0 for a language model."""
    classes = config.get("architectures")
    if not isinstance(classes, list) or not any(str(c).endswith(CLASSIFIER) for c in classes):
        return 0
    names = config.get("id2label", {})
    count = len(names) if isinstance(names, dict) else 0
    return config.integer("num_labels", default=count or 2, most=MANY)


def _model_type(config: HfConfig, family: Family, named: str | None) -> str:
    """Return the model type: that of the config, the given one, or the first of the family."""
    for name in (str(config.get("model_type", "")), named):
        if name is not None and name in family.model_types:
            return name
    return next(iter(family.model_types))


def _normalized(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "")
