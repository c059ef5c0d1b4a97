"""The callbacks of a script, in the short form of the document and in Megatron's full form."""

import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed import device
from mindspeed.config import ConfigError

NumSamples = tuple[int | None, int, int]
"""How many samples training, validation and test will take; None with --epochs."""


@dataclass(frozen=True)
class Callbacks:
    """What a script gives: get_batch and loss_func are called by, or come from, forward_step."""

    model_provider: Callable[..., Any]
    datasets_provider: Callable[..., Any]
    forward_step: Callable[..., Any]
    show: Callable[[list[Any], int, Any], Any] | None = None
    """Megatron's process_non_loss_data_func: at evaluations it gets what loss functions return for
    non_loss_data=True, the iteration and TensorBoard's writer."""

    def model(self) -> nn.Module:
        """Call model_provider with what it takes of pre_process and post_process."""
        offered = {"pre_process": True, "post_process": True}
        taken = inspect.signature(self.model_provider).parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken):
            names = {parameter.name for parameter in taken}
            offered = {name: value for name, value in offered.items() if name in names}
        model = self.model_provider(**offered)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model_provider returned {_kind(model)}: return a torch.nn.Module")
        return model

    def datasets(self, counts: NumSamples) -> tuple[Any, Any, Any]:
        """Call the data provider, with the numbers of samples if it takes an argument."""
        provider = self.datasets_provider
        try:
            inspect.signature(provider).bind(counts)
        except TypeError:
            found = provider()
        else:
            found = provider(counts)
        if not isinstance(found, (tuple, list)) or len(found) != 3:
            raise ConfigError(
                f"{provider.__name__} returned {_kind(found)}: return three data loaders, for "
                "training, validation and test; None where there is none"
            )
        return tuple(found)

    def loss(self, batches: Iterator[Any], model: nn.Module) -> "MicroLoss":
        """Run forward_step on the next micro-batch, and the loss function that it returns."""
        with _explained():
            output, loss_func = self._forward(batches, model)
            return read_loss(loss_func(output))

    def to_show(self, batches: Iterator[Any], model: nn.Module) -> Any:
        """Run forward_step on the next micro-batch; return what is to be shown of it."""
        output, loss_func = self._forward(batches, model)
        return loss_func(output, non_loss_data=True)

    def _forward(self, batches: Iterator[Any], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
        result = self.forward_step(batches, model)
        if not isinstance(result, tuple) or len(result) != 2 or not callable(result[1]):
            raise ConfigError(
                f"forward_step returned {_kind(result)}: return the output and the loss function"
            )
        return result


@contextmanager
def _explained() -> Iterator[None]:
    """Add to torch's error about a sharded weight what to do."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        # Whatever torch says, and that differs by version, DTensor is the class of a shard.
        if DTensor.__name__ in str(error):
            raise RuntimeError(
                f"{error}\nFSDP2 gathers the weights of a unit only while the forward of its "
                "module runs: call the model itself, not another method of it, use no weight in "
                "forward_step or loss_func, and name no module in sub_modules_to_wrap whose "
                "weights another one reads, such as out_proj of nn.MultiheadAttention"
            ) from error
        raise


@dataclass(frozen=True)
class MicroLoss:
    """The loss of a micro-batch: its mean or, with the number of tokens, its sum."""

    value: torch.Tensor
    tokens: torch.Tensor | None = None
    logs: Mapping[str, Any] = field(default_factory=dict)
    """Metrics to report: a number, or a sum and its count."""


def read_loss(found: Any) -> MicroLoss:
    """Take what a loss function returned.

    That is a loss; a loss and metrics; or, as in Megatron, the sum of losses, the number of
    tokens and metrics.
    """
    if isinstance(found, torch.Tensor):
        found = (found, {"loss": found.detach()})
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        raise ConfigError(
            f"loss_func returned {_kind(found)}: return a loss, (loss, dict) or "
            "(sum of losses, number of tokens, dict)"
        )
    loss, *tokens, logs = found
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise ConfigError(
            f"loss_func returned {_kind(loss)} as loss: return a tensor of one number"
        )
    if isinstance(loss, DTensor):
        raise ConfigError(
            "loss_func returned a loss that is computed from sharded weights, outside of the "
            "forward of their module: compute such a term within it; for a penalty on the size of "
            "weights give --weight-decay"
        )
    if not isinstance(logs, Mapping):
        raise ConfigError(f"loss_func returned {_kind(logs)} as metrics: return a dict")
    count = on_device(tokens[0], loss.device) if tokens else None
    return MicroLoss(loss.reshape(()), count, logs)


def on_device(value: Any, where: torch.device) -> torch.Tensor:
    """Bring a tensor or a number to a device; a number is not copied, which would wait for it."""
    if isinstance(value, (int, float)):
        return torch.full((), value, dtype=torch.float32, device=where)
    return torch.as_tensor(value, device=where).detach()


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def move_to_device(batch: Any, dtype: torch.dtype | None = None) -> Any:
    """Move a batch to the device, in place where it is a mapping or a list, and return it.

    Every tensor in it moves, however deep; floating ones are cast to `dtype`, if it is given.
    What is no tensor stays as it is.
    """
    if isinstance(batch, torch.Tensor):
        target = dtype if batch.is_floating_point() else None
        return batch.to(device.current().torch_device, target, non_blocking=True)
    if isinstance(batch, MutableMapping):  # a dict, or the BatchFeature of transformers
        batch.update({key: move_to_device(value, dtype) for key, value in batch.items()})
    elif isinstance(batch, list):
        batch[:] = [move_to_device(value, dtype) for value in batch]
    elif isinstance(batch, tuple):
        values = [move_to_device(value, dtype) for value in batch]
        # A named tuple keeps its names, as in torch's default_collate.
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    return batch
