"""Named random states of the current device, and a snapshot of all states for recompute."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed import device


class CudaRNGStatesTracker:
    """Random states by name; work inside `fork(name)` draws from that state and moves it on."""

    _alive: weakref.WeakSet[CudaRNGStatesTracker] = weakref.WeakSet()

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()
        self._alive.add(self)

    def reset(self) -> None:
        """Forget all states."""
        self.states_ = {}
        self.seeds_ = set()

    def is_initialized(self) -> bool:
        """Whether a state was added."""
        return bool(self.states_)

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return the states by name, in a dictionary of its own."""
        return dict(self.states_)

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Take over states that get_states() returned."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Start a named state from a seed, leaving the device's own state as it is."""
        if seed in self.seeds_:
            raise ValueError(f"random seed {seed} is already in use: give {name!r} one of its own")
        if name in self.states_:
            raise ValueError(f"random state {name!r} already exists: reset() before seeding again")
        here = device.current()
        before = here.get_rng_state()
        here.manual_seed(seed)
        self.seeds_.add(seed)
        self.states_[name] = here.get_rng_state()
        here.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw from the named state inside the block."""
        if name not in self.states_:
            known = ", ".join(sorted(self.states_)) or "none"
            raise KeyError(f"no random state {name!r} (known: {known}): add() it first")
        here = device.current()
        before = here.get_rng_state()
        here.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = here.get_rng_state()
            here.set_rng_state(before)


def get_all_rng_states() -> dict[str, torch.Tensor]:
    """Return the states of all trackers by name."""
    return {
        name: state
        for tracker in CudaRNGStatesTracker._alive
        for name, state in tracker.get_states().items()
    }


@dataclass(frozen=True)
class RandomStates:
    """All random states of this process at one moment."""

    tracker: Any
    """Anything with get_states() and set_states(), or None."""
    host: torch.Tensor = field(default_factory=torch.get_rng_state)
    device: torch.Tensor = field(default_factory=lambda: device.current().get_rng_state())
    tracked: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        states = {} if self.tracker is None else self.tracker.get_states()
        copies = {name: _frozen(state) for name, state in states.items()}
        object.__setattr__(self, "tracked", copies)

    def restore(self) -> None:
        """Go back to this moment."""
        torch.set_rng_state(self.host)
        device.current().set_rng_state(self.device)
        if self.tracker is not None:
            self.tracker.set_states({name: _frozen(s) for name, s in self.tracked.items()})

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Go back to this moment for the block, then to where we were."""
        now = RandomStates(self.tracker)
        self.restore()
        try:
            yield
        finally:
            now.restore()


def _frozen(state: Any) -> Any:
    """Copy a state that moves on by itself: trackers for CUDA graphs hold live generators."""
    return state.clone_state() if isinstance(state, torch.Generator) else state
