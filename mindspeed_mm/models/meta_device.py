"""Models on the meta device: build without weights, allocate sharded memory, initialize."""

import importlib
import inspect
import math
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import mindspeed.device
from mindspeed.checkpoint.file_io import aligned
from mindspeed.config import ConfigError, did_you_mean, parse_json
from mindspeed_mm.models.options import ModelConfig
from mindspeed_mm.optional_packages import transformers_class
from mindspeed_mm.transformers_errors import config_errors

NORMAL = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d),
    nn.Embedding,
)
"""Classes whose weights are normal, whatever their names."""


def build_meta_model(source: str) -> nn.Module:
    """Build a model from package.module:function or from a folder with a config.json."""
    with torch.device("meta"):
        return _from_function(source) if ":" in source else _from_folder(Path(source))


def build_configured_meta_model(config: ModelConfig) -> nn.Module:
    """Build the model of a model section, with its frozen modules and adapters."""
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
        with suppress(ValueError):  # builtins have no signature
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
            f"model {folder}: {path} does not exist: give a Hugging Face folder, "
            "or package.module:function"
        )
    try:
        architecture = parse_json(path.read_text(encoding="utf-8"))["architectures"][0]
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"{path}: has no model class under architectures") from None
    import transformers

    model_class = transformers_class(str(architecture))
    if model_class is None:
        raise ConfigError(
            f"{path}: transformers {transformers.__version__} has no {architecture}: "
            "install a version that has it, or give package.module:function"
        )
    return _from_config(model_class, path)


def _from_config(model_class: Any, path: Path) -> nn.Module:
    with config_errors(str(path)):
        config = model_class.config_class.from_pretrained(path.parent, local_files_only=True)
        model: nn.Module = model_class._from_config(config)
    return model


def copy_local(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy this rank's shard of full values into a parameter, sharded or not."""
    with torch.no_grad():
        target = target.detach()
        if not isinstance(target, DTensor):
            target.copy_(aligned(values))
            return
        shape, offset = compute_local_shape_and_global_offset(
            target.shape, target.device_mesh, target.placements
        )
        local = tuple(slice(start, start + size) for start, size in zip(offset, shape))
        target.to_local().copy_(aligned(values[local]))


def local_experts(module: nn.Module, values: torch.Tensor) -> torch.Tensor:
    """Return the rows of this rank's experts, if a module is expert-parallel."""
    rank, size = getattr(module, "expert_shard", (0, 1))
    return values.chunk(size)[rank] if size > 1 else values


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Build models with parameters on meta; buffers, which may be computed, are allocated."""
    plain = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            with torch.device("meta"):
                empty = torch.empty_like(param, device="meta")
            attributes = {**vars(param), "requires_grad": param.requires_grad}
            param = _with(type(param)(empty, requires_grad=False), attributes)
        plain(module, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        with torch.device("cpu"):
            yield
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]


def allocate(model: nn.Module, device: torch.device | None, offload: bool) -> None:
    """Allocate parameters on meta and move all others to the device; ties stay.

    Without a device: the current one; with `offload`, shards stay in host memory.
    """
    tied = _tied(model)
    here = mindspeed.device.current().torch_device
    shards = device or (torch.device("cpu") if offload else here)

    def allocated(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            target = shards if isinstance(tensor, DTensor) else device or here
            return torch.empty_like(tensor, device=target)
        return tensor if isinstance(tensor, DTensor) else tensor.to(device or here)

    model._apply(allocated)
    for (module, name), *others in tied:
        for other, key in others:
            other._parameters[key] = module._parameters[name]


def tied_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Return for every name the names of the same tensor, including itself."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return {name: names[id(tensor)] for name, tensor in tensors.items()}


def _tied(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the modules and names of every parameter that is tied."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(parameter, []).append((module, name))
    return [found for found in owners.values() if len(found) > 1]


def _with(parameter: nn.Parameter, attributes: dict[str, Any]) -> nn.Parameter:
    for name, value in attributes.items():
        setattr(parameter, name, value)
    return parameter


def init_module(module: nn.Module, std: float = 0.02) -> None:
    """Initialize a module's own parameters: weights normal, biases zero, norms one."""
    is_norm = not isinstance(module, NORMAL) and "norm" in type(module).__name__.lower()
    for name, parameter in module.named_parameters(recurse=False):
        if "bias" in name:
            nn.init.zeros_(parameter)
        elif is_norm:
            nn.init.ones_(parameter)
        else:
            nn.init.normal_(parameter, std=std)
    padding = getattr(module, "padding_idx", None)
    if isinstance(module, nn.Embedding) and padding is not None:
        with torch.no_grad():
            module.weight[padding].zero_()


@torch.no_grad()
def initialize(model: nn.Module) -> None:
    """Initialize every parameter by `_init_weights` of its model, else by `init_module`.

    Every rank initializes each full module, one at a time, and keeps its shard: the result is the
    same for any number of ranks. All ranks must have the same seed.
    """
    done: set[torch.Tensor] = set()
    for module, rule in _with_rules(model, init_module):
        own = {name: p for name, p in module._parameters.items() if p is not None}
        if not own or all(p in done for p in own.values()):
            continue
        with torch.device("cpu"):
            full = {name: nn.Parameter(_full_like(p, module)) for name, p in own.items()}
        try:
            module._parameters.update(full)
            init_module(module)
            rule(module)
        finally:
            module._parameters.update(own)
        for name, parameter in own.items():
            if parameter not in done:
                copy_local(parameter, local_experts(module, full[name]))
                done.add(parameter)
    initialize_adapters(model)


@torch.no_grad()
def initialize_adapters(model: nn.Module, names: Container[str] | None = None) -> None:
    """Initialize low-rank adapters like peft: their output is zero at first."""
    for name, parameter in model.named_parameters():
        if names is not None and name not in names:
            continue
        if ".lora_A." in name:
            full = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
            copy_local(parameter, nn.init.kaiming_uniform_(full, a=math.sqrt(5)))
        elif ".lora_B." in name:
            parameter.zero_()


def _full_like(parameter: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """Return memory for the unsharded parameter, with the experts of all ranks."""
    _, ranks = getattr(module, "expert_shard", (0, 1))
    shape = (parameter.shape[0] * ranks, *parameter.shape[1:]) if ranks > 1 else parameter.shape
    return torch.empty(shape, dtype=parameter.dtype)


def _with_rules(module: nn.Module, rule: Any) -> Iterator[tuple[nn.Module, Any]]:
    """Yield every module with the `_init_weights` of the innermost model that has one."""
    rule = getattr(module, "_init_weights", rule)
    yield module, rule
    for child in module.children():
        yield from _with_rules(child, rule)
