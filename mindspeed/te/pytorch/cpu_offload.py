"""Keep the activations of the first layers in host memory between forward and backward."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from mindspeed import device
from mindspeed.memory.swap import MIN_BYTES, Region, Swapper

logger = logging.getLogger(__name__)


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    *,
    retain_pinned_cpu_buffers: bool = False,
) -> tuple[OffloadContext, Callable[[Tensor], Tensor]]:
    """Return the context for each layer's forward, and the function to call after each layer.

    Args:
        enabled: whether anything is offloaded.
        num_layers: how many layers, from the first one on.
        model_layers: layers of the model, after which counting starts again.
        offload_activations: tensors saved for backward; the only thing that is offloaded.
        offload_weights: has no effect, since the weights stay on the device for the optimizer.
        double_buffering: has no effect: what backward needs next is brought back ahead.
        retain_pinned_cpu_buffers: has no effect: host memory is always kept for reuse.
    """
    if enabled and not (offload_activations or offload_weights):
        raise ValueError(
            "CPU offloading is on and neither activations nor weights are to be offloaded: "
            "set cpu_offloading_activations=True"
        )
    if enabled and offload_weights:
        logger.warning("cpu_offloading_weights has no effect: the optimizer needs them there")
    context = OffloadContext(num_layers if enabled and offload_activations else 0, model_layers)
    return context, context.next_layer


class OffloadContext:
    """Entered around each layer in turn; does nothing on a device that shares the host's memory."""

    def __init__(self, num_layers: int, model_layers: int, min_bytes: int = MIN_BYTES) -> None:
        self.inside_context = False
        self._num_layers = num_layers
        self._model_layers = model_layers
        self._min_bytes = min_bytes
        self._layer = 0
        self._swapper: Swapper | None = None
        self._region: Region | None = None

    def __enter__(self) -> None:
        self.inside_context = True
        if self._active():
            self._swapper = self._swapper or Swapper(self._min_bytes)
            previous = self._region if self._layer else None
            self._region = Region(self._swapper, previous)
            self._region.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self.inside_context = False
        if self._active() and self._region is not None:
            self._region.__exit__(*exception)

    def next_layer(self, hidden: Tensor) -> Tensor:
        """Count one layer as done and return its output unchanged."""
        # A region waits for the next one to leave the device: behind the last there is none.
        if self._swapper is not None and not self.layer_is_offloaded():
            self._swapper.release()
        self._layer = (self._layer + 1) % self._model_layers
        return hidden

    def layer_is_offloaded(self) -> bool:
        """Whether the present layer is one of those to offload."""
        return self._layer < self._num_layers

    def _active(self) -> bool:
        return self.layer_is_offloaded() and device.current().name != "cpu"
