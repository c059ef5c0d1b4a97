"""Process groups: NCCL asked for on a cpu becomes gloo, with one line in the log."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from mindspeed.device.facade.tensors import landed

if TYPE_CHECKING:
    from mindspeed.device.cpu import Cpu

logger = logging.getLogger(__name__)


def redirections(cpu: Cpu) -> Iterator[tuple[object, str, object]]:
    """Yield (owner, attribute, stand-in) for everything that creates a process group."""
    if not dist.is_available():
        return
    for name, position in (("init_process_group", 0), ("new_group", 2)):
        stand_in = _with_backend(getattr(dist, name), position, cpu.backend)
        yield dist, name, stand_in
        yield distributed_c10d, name, stand_in
    mesh = _mesh_on_cpu(device_mesh.init_device_mesh, 0)
    yield device_mesh, "init_device_mesh", mesh
    yield dist, "init_device_mesh", mesh
    init = _mesh_on_cpu(device_mesh.DeviceMesh.__init__, 1)
    yield device_mesh.DeviceMesh, "__init__", init


def _with_backend(original: Callable[..., Any], position: int, native: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def with_backend(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            backend = _native(args[position], native)
            args = (*args[:position], backend, *args[position + 1 :])
        elif "backend" in kwargs:
            kwargs["backend"] = _native(kwargs["backend"], native)
        # Options and device binding of NCCL mean nothing to gloo.
        for name in ("device_id", "pg_options"):
            kwargs.pop(name, None)
        return original(*args, **kwargs)

    return with_backend


def _native(backend: Any, native: str) -> Any:
    """Map nccl, alone or in a list such as "cpu:gloo,cuda:nccl", to the device's own backend."""
    if not isinstance(backend, str) or "nccl" not in backend.lower():
        return backend
    _say_once(native)
    return native


@functools.cache
def _say_once(native: str) -> None:
    logger.info("process groups asked for nccl; this run is on cpu and uses %s", native)


def _mesh_on_cpu(original: Callable[..., Any], position: int) -> Callable[..., Any]:
    @functools.wraps(original)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            kind = torch.device(landed(args[position])).type
            args = (*args[:position], kind, *args[position + 1 :])
        elif "device_type" in kwargs:
            kwargs["device_type"] = torch.device(landed(kwargs["device_type"])).type
        return original(*args, **kwargs)

    return on_cpu
