"""Bitwise repeatable runs."""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mindspeed import config
from mindspeed.features.base import Effect, Feature, Level
from mindspeed.patching import Patch


class Deterministic(Feature):
    """Ask torch and the device's libraries for the same bits in every run."""

    name = "deterministic"
    title = "Deterministic computing"
    group = "Tools"
    level = Level.COMPAT
    enabled_by = "npu_deterministic"

    class Options(config.Options):
        """The switch, under the name that the documents use; it works on every device."""

        npu_deterministic: bool = False
        """Compute the same bits in every run with the same seed, on every device."""

    def effects(self, options: Any) -> Iterator[Effect]:
        """Choose deterministic algorithms at once: libraries read these settings when they load."""
        yield Effect("torch and the device choose deterministic algorithms", _deterministic())

    def patches(self, options: Any) -> Iterator[Patch]:
        """Wrap the function in which Megatron seeds."""
        yield Patch.wrap(
            "megatron.training.initialize:_set_random_seed",
            wrap_set_random_seed,
            why="the seed of Python's hashes must be known before worker processes start",
        )


@contextmanager
def _deterministic() -> Iterator[None]:
    import torch

    from mindspeed import device

    current = device.current()
    settings = {name: os.environ.get(name) for name in current.deterministic_env}
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    of_torch: Any = torch.utils.deterministic
    filled = of_torch.fill_uninitialized_memory
    current.make_deterministic()
    # No try/finally: at the end of the process there is nothing to undo, and no torch to ask.
    yield
    torch.use_deterministic_algorithms(was_deterministic)
    of_torch.fill_uninitialized_memory = filled
    for name, value in settings.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


def wrap_set_random_seed(original: Callable[..., None]) -> Callable[..., None]:
    """Let worker processes order their sets and dicts by the same seed."""

    @functools.wraps(original)
    def _set_random_seed(seed_: int, *args: Any, **kwargs: Any) -> None:
        os.environ["PYTHONHASHSEED"] = str(seed_)
        original(seed_, *args, **kwargs)

    return _set_random_seed
