"""A model without weights, on the meta device: enough to plan for, and built in seconds."""

import importlib
import inspect
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mindspeed.config import ConfigError, did_you_mean, parse_json
from mindspeed_mm.models.options import ModelConfig
from mindspeed_mm.packages import transformers_class
from mindspeed_mm.refusals import explained


def build_skeleton(source: str) -> nn.Module:
    """Build a model from package.module:function or from a folder with a config.json."""
    with torch.device("meta"):
        return _from_function(source) if ":" in source else _from_folder(Path(source))


def trained_skeleton(config: ModelConfig) -> nn.Module:
    """Build what a model section names, frozen and with adapters as it says."""
    from mindspeed_mm.models.transformers_model import TransformersModel

    return TransformersModel(config).unwrapped()


def _from_function(source: str) -> nn.Module:
    name, _, attribute = source.partition(":")
    try:
        module = importlib.import_module(name)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"model {source}: {name} cannot be imported ({error})") from None
    function = getattr(module, attribute, None)
    if not callable(function):
        hint = did_you_mean(attribute, (key for key in vars(module) if not key.startswith("_")))
        raise ConfigError(f"model {source}: {name} has no function {attribute}; {hint}")
    try:
        with suppress(ValueError):  # something built in does not say what it takes
            inspect.signature(function).bind()
    except TypeError as error:
        raise ConfigError(
            f"model {source}: {attribute} is called without arguments, but has a {error}: write a "
            "function that calls it"
        ) from None
    model = function()
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model {source}: the function returned a {type(model).__name__}: "
            "it has to return a torch.nn.Module"
        )
    return model


def _from_folder(folder: Path) -> nn.Module:
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"model {folder}: there is no {path}: give a Hugging Face folder, "
            "or package.module:function"
        )
    try:
        architecture = parse_json(path.read_text(encoding="utf-8"))["architectures"][0]
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"{path}: names no model class under architectures") from None
    import transformers

    model_class = transformers_class(str(architecture))
    if model_class is None:
        raise ConfigError(
            f"{path}: transformers {transformers.__version__} has no {architecture}: "
            "install one that has, or give package.module:function"
        )
    return _without_weights(model_class, path)


def _without_weights(model_class: Any, path: Path) -> nn.Module:
    with explained(str(path)):
        config = model_class.config_class.from_pretrained(path.parent, local_files_only=True)
        model: nn.Module = model_class._from_config(config)
    return model
