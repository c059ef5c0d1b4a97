"""Ascend NPUs through torch_npu."""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from mindspeed.device.accelerator import Accelerator


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

    def group_options(self, buffer_mib: int, options: Any = None) -> Any:
        """Set the buffer of the communicator in place of HCCL_BUFFSIZE, which is for all."""
        torch_npu: Any = importlib.import_module("torch_npu")
        hccl = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options
        options = options if isinstance(options, hccl) else hccl()
        options.hccl_config = dict(options.hccl_config) | {"hccl_buffer_size": buffer_mib}
        return options
