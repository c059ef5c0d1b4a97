"""The average of FusedEmaAdam in Megatron's checkpoints: as optimizer state, and as `ema_model`.

Megatron's distributed optimizer names the states it saves. The average travels through the same
code in the place of the first moment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from mindspeed.te.pytorch.optimizers.fused_ema_adam import AVERAGE, FusedEmaAdam

State = dict[Any, Any]
_averaged_model: ContextVar[State | None] = ContextVar("averaged_model", default=None)


def wrap_optimizer_init(original: Callable[..., None]) -> Callable[..., None]:
    """Let the state that Megatron creates before it loads a checkpoint have an average too."""

    @functools.wraps(original)
    def __init__(self: Any, optimizer: Any, config: Any, init_state_fn: Any = None) -> None:
        original(self, optimizer, config, _completed(init_state_fn))

    return __init__


def wrap_get_parameter_state(original: Callable[..., State | None]) -> Callable[..., State | None]:
    """Add the average to the state that is gathered on the first data-parallel rank."""

    @functools.wraps(original)
    def get_parameter_state_dp_zero(self: Any, *args: Any, **kwargs: Any) -> State | None:
        state = original(self, *args, **kwargs)
        if not isinstance(self.optimizer, FusedEmaAdam):
            return state
        with _hidden_averages(self.optimizer, as_first_moment=True):
            averages = original(self, *args, **kwargs)
        for key, tensors in _buffers(state):
            tensors[AVERAGE] = dict(_buffers(averages))[key]["exp_avg"]
        return state

    return get_parameter_state_dp_zero


def wrap_load_parameter_state(original: Callable[..., None]) -> Callable[..., None]:
    """Scatter the average as well; where it was not saved, it starts as the weights."""

    @functools.wraps(original)
    def load_parameter_state_from_dp_zero(
        self: Any, state_dict: State | None, *args: Any, **kwargs: Any
    ) -> None:
        if not isinstance(self.optimizer, FusedEmaAdam):
            original(self, state_dict, *args, **kwargs)
            return
        self.optimizer.complete_state()
        with _hidden_averages(self.optimizer):
            original(self, state_dict, *args, **kwargs)
        averages = None if state_dict is None else _averages_as_first_moment(state_dict)
        with _hidden_averages(self.optimizer, as_first_moment=True):
            original(self, averages, *args, **kwargs)

    return load_parameter_state_from_dp_zero


def wrap_save_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gather the averaged model on every rank, before one of them writes the file."""

    @functools.wraps(original)
    def save_checkpoint(
        iteration: int, model: list[Any], optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        from megatron.training.global_vars import get_args

        is_plain = getattr(get_args(), "ckpt_format", "torch") == "torch"
        token = _averaged_model.set(averaged_model(model, optimizer) if is_plain else None)
        try:
            return original(iteration, model, optimizer, *args, **kwargs)
        finally:
            _averaged_model.reset(token)

    return save_checkpoint


def wrap_generate_state_dict(original: Callable[..., State]) -> Callable[..., State]:
    """Put the averaged model beside the model in model_optim_rng.pt."""

    @functools.wraps(original)
    def generate_state_dict(*args: Any, **kwargs: Any) -> State:
        return original(*args, **kwargs) | (_averaged_model.get() or {})

    return generate_state_dict


def averaged_model(model: list[Any], optimizer: Any) -> State:
    """Return the weights' averages as `ema_model` (`ema_model0`, ... of virtual stages) on cpu."""
    found = [part for part in _parts(optimizer) if isinstance(part.optimizer, FusedEmaAdam)]
    if not found:
        return {}
    with _averages_as_weights(found):
        states = [_on_cpu(chunk.state_dict_for_save_checkpoint()) for chunk in model]
    if len(states) == 1:
        return {"ema_model": states[0]}
    return {f"ema_model{index}": state for index, state in enumerate(states)}


def _completed(init_state: Callable[..., None] | None) -> Callable[..., None] | None:
    if init_state is None:
        return None

    def create(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        init_state(optimizer, *args, **kwargs)
        if isinstance(optimizer, FusedEmaAdam):
            optimizer.complete_state()

    return create


def _buffers(state: State | None) -> Iterator[tuple[tuple[int, Any], State]]:
    """Yield the states of every gradient buffer and type; ranks but the first may have none."""
    for index, by_type in (state or {}).items():
        if isinstance(index, int):
            found = (((index, dtype), tensors) for dtype, tensors in by_type.items())
            yield from (pair for pair in found if "exp_avg" in pair[1])


def _averages_as_first_moment(state: State) -> State:
    """Return the state with each average, or the weights where none was saved, as `exp_avg`."""
    averages = dict(state)
    for (index, dtype), tensors in _buffers(state):
        moved = tensors | {"exp_avg": tensors.get(AVERAGE, tensors["param"])}
        averages[index] = averages[index] | {dtype: moved}
    return averages


@contextmanager
def _hidden_averages(adam: FusedEmaAdam, *, as_first_moment: bool = False) -> Iterator[None]:
    """Show Megatron the two moments it knows, or the average in the place of the first."""
    hidden = {param: state.pop(AVERAGE) for param, state in adam.state.items() if AVERAGE in state}
    moments = {param: adam.state[param]["exp_avg"] for param in hidden}
    if as_first_moment:
        for param, average in hidden.items():
            adam.state[param]["exp_avg"] = average
    try:
        yield
    finally:
        for param, average in hidden.items():
            adam.state[param].update(exp_avg=moments[param], **{AVERAGE: average})


@contextmanager
def _averages_as_weights(parts: list[Any]) -> Iterator[None]:
    @torch.no_grad()
    def swap() -> None:
        for part in parts:
            for param, average in part.optimizer.averages().items():
                weight = param.detach().clone()
                param.detach().copy_(average)
                average.copy_(weight)
            if hasattr(part, "_copy_main_params_to_model_params"):
                part._copy_main_params_to_model_params()
            for chunk in getattr(part, "model_chunks", ()):
                chunk.start_param_sync(force_sync=True)

    swap()
    try:
        yield
    finally:
        swap()


def _parts(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _on_cpu(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {name: _on_cpu(value) for name, value in state.items()}
    return state
