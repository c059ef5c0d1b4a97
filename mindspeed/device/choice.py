"""Choose the device of this process: npu, else cuda, else cpu, unless MINDSPEED_DEVICE is set."""

from __future__ import annotations

import functools
import os

from mindspeed.device.base import Device, DeviceError
from mindspeed.device.cpu import Cpu
from mindspeed.device.cuda import Cuda
from mindspeed.device.npu import Npu

VARIABLE = "MINDSPEED_DEVICE"


@functools.cache
def known() -> dict[str, Device]:
    """Return every kind of device, in the order of preference."""
    return {device.name: device for device in (Npu(), Cuda(), Cpu())}


def current() -> Device:
    """Return the device of this process."""
    return _choose(os.environ.get(VARIABLE, ""))


@functools.cache
def _choose(name: str) -> Device:
    devices = known()
    if not name:
        return next(device for device in devices.values() if device.unusable_reason() is None)
    if name not in devices:
        raise DeviceError(f"{VARIABLE}={name} is not a device: use {', '.join(sorted(devices))}")
    reason = devices[name].unusable_reason()
    if reason is not None:
        raise DeviceError(f"{VARIABLE}={name} cannot be used here: {reason}, or unset {VARIABLE}")
    return devices[name]
