"""Ascend NPUs through torch_npu."""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from mindspeed.device.accelerator import Accelerator
from mindspeed.device.tracing import TraceContent, Tracer


class Npu(Accelerator):
    """torch_npu adds torch.npu, and carries its own redirection of torch.cuda."""

    name = "npu"
    backend = "hccl"
    deterministic_env = {"HCCL_DETERMINISTIC": "true", "CLOSE_MATMUL_K_SHIFT": "1"}
    group_buffers = "HCCL's hccl_buffer_size"

    def unusable_reason(self) -> str | None:
        """Return what is missing to use an NPU."""
        if importlib.util.find_spec("torch_npu") is None:
            return "torch_npu is not installed: pip install torch-npu (the release for your torch)"
        try:
            importlib.import_module("torch_npu")
        except (ImportError, OSError) as error:
            return f"torch_npu does not load ({error}): source CANN's set_env.sh first"
        if not torch.npu.is_available():  # type: ignore[attr-defined]
            return "torch_npu finds no NPU: check the driver and ASCEND_RT_VISIBLE_DEVICES"
        return None

    def facade(self) -> AbstractContextManager[object]:
        """Load torch_npu's own redirection; torch_npu offers no way to undo it."""
        importlib.import_module("torch_npu.contrib.transfer_to_npu")
        return nullcontext()

    def tracer(self, folder: Path, rank: int, content: TraceContent) -> Tracer:
        """Return torch_npu's profiler, which has levels."""
        return NpuTracer(folder, rank, content)

    def group_options(self, buffer_mib: int, options: Any = None) -> Any:
        """Set the buffer of the communicator in place of HCCL_BUFFSIZE, which is for all."""
        torch_npu: Any = importlib.import_module("torch_npu")
        hccl = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options
        options = options if isinstance(options, hccl) else hccl()
        options.hccl_config = dict(options.hccl_config) | {"hccl_buffer_size": buffer_mib}
        return options


class NpuTracer:
    """Writes a folder of tables and traces, which MindStudio Insight opens."""

    def __init__(self, folder: Path, rank: int, content: TraceContent) -> None:
        torch_npu: Any = importlib.import_module("torch_npu")
        kinds, levels = torch_npu.profiler.ProfilerActivity, torch_npu.profiler.ProfilerLevel
        self._folder = folder
        self._profiler = torch_npu.profiler.profile(
            activities=[kinds.NPU, kinds.CPU] if content.with_cpu else [kinds.NPU],
            record_shapes=content.record_shapes,
            profile_memory=content.with_memory,
            with_stack=content.with_stack,
            experimental_config=torch_npu.profiler._ExperimentalConfig(
                profiler_level=getattr(levels, content.level.capitalize())
            ),
            on_trace_ready=torch_npu.profiler.tensorboard_trace_handler(
                dir_name=str(folder), worker_name=f"rank{rank}"
            ),
        )

    def start(self) -> None:
        """Record from here on."""
        self._profiler.start()

    def stop(self, step: int) -> Path:
        """Write the tables."""
        self._profiler.stop()
        return self._folder
