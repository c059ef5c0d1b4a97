"""Batches of Megatron's scripts without broadcasts in tensor-parallel groups of one rank."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from packaging.version import Version

from mindspeed import config
from mindspeed.compat import megatron
from mindspeed.features.base import Feature, Level
from mindspeed.patching import Patch

WITHOUT_COUNT = Version("0.18")
"""From here on Megatron sends no count of documents, for which the host waited."""


class LocalBatches(Feature):
    """Return batches without broadcasts where a tensor-parallel group has one rank."""

    name = "local_batches"
    title = "Batches without broadcasts"
    group = "Comm"
    level = Level.AFFINITY
    enabled_by = "skip_batch_broadcasts"
    default_devices = ("cuda",)

    class Options(config.Options):
        """The switch."""

        skip_batch_broadcasts: bool | None = None
        """Send no batch of Megatron's scripts where its tensor-parallel group has one rank.
        Default: on CUDA."""

    def patches(self, options: Any) -> Iterator[Patch]:
        """Wrap the function through which the scripts get their batches."""
        if megatron.has_training() and megatron.version() < WITHOUT_COUNT:
            yield Patch.wrap(
                "megatron.training.utils:get_batch_on_this_tp_rank",
                wrap_get_batch,
                why="the host waits for the device in every micro-batch",
            )


def wrap_get_batch(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return a batch without broadcasts where the group has one rank.

    The first batch, which Megatron builds, defines the keys.
    """
    names: list[str] = []

    @functools.wraps(original)
    def get_batch(data_iterator: Iterator[Any] | None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        from megatron.core import parallel_state

        if names and parallel_state.get_tensor_model_parallel_world_size() == 1:
            assert data_iterator is not None
            data = next(data_iterator)
            return {name: _to_device(data.get(name)) for name in names}
        batch = original(data_iterator, *args, **kwargs)
        names[:] = batch
        return batch

    return get_batch


def _to_device(value: Any) -> Any:
    if value is None:
        return None
    from mindspeed import device  # imports torch, which listing the features must not need

    return value.to(device.current().torch_device, non_blocking=True)
