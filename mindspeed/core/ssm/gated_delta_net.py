"""The exchanges of gated delta layers under context parallelism, not implemented yet."""

from typing import Any, NoReturn

__all__ = ["tensor_a2a_cp2hp", "tensor_a2a_hp2cp"]


def tensor_a2a_cp2hp(*arguments: Any, **keywords: Any) -> NoReturn:
    """Refuse: exchanging sequences for heads is not implemented."""
    _refuse("tensor_a2a_cp2hp")


def tensor_a2a_hp2cp(*arguments: Any, **keywords: Any) -> NoReturn:
    """Refuse: exchanging heads for sequences is not implemented."""
    _refuse("tensor_a2a_hp2cp")


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(
        f"mindspeed does not offer {name} here: use megatron-core 0.18 or newer, which has it, or "
        "context_parallel_size 1"
    )
