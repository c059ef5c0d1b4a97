"""Which parameters are trained: frozen modules, and low-rank adapters."""

from typing import Any

from torch import nn

from mindspeed.config import ConfigError, did_you_mean
from mindspeed.fsdp import Pattern
from mindspeed.fsdp.patterns import child_names
from mindspeed_mm.models.options import LoraConfig, ModelConfig

VISION = ("visual", "vision_tower", "vision_model", "image_encoder")
PROJECTORS = (
    "multi_modal_projector",
    "visual.merger",
    "visual.merger_list",
    "visual.deepstack_merger_list",
    "mlp1",
    "connector",
    "aligner",
)
DECODER, HEAD = ("language_model", "text_model"), ("lm_head",)


def freeze(model: nn.Module, config: ModelConfig) -> None:
    """Freeze the modules of the model section."""
    for module in matching(model, "freeze", config.freeze):
        module.requires_grad_(False)
    vision, projectors = _submodules(model, VISION), _submodules(model, PROJECTORS)
    projector_params = {p for module in projectors for p in module.parameters()}
    image = config.image_encoder
    if image.vision_encoder.freeze:
        _check_found("image_encoder.vision_encoder", vision, VISION)
        for parameter in {p for module in vision for p in module.parameters()} - projector_params:
            parameter.requires_grad_(False)
    if image.vision_projector.freeze:
        _check_found("image_encoder.vision_projector", projectors, PROJECTORS)
        for parameter in projector_params:
            parameter.requires_grad_(False)
    if config.text_decoder.freeze:
        decoder = _submodules(model, DECODER)
        _check_found("text_decoder", decoder, DECODER)
        for module in [*decoder, *_submodules(model, HEAD)]:
            module.requires_grad_(False)


def matching(model: nn.Module, key: str, patterns: tuple[str, ...]) -> list[nn.Module]:
    """Return the modules that match patterns; one that matches nothing is an error."""
    children = child_names(name for name, _ in model.named_modules(remove_duplicate=False))
    try:
        names = [name for pattern in patterns for name in Pattern(pattern).match(children)]
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
    return [model.get_submodule(name) for name in names]


def add_adapters(model: nn.Module, config: LoraConfig) -> None:
    """Add LoRA adapters to linear layers and train only them; module names stay."""
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
    except ImportError:
        raise ConfigError("lora needs the package peft: pip install peft") from None
    targets = _lora_targets(model, config)
    for name in targets:
        layer: Any = model.get_submodule(name)
        if config.r > max(layer.weight.shape):
            raise ConfigError(
                f"lora.r: {config.r}: {name} maps {layer.in_features} to {layer.out_features} "
                f"features: give at most {max(layer.weight.shape)}; more adds nothing"
            )
    settings = PeftConfig(
        r=config.r,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=targets,
        bias="none",
    )
    inject_adapter_in_model(settings, model)


def _lora_targets(model: nn.Module, config: LoraConfig) -> list[str]:
    """Return the full names of the layers that get an adapter."""
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    children = child_names(name for name, _ in model.named_modules(remove_duplicate=False))
    found: dict[str, None] = {}
    for target in config.target_modules:
        if "." in target or "{" in target:
            try:
                names = Pattern(target).match(children)
            except ConfigError as error:
                raise ConfigError(f"lora.target_modules: {error}") from None
            if wrong := [name for name in names if name not in linear]:
                raise ConfigError(f"lora.target_modules: {wrong[0]} is not a linear layer")
        else:
            names = [name for name in linear if name.rpartition(".")[2] == target]
        if not names:
            last = {name.rpartition(".")[2] for name in linear}
            raise ConfigError(
                f"lora.target_modules: {target} matches no linear layer; "
                f"{did_you_mean(target, last)}"
            )
        found |= dict.fromkeys(names)
    return list(found)


def _submodules(model: nn.Module, names: tuple[str, ...]) -> list[nn.Module]:
    """Return the modules of these names at the top level or in `.model`."""
    parents: list[Any] = [model, getattr(model, "model", None)]
    found = []
    for parent in parents:
        for name in names if isinstance(parent, nn.Module) else ():
            try:
                found.append(parent.get_submodule(name))
            except AttributeError:
                continue
    return found


def _check_found(key: str, found: list[nn.Module], names: tuple[str, ...]) -> None:
    if not found:
        raise ConfigError(
            f"{key}: freeze: the model has none of {', '.join(names)}: list the modules in "
            "freeze: [...] instead"
        )
