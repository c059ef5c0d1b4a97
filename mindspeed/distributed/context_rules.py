"""Which sizes and algorithms of context parallelism fit together. Pure arithmetic: no torch."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed.config import ConfigError, one_of
from mindspeed.distributed.parallel_dims import CP

ALGO, DEGREE, WINDOW = "--context-parallel-algo", "--ulysses-degree-in-cp", "--cp-window-size"
COMM_TYPES = {
    "megatron_cp_algo": "p2p",
    "ulysses_cp_algo": "a2a",
    "hybrid_cp_algo": "a2a+p2p",
    "kvallgather_cp_algo": "all_gather",
}
"""Megatron's cp_comm_type of each algorithm of `--context-parallel-algo`."""


@dataclass(frozen=True, kw_only=True)
class ContextOptions:
    """How a sequence is split over ranks, as the flags say it; illegal values raise ConfigError."""

    size: int
    algo: str = "megatron_cp_algo"
    ulysses_degree: int | None = None
    """Ranks that exchange heads (hybrid); the ring has size / ulysses_degree ranks."""
    window: int = 1
    """Ranks of an inner ring (double ring); 1 for one ring."""

    def __post_init__(self) -> None:
        if self.algo not in COMM_TYPES:
            raise ConfigError(f"{ALGO} {self.algo}: use {one_of(COMM_TYPES)}")
        self._check_degree()
        if self.window != 1:
            check_window(self.window, self.ring_size, WINDOW + " ")

    @property
    def comm_type(self) -> str:
        """Megatron's cp_comm_type."""
        return COMM_TYPES[self.algo]

    @property
    def ring_size(self) -> int:
        """The ranks round which keys and values travel; 1 where they do not."""
        if self.comm_type == "p2p":
            return self.size
        return self.size // (self.ulysses_degree or 1) if self.comm_type == "a2a+p2p" else 1

    @property
    def hierarchical_sizes(self) -> list[int] | None:
        """Megatron's hierarchical_context_parallel_sizes: heads are exchanged by neighbours."""
        if self.comm_type != "a2a+p2p" or self.ulysses_degree is None:
            return None
        return [self.ulysses_degree, self.size // self.ulysses_degree]

    def _check_degree(self) -> None:
        degree, is_hybrid = self.ulysses_degree, self.algo == "hybrid_cp_algo"
        if not is_hybrid:
            if degree is not None:
                raise ConfigError(
                    f"{DEGREE} {degree} needs {ALGO} hybrid_cp_algo, got {self.algo}: drop one"
                )
            return
        legal = [n for n in range(2, self.size) if self.size % n == 0]
        if not legal:
            raise ConfigError(
                f"{ALGO} hybrid_cp_algo cannot split {CP} {self.size} in two: use a size of 4 or "
                "more that is no prime, or another algorithm"
            )
        if degree not in legal:
            given = f"{DEGREE} {degree}" if degree is not None else f"{DEGREE} is missing"
            raise ConfigError(f"{given}: for {CP} {self.size} use {one_of(legal)}")


def check_comm_type(comm_type: str, num_groups: int) -> None:
    """Raise ConfigError for a cp_comm_type that is not known, or not for so many groups."""
    if comm_type not in COMM_TYPES.values():
        raise ConfigError(f"cp_comm_type={comm_type}: use {one_of(COMM_TYPES.values())}")
    is_pair = comm_type == "a2a+p2p"
    if num_groups != (2 if is_pair else 1):
        needs = "a list of two: a2a, p2p" if is_pair else "one process group"
        raise ConfigError(f"cp_comm_type={comm_type}: cp_group must be {needs}")


def check_window(window: int, ring_size: int, name: str = "cp_window_size=") -> None:
    """Raise ConfigError if a ring cannot be made of windows of so many ranks."""
    legal = [n for n in range(1, max(ring_size, 2)) if ring_size % n == 0]
    if window not in legal:
        raise ConfigError(f"{name}{window} for a ring of {ring_size} ranks: use {one_of(legal)}")


def check_length(length: int, size: int, flag: str = "--seq-length") -> None:
    """Raise ConfigError for a length that Megatron cannot cut into 2 * size equal pieces."""
    if length % (2 * size):
        nearest = -(-length // (2 * size)) * 2 * size
        raise ConfigError(
            f"{flag} {length} is not a multiple of 2 x {CP} {size}: use {nearest}, or another "
            "multiple"
        )


def check_dropout(dropout: float, size: int, name: str = "--attention-dropout ") -> None:
    """Raise ConfigError for dropout on split sequences: no rank could repeat one rank's mask."""
    if dropout and size > 1:
        raise ConfigError(
            f"{name}{dropout} cannot be reproduced with {CP} {size}: use 0, or {CP} 1"
        )
