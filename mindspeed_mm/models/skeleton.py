"""A model without weights, on the meta device: enough to plan for, and built in seconds."""

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mindspeed.config import ConfigError, did_you_mean


def build_skeleton(source: str) -> nn.Module:
    """Build a model from package.module:function or from a folder with a config.json."""
    with torch.device("meta"):
        return _from_function(source) if ":" in source else _from_folder(Path(source))


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
        architecture = json.loads(path.read_text(encoding="utf-8"))["architectures"][0]
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"{path}: names no model class under architectures") from None
    import transformers

    model_class = getattr(transformers, str(architecture), None)
    if model_class is None:
        raise ConfigError(
            f"{path}: transformers {transformers.__version__} has no {architecture}: "
            "install one that has, or give package.module:function"
        )
    return _without_weights(model_class, path)


def _without_weights(model_class: Any, path: Path) -> nn.Module:
    try:
        config = model_class.config_class.from_pretrained(path.parent, local_files_only=True)
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    model: nn.Module = model_class._from_config(config)
    return model
