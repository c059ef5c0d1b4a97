"""NVIDIA GPUs, where speed is measured."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from mindspeed.device.accelerator import Accelerator
from mindspeed.device.base import DeviceError

logger = logging.getLogger(__name__)

_CHANNEL_BYTES = 4 << 20
"""NCCL's buffer of one channel, unless NCCL_BUFFSIZE says otherwise."""
_MAX_CHANNELS = 32
"""More are not used between GPUs of one generation."""


class Cuda(Accelerator):
    """Megatron's native device: nothing is redirected, so nothing is slower."""

    name = "cuda"
    backend = "nccl"
    # cuBLAS needs a fixed workspace and NCCL a fixed algorithm to sum in the same order every run.
    deterministic_env = {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "Simple",
    }
    overlaps_kernels = True
    group_buffers = "NCCL's max_ctas, one channel for each NCCL_BUFFSIZE (4 MiB)"

    def unusable_reason(self) -> str | None:
        """Return what torch lacks to use a GPU."""
        if torch.version.cuda is None:
            return f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch"
        if not torch.cuda.is_available():
            return "torch finds no CUDA device: check the driver and CUDA_VISIBLE_DEVICES"
        return None

    def facade(self) -> AbstractContextManager[object]:
        """Redirect nothing."""
        return nullcontext()

    can_record = True

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Capture a CUDA graph of a step, after one run that compiles its kernels."""
        current = torch.cuda.current_stream()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            step()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads copy batches to the device meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                step()
        finally:
            torch.cuda.set_stream(current)  # a capture that fails does not leave its own
        replay: Callable[[], None] = graph.replay
        return replay

    def multiprocessors(self) -> int:
        """Return the streaming multiprocessors of the current device."""
        return int(torch.cuda.get_device_properties(self.index()).multi_processor_count)

    def capability(self) -> tuple[int, int]:
        """Return the compute capability of the current device."""
        return torch.cuda.get_device_capability(self.index())

    def group_options(self, buffer_mib: int, options: Any = None) -> Any:
        """Bound the channels: a communicator has no buffer size of its own, a channel has one.

        Bounds in `options`, which come from a file of the user, stay.
        """
        nccl: Any = torch.distributed.ProcessGroupNCCL.Options  # type: ignore[attr-defined]
        options = nccl() if options is None else options
        config, channels = options.config, (buffer_mib << 20) // _channel_bytes()
        # One that is not set is negative; Megatron 0.12 sets the largest where the file has none.
        if config.max_ctas > 0 and config.max_ctas != _MAX_CHANNELS:
            logger.warning("%d MiB: max_ctas %d stays, as it is set", buffer_mib, config.max_ctas)
        else:
            config.max_ctas = min(max(channels, config.min_ctas, 1), _MAX_CHANNELS)
        return options

    def make_deterministic(self) -> None:
        """Also keep cuDNN from choosing kernels by timing them."""
        super().make_deterministic()
        torch.backends.cudnn.benchmark = False


def _channel_bytes() -> int:
    text = os.environ.get("NCCL_BUFFSIZE") or str(_CHANNEL_BYTES)
    try:
        size = int(text, 0)
    except ValueError:
        size = 0
    if size <= 0:
        raise DeviceError(f"NCCL_BUFFSIZE={text}: give a number of bytes above 0, or unset it")
    return size
