"""What every family offers."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_llm.models.hf_config import HfConfig
from mindspeed_llm.models.shape import ModelShape
from mindspeed_llm.models.table import WeightTable


@dataclass(frozen=True)
class Family:
    """A family: its names, how its HF config reads, and its weight-name table."""

    name: str
    model_types: Mapping[str, Mapping[str, Any]]
    """The model_type of its config.json files, each with what transformers takes for a missing key
    where that is not what every family takes."""
    aliases: tuple[str, ...]
    """Other names for --model-type-hf."""
    shape: Callable[[HfConfig, Collection[str]], ModelShape]
    """Takes the config and the names of the HF tensors, of which some settings can only be seen."""
    table: WeightTable
    ignored: tuple[str, ...] = ()
    """Keys of its config.json files that change no number, beside those of config_keys."""
