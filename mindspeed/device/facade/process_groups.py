"""Process groups of a cpu: gloo in place of NCCL, one network loop, scaled sums.

NCCL requested on a cpu becomes gloo, with one line in the log. torch gives every gloo group a
device of its own, whose loop thread wakes up 100 times a second. Megatron makes dozens of groups a
rank, so that the ranks of one machine would spend its cores on waking up: all groups of a process
share one device. Scaled sums (premul_sum) exist in NCCL and not in gloo.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh, distributed_c10d

from mindspeed.device.facade.tensors import landed

if TYPE_CHECKING:
    from mindspeed.device.cpu import Cpu

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScaledSum:
    """What NCCL calls premul_sum: multiply by the factor, then add."""

    factor: float | Tensor


def redirections(cpu: Cpu) -> Iterator[tuple[object, str, object]]:
    """Yield (owner, attribute, stand-in) for process groups, meshes and collectives."""
    if not dist.is_available():
        return
    yield from _groups(cpu)
    if dist.is_gloo_available():  # under the name by which torch calls it
        yield distributed_c10d, "ProcessGroupGloo", _sharing(distributed_c10d.ProcessGroupGloo)
    yield from _scaled_sums()


def _groups(cpu: Cpu) -> Iterator[tuple[object, str, object]]:
    for name, position in (("init_process_group", 0), ("new_group", 2)):
        stand_in = _with_backend(getattr(dist, name), position, cpu.backend)
        yield dist, name, stand_in
        yield distributed_c10d, name, stand_in
    mesh = _mesh_on_cpu(device_mesh.init_device_mesh, 0)
    yield device_mesh, "init_device_mesh", mesh
    yield dist, "init_device_mesh", mesh
    init = _mesh_on_cpu(device_mesh.DeviceMesh.__init__, 1)
    yield device_mesh.DeviceMesh, "__init__", init


def _scaled_sums() -> Iterator[tuple[object, str, object]]:
    table = {
        "_make_nccl_premul_sum": ScaledSum,
        "all_reduce": _scale_in_place(dist.all_reduce),
        "reduce_scatter_tensor": _scale_copy(dist.reduce_scatter_tensor),
    }
    table["_reduce_scatter_base"] = table["reduce_scatter_tensor"]
    for name, stand_in in table.items():
        yield dist, name, stand_in
        yield distributed_c10d, name, stand_in


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
    _log_once(native)
    return native


@functools.cache
def _log_once(native: str) -> None:
    logger.info("nccl requested for process groups; this run is on cpu and uses %s", native)


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


def _scale_in_place(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
        if isinstance(op, ScaledSum):
            with torch.no_grad():
                tensor.mul_(op.factor)
            op = dist.ReduceOp.SUM
        return original(tensor, op, *args, **kwargs)

    return all_reduce


def _scale_copy(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduce_scatter_tensor(
        output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any
    ) -> Any:
        if isinstance(op, ScaledSum):
            input = input.detach() * op.factor
            op = dist.ReduceOp.SUM
        return original(output, input, op, *args, **kwargs)

    return reduce_scatter_tensor
