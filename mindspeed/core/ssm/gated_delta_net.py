"""The exchanges of gated delta layers under context parallelism, not implemented yet."""

from typing import Any, NoReturn

from mindspeed.core.unavailable import unavailable

__all__ = ["tensor_a2a_cp2hp", "tensor_a2a_hp2cp"]

_INSTEAD = "use megatron-core 0.18 or newer, which has it, or context_parallel_size 1"


def tensor_a2a_cp2hp(*arguments: Any, **keywords: Any) -> NoReturn:
    """Refuse: exchanging sequences for heads is not implemented."""
    unavailable("tensor_a2a_cp2hp", _INSTEAD)


def tensor_a2a_hp2cp(*arguments: Any, **keywords: Any) -> NoReturn:
    """Refuse: exchanging heads for sequences is not implemented."""
    unavailable("tensor_a2a_hp2cp", _INSTEAD)
