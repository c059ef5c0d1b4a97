"""A run whose device has no memory left says what would have helped."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from mindspeed import device
from mindspeed.training.entry import OutOfMemory
from mindspeed.tune.memory_model import Changes, MemoryModel, advice
from mindspeed.tune.run_memory import memory_model

T = TypeVar("T")


def with_advice(
    run: Callable[[], T], model: Callable[[], MemoryModel], accepts: Callable[[Changes], bool]
) -> T:
    """Return what `run` returns; where the device has no memory left, raise one line with advice.

    Args:
        run: the run.
        model: returns its memory.
        accepts: whether the run would accept further options.
    """
    try:
        return run()
    except (RuntimeError, MemoryError) as error:
        here = device.current()
        if not here.is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        said = f"{reason}; {advice(model(), here.memory_total(), accepts)}"
    # Outside of the handler: the error has a traceback, which holds the tensors of the step, and
    # an exception that is raised inside would keep it.
    raise OutOfMemory(said)


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
