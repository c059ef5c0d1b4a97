"""A run whose device has no memory left says what would have helped."""

from collections.abc import Callable
from typing import TypeVar

from mindspeed import device
from mindspeed.training.entry import OutOfMemory
from mindspeed.tune.memory_model import Changes, MemoryModel, advice

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
