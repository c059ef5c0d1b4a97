"""Megatron's torch.cuda calls and device="cuda" land on the device of this process."""

from collections.abc import Iterator
from typing import Any

from mindspeed.features.base import Effect, Feature, Level


class DeviceFacade(Feature):
    """Run code written for `torch.cuda` here; on a GPU nothing is redirected or slower."""

    name = "device_facade"
    title = "Device facade"
    group = "Foundation"
    level = Level.COMPAT
    devices = ("cpu", "npu")

    def effects(self, options: Any) -> Iterator[Effect]:
        """Redirect to the current device."""
        from mindspeed import device

        here = device.current()
        yield Effect(f"torch.cuda calls land on {here.name}", here.facade())
