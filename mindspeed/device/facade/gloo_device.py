"""One network loop for all gloo groups of a process.

torch gives every group a gloo device of its own, and the loop thread of each wakes up 100 times a
second. Megatron makes dozens of groups a rank, so that the ranks of one machine would spend its
cores on waking up.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from mindspeed.device.cpu import Cpu


def redirections(cpu: Cpu) -> Iterator[tuple[object, str, object]]:
    """Yield the maker of gloo groups, under the name by which torch calls it."""
    if dist.is_available() and dist.is_gloo_available():
        yield distributed_c10d, "ProcessGroupGloo", _sharing(distributed_c10d.ProcessGroupGloo)


def _sharing(original: Any) -> type:
    @functools.cache
    def devices(process: int, interfaces: str) -> list[Any]:
        # A fork has no loop thread: every process opens its own.
        names = [name for name in interfaces.split(",") if name]
        return [original.create_device(interface=name) for name in names] or [
            original.create_default_device()
        ]

    class GlooType(type):
        """Real groups stay instances of what stands at ProcessGroupGloo."""

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

        def __getattr__(cls, name: str) -> Any:
            return getattr(original, name)

        def __call__(cls, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
            options = original._Options()
            options._timeout = timeout
            options._devices = devices(os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME", ""))
            return original(store, rank, size, options)

    return GlooType("ProcessGroupGloo", (), {})
