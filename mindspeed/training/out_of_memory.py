"""A run whose device has no memory left says what would have helped."""

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from mindspeed import device
from mindspeed.training import entry
from mindspeed.tune.memory_model import Changes, MemoryModel, advice
from mindspeed.tune.run_memory import memory_model

logger = logging.getLogger(__name__)

T = TypeVar("T")


class OutOfMemory(entry.OutOfMemory, torch.OutOfMemoryError):
    """What scripts catch as torch's error."""


def with_advice(
    run: Callable[[], T], model: Callable[[], MemoryModel], accepts: Callable[[Changes], bool]
) -> T:
    """Return what `run` returns; where the device has no memory left, raise one line with advice.

    The error of the allocator stays as it is where there is no advice.

    Args:
        run: the run.
        model: returns its memory.
        accepts: whether the run would accept further options.
    """
    try:
        return run()
    except entry.OutOfMemory:
        raise  # an inner run has advised
    except (RuntimeError, MemoryError) as error:
        if not device.current().is_out_of_memory(error):
            raise
        advised = _advice(model, accepts)
        if advised is None:
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        said = f"{reason}; {advised}"
    # Outside of the handler: the error has a traceback, which holds the tensors of the step, and
    # an exception that is raised inside would keep it.
    raise OutOfMemory(said)


def _advice(model: Callable[[], MemoryModel], accepts: Callable[[Changes], bool]) -> str | None:
    """Return the advice, None where too little is known about the run."""
    try:
        return advice(model(), device.current().memory_total(), accepts)
    except Exception as error:  # whatever it is, it must not hide that memory ran out
        logger.debug("no advice: %r", error)
        return None


Arguments = Callable[[], Mapping[str, Any]]
Accepts = Callable[[Changes], bool]


def wrap_setup(
    original: Callable[..., Any], arguments: Arguments, accepts: Accepts
) -> Callable[..., Any]:
    """Advise when the model or the optimizer of a Megatron-LM script does not fit."""

    @functools.wraps(original)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        return with_advice(
            lambda: original(*args, **kwargs), lambda: memory_model(arguments()), accepts
        )

    return setup_model_and_optimizer


def wrap_train(
    original: Callable[..., Any], arguments: Arguments, accepts: Accepts
) -> Callable[..., Any]:
    """Advise when the train loop of a Megatron-LM script runs out of memory."""

    @functools.wraps(original)
    def train(forward_step_func: Any, model: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        parameters = [p for chunk in model for p in chunk.parameters()]
        return with_advice(
            lambda: original(forward_step_func, model, *args, **kwargs),
            lambda: memory_model(arguments(), parameters),
            accepts,
        )

    return train
