"""Mixins that make a model trainable with FSDP2, and the steps for overrides."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch.distributed
from torch import nn
from torch.distributed import ProcessGroup

from mindspeed.config import ConfigError, load_yaml
from mindspeed.fsdp import FsdpOptions, Sharding
from mindspeed_mm.models.meta_device import init_module, initialize

Modules = Sequence[str | nn.Module]
"""Patterns as in the YAML file, or modules."""

_current: ContextVar["FSDP2Mixin"] = ContextVar("model that is being sharded")


class WeightInitMixin:
    """Initializes a model that was built without weights."""

    def _init_weights(self, module: nn.Module, std: float = 0.02) -> None:
        """Initialize the parameters of one module; override it for other rules."""
        init_module(module, std)

    def init_weights(self) -> None:
        """Initialize all parameters, sharded or not, by `_init_weights`."""
        assert isinstance(self, nn.Module)
        initialize(self)


class FSDP2Mixin:
    """Shards the model it is mixed into; override `_fully_shard` for another strategy."""

    fsdp2_config: FsdpOptions
    fsdp2_kwargs: dict[str, Any]
    sharding: Sharding

    def fully_shard(
        self,
        process_group: ProcessGroup | None = None,
        fsdp2_config: FsdpOptions | str | os.PathLike[str] | None = None,
    ) -> bool:
        """Run all three steps with a file or an object of options; return True."""
        self._pre_fully_shard(process_group, fsdp2_config)
        with _being_sharded(self):
            self._fully_shard(self.fsdp2_kwargs, self.fsdp2_config)
        self._post_fully_shard()
        return True

    def _pre_fully_shard(
        self,
        process_group: ProcessGroup | None,
        fsdp2_config: FsdpOptions | str | os.PathLike[str] | None,
    ) -> None:
        """Read the options and make the plan."""
        _check_all_ranks(process_group)
        if fsdp2_config is None:
            fsdp2_config = FsdpOptions()
        elif not isinstance(fsdp2_config, FsdpOptions):
            fsdp2_config = load_yaml(fsdp2_config, FsdpOptions)
        assert isinstance(self, nn.Module)
        self.sharding = Sharding(self, fsdp2_config)
        self.fsdp2_config = fsdp2_config
        self.fsdp2_kwargs = dict(self.sharding.kwargs)

    def _fully_shard(
        self,
        fsdp2_kwargs: dict[str, Any] | None = None,
        fsdp2_config: FsdpOptions | None = None,
    ) -> None:
        """Recompute, shard and prefetch according to the options."""
        self.set_recompute_modules_to_wrap()
        self.set_fullyshard_modules_to_wrap()
        self.set_modules_to_prefetch()

    def _post_fully_shard(self) -> None:
        """Do nothing; a hook called after sharding."""

    def set_recompute_modules_to_wrap(
        self, modules: Modules | None = None, use_reentrant: bool | None = None
    ) -> None:
        """Recompute the activations of these modules, by default those of the options."""
        keys: dict[str, Any] = {}
        if modules is not None:
            keys["recompute_modules"] = self._names(modules)
        if use_reentrant is not None:
            keys["use_reentrant"] = use_reentrant
        self.sharding.change(**keys)
        self.sharding.recompute()

    def set_fullyshard_modules_to_wrap(
        self, modules: Modules | None = None, **fsdp2_kwargs: Any
    ) -> None:
        """Shard these modules, by default those of the options, and the model around them."""
        if modules is not None:
            self.sharding.change(sub_modules_to_wrap=self._names(modules))
        self.sharding.wrap(**fsdp2_kwargs)

    def set_modules_to_prefetch(
        self,
        num_to_forward_prefetch: int | None = None,
        num_to_backward_prefetch: int | None = None,
    ) -> None:
        """Prefetch this many modules, by default as many as in the options."""
        numbers = {
            "num_to_forward_prefetch": num_to_forward_prefetch,
            "num_to_backward_prefetch": num_to_backward_prefetch,
        }
        self.sharding.change(**{key: n for key, n in numbers.items() if n is not None})
        self.sharding.prefetch()

    def _names(self, modules: Modules) -> list[str]:
        assert isinstance(self, nn.Module)
        names = {module: name for name, module in self.named_modules()}
        for module in modules:
            if not isinstance(module, str) and module not in names:
                raise ConfigError(f"a {type(module).__name__} is not a module of the sharded model")
        return [module if isinstance(module, str) else names[module] for module in modules]


def set_recompute_modules_to_wrap(
    base_model: FSDP2Mixin | None = None,
    modules: Modules | None = None,
    use_reentrant: bool | None = None,
) -> None:
    """Recompute modules of a model, by default of the one whose `_fully_shard` is running."""
    _model(base_model).set_recompute_modules_to_wrap(modules, use_reentrant)


def set_fullyshard_modules_to_wrap(
    base_model: FSDP2Mixin | None = None, modules: Modules | None = None, **fsdp2_kwargs: Any
) -> None:
    """Shard modules of a model, by default of the one whose `_fully_shard` is running."""
    _model(base_model).set_fullyshard_modules_to_wrap(modules, **fsdp2_kwargs)


def set_modules_to_prefetch(*given: Any) -> None:
    """Prefetch modules; takes (forward, backward), a model and these two, or nothing."""
    model = given[0] if given and isinstance(given[0], FSDP2Mixin) else None
    _model(model).set_modules_to_prefetch(*given[0 if model is None else 1 :])


@contextmanager
def _being_sharded(model: FSDP2Mixin) -> Iterator[None]:
    token = _current.set(model)
    try:
        yield
    finally:
        _current.reset(token)


def _model(given: FSDP2Mixin | None) -> FSDP2Mixin:
    model = given if given is not None else _current.get(None)
    if model is None:
        raise ConfigError(
            "no model is being sharded: call this within _fully_shard, or pass the model"
        )
    return model


def _check_all_ranks(group: ProcessGroup | None) -> None:
    if group is not None and group.size() != torch.distributed.get_world_size():
        raise ConfigError(
            f"fully_shard over {group.size()} of {torch.distributed.get_world_size()} ranks: use "
            "all of them; sharding_size sets how many shard one replica of the model"
        )
