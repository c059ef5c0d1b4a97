"""Devices behind one protocol; only this folder names torch.cuda, torch_npu, nccl, hccl or gloo."""

from mindspeed.device.base import Device, DeviceError
from mindspeed.device.choice import current, known

__all__ = ["Device", "DeviceError", "current", "known"]
