"""What an entry of benchmarks/ops is made of: a case, the work it cannot avoid, and its peers."""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed import device

Outputs = torch.Tensor | tuple[torch.Tensor, ...]
OURS = "ours"
PRODUCTS = "products alone"
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


@dataclass(frozen=True)
class Work:
    """What no implementation can avoid: bytes through memory, and products on the matrix unit."""

    bytes: int = 0
    flops: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.bytes + other.bytes, self.flops + other.flops)

    def floor(self, bytes_a_second: float, flops_a_second: float) -> float:
        """Return the seconds below which no implementation gets."""
        return max(self.bytes / bytes_a_second, self.flops / flops_a_second)


@dataclass(frozen=True)
class Case:
    """One race: the same inputs for every peer, one row of results a peer and pass."""

    op: str
    shape: str
    """How the sizes read in the table, e.g. 8192x4096."""
    make_inputs: Callable[[torch.device], tuple[Any, ...]]
    """Make fresh random inputs; those that require a gradient are the leaves of the backward."""
    peers: Mapping[str, Callable[..., Outputs] | None]
    """Called with the inputs; "ours" is ours; None stands for a peer that is not installed."""
    reference: Callable[..., Outputs]
    """Called with the inputs in float64 (or `reference_dtype`); what every peer has to return."""
    work: Mapping[str, Work]
    """The passes to race and the floor of each: "fwd", "bwd" (of a kept graph), "full"."""
    dtype: torch.dtype = torch.bfloat16
    tolerance: float | None = None
    """Largest ||out - reference|| / ||reference|| of any result; by default that of the dtype."""
    reference_dtype: torch.dtype = torch.float64
    gate_inputs: Callable[[torch.device], tuple[Any, ...]] | None = None
    """Smaller inputs for the check of correctness, where a float64 reference would not fit."""
    yardsticks: Mapping[str, Callable[..., Mapping[str, Callable[[], Any]]]] = field(
        default_factory=dict
    )
    """Called with the inputs; returns by pass what no peer can leave out, e.g. its products: timed
    in turns with the peers, but none of them. It is not judged, and ours is not held against it."""
    must_repeat: bool = True
    """Whether two runs of ours must have equal bits; a library's kernel may not promise that."""

    @property
    def allowed_error(self) -> float:
        """The tolerance of this case."""
        return TOLERANCE[self.dtype] if self.tolerance is None else self.tolerance


def compiled(function: Callable[..., Outputs]) -> Callable[..., Outputs] | None:
    """Return the torch.compile peer of an eager one; it races on an accelerator only."""
    if device.current().name == "cpu":
        return None
    return torch.compile(function, mode="max-autotune-no-cudagraphs", dynamic=False)


def optional(target: str) -> Callable[..., Any] | None:
    """Return "package.module:name" where it can be imported and there is an accelerator."""
    if device.current().name == "cpu":
        return None
    try:
        return pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return None
