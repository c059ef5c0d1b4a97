"""Distributed checkpoints of megatron-core 0.12 on a torch that has changed since."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

FORMAT = "serialization_format"


def wrap_write_item(original: Callable[..., Any]) -> Callable[..., Any]:
    """Write in the format torch always used where the caller, older, does not choose."""
    signature = inspect.signature(original)
    if FORMAT not in signature.parameters:
        return original
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    @functools.wraps(original)
    def _write_item(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(*args, **kwargs)
        given.arguments.setdefault(FORMAT, SerializationFormat.TORCH_SAVE)
        return original(*given.args, **given.kwargs)

    return _write_item


def wrap_finish(original: Callable[..., Any]) -> Callable[..., Any]:
    """Write what Megatron adds to the metadata also where torch copies the declared fields only."""
    from torch.distributed.checkpoint.metadata import Metadata

    declared = {field.name for field in dataclasses.fields(Metadata)}

    @functools.wraps(original)
    def finish(self: Any, metadata: Metadata, results: Any) -> Any:
        added = {name: value for name, value in vars(metadata).items() if name not in declared}

        class Kept(Metadata):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                vars(self).update(added)

            def __reduce_ex__(self, protocol: Any) -> Any:
                self.__class__ = Metadata  # what is written must not name this class
                return self.__reduce_ex__(protocol)

        metadata.__class__ = Kept
        try:
            return original(self, metadata, results)
        finally:
            metadata.__class__ = Metadata

    return finish
