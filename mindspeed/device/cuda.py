"""NVIDIA GPUs, where speed is measured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from mindspeed.device.accelerator import Accelerator


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

    def make_deterministic(self) -> None:
        """Also keep cuDNN from choosing kernels by timing them."""
        super().make_deterministic()
        torch.backends.cudnn.benchmark = False
