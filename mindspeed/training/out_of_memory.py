"""A run whose device has no memory left says what would have helped."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mindspeed import device
from mindspeed.training.entry import OutOfMemory
from mindspeed.tune.memory_model import MemoryModel, advice


@contextmanager
def advise(model: Callable[[], MemoryModel]) -> Iterator[None]:
    """Turn the device's error inside into one line that names features which save memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        here = device.current()
        if not here.is_out_of_memory(error):
            raise
        # Its traceback holds the tensors of the step.
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise OutOfMemory(f"{reason}; {advice(model(), here.memory_total())}") from None
