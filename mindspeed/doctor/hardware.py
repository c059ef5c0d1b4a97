"""Checks of the machine: its devices, whether ranks can talk, shared memory.

torch and mindspeed.device are imported late: the report must appear where torch is missing.
"""

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed.doctor.check import Check, absent, fail, ok, warn
from mindspeed.launch import RankFailed, call, loopback_interface

if TYPE_CHECKING:
    from mindspeed.device import Device

_SHARED_MEMORY = Path("/dev/shm")
_ENOUGH_SHARED_MEMORY = 256 * 2**20
_GROUP_SECONDS = 120


def chosen_device() -> "Device | None":
    """Return the device that a run would use, or None if the one asked for cannot be used."""
    from mindspeed import device

    try:
        return device.current()
    except device.DeviceError:
        return None


def check_devices() -> list[Check]:
    """Tell which devices can be used, and which one a run would choose and why."""
    from mindspeed import device

    checks = []
    for name, known in device.known().items():
        reason = known.unusable_reason()
        if reason is None:
            checks.append(ok(name, "usable" if name == "cpu" else f"{known.count()} usable"))
        else:
            checks.append(absent(name, f"not usable: {reason}"))
    asked = os.environ.get("MINDSPEED_DEVICE", "")
    why = f"MINDSPEED_DEVICE={asked}" if asked else f"first usable of {', '.join(device.known())}"
    try:
        return [*checks, ok("chosen device", f"{device.current().name} ({why})")]
    except device.DeviceError as error:
        return [*checks, fail("chosen device", str(error))]


def check_process_group(chosen: "Device") -> Check:
    """Start one rank with the launcher and let it really reduce a tensor on the chosen device."""
    name = "process group"
    try:
        (result,) = call(_reduce_once, 1, timeout=_GROUP_SECONDS)
    except RankFailed as error:
        return fail(name, f"{chosen.backend}: {error.traceback.splitlines()[-1]}")
    if result != 1.0:
        return fail(name, f"{chosen.backend}: the sum over one rank of 1 was {result}")
    return ok(name, f"{chosen.backend} works; ranks meet on loopback ({loopback_interface()})")


def check_shared_memory() -> Check:
    """Check the shared memory through which data loaders and ranks pass tensors."""
    name = "shared memory"
    if not _SHARED_MEMORY.is_dir():
        return ok(name, f"this system has no {_SHARED_MEMORY}")
    if not os.access(_SHARED_MEMORY, os.W_OK):
        remedy = f"make {_SHARED_MEMORY} writable"
        return warn(name, f"{_SHARED_MEMORY} cannot be written: no data-loader workers", remedy)
    free = shutil.disk_usage(_SHARED_MEMORY).free
    detail = f"{free / 2**20:.0f} MiB free in {_SHARED_MEMORY}"
    if free < _ENOUGH_SHARED_MEMORY:
        return warn(name, f"{detail}, little", "start the container with --shm-size=1g or more")
    return ok(name, detail)


def _reduce_once() -> float:
    import torch

    from mindspeed import device

    chosen = device.current()
    torch.distributed.init_process_group(chosen.backend)
    total = torch.ones(1, device=chosen.torch_device)
    torch.distributed.all_reduce(total)
    torch.distributed.destroy_process_group()
    return total.item()
