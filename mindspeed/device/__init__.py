"""Devices behind one protocol; only this folder names torch.cuda, torch_npu, nccl, hccl or gloo."""

from mindspeed.device.base import Device, DeviceError
from mindspeed.device.choice import current, known
from mindspeed.device.tracing import TraceContent, Tracer

__all__ = ["Device", "DeviceError", "TraceContent", "Tracer", "current", "known"]
