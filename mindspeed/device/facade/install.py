"""Install the stand-ins, also over copies that Megatron imported earlier, and remove them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING

from torch.jit import _builtins

from mindspeed.device.facade import (
    compilation,
    cuda_calls,
    host_rng,
    identity,
    mixed_precision,
    moves,
    process_groups,
    strides,
    tensors,
)

if TYPE_CHECKING:
    from mindspeed.device.cpu import Cpu

_PARTS = (
    compilation,
    cuda_calls,
    tensors,
    moves,
    mixed_precision,
    host_rng,
    process_groups,
    strides,
    identity,
)
_ABSENT = object()
_ENVIRONMENT = {
    # Megatron asks for it with every tensor-parallel layer; it means nothing to a cpu.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # Where triton is installed Megatron launches its kernels, which triton interprets on a cpu.
    "TRITON_INTERPRET": "1",
}


class Facade:
    """Redirects torch.cuda and device="cuda" to the cpu between install and remove."""

    def __init__(self, cpu: Cpu) -> None:
        self._cpu = cpu
        self._undo: list[tuple[object, str, object]] = []
        self._environment: dict[str, str] = {}

    def __enter__(self) -> Facade:
        self._environment = {
            name: value for name, value in _ENVIRONMENT.items() if name not in os.environ
        }
        os.environ.update(self._environment)
        originals: dict[int, object] = {}
        stand_ins: list[tuple[object, object]] = []
        for part in _PARTS:
            for owner, name, stand_in in list(part.redirections(self._cpu)):
                original = getattr(owner, name, None)
                if isinstance(owner, ModuleType) and callable(original):
                    originals[id(original)] = stand_in
                stand_ins.append((original, stand_in))
                self._set(owner, name, stand_in)
                identity.name_by_owner(stand_in, owner, name)
        self._set(_builtins, "_builtin_table", identity.scripted(stand_ins))
        identity.clear_function_caches()
        for module, name, stand_in in list(_megatron_copies(originals)):
            self._set(module, name, stand_in)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name in self._environment:
            os.environ.pop(name, None)
        while self._undo:
            owner, name, original = self._undo.pop()
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        identity.clear_function_caches()

    def _set(self, owner: object, name: str, value: object) -> None:
        self._undo.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)


def _megatron_copies(originals: dict[int, object]) -> Iterator[tuple[ModuleType, str, object]]:
    """Find `from torch.cuda import x` copies in Megatron modules that were imported before us."""
    for module in compilation.megatron_modules():
        for name, value in list(vars(module).items()):
            if id(value) in originals:
                yield module, name, originals[id(value)]
