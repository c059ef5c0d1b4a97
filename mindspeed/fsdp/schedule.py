"""The order of a pass's collectives that all ranks know, learned from the passes before."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

KEPT_IDLE = 100
"""Passes that an entry stays in the schedule though no rank used it."""


@dataclass
class Schedule:
    """The slots that every rank goes through, in order, in every pass of one kind."""

    slots: list[int] = field(default_factory=list)
    idle: list[int] = field(default_factory=list)
    """Passes since any rank used the slot, per slot."""
    unlike: int = 0
    """Passes still to come that are no example: the first one gathers ahead in another order."""
    is_known: bool = False
    """False until a pass that is an example has ended."""

    def merge(self, taken: Iterable[Sequence[int]]) -> None:
        """Become a sequence that holds the present one and all of these, each in its order."""
        if self.unlike:
            self.unlike -= 1
            return
        for other in taken:
            slots: list[int] = []
            idle: list[int] = []
            matcher = SequenceMatcher(None, self.slots, other, autojunk=False)
            for tag, begin, end, other_begin, other_end in matcher.get_opcodes():
                slots += self.slots[begin:end]
                idle += [0] * (end - begin) if tag == "equal" else self.idle[begin:end]
                if tag != "equal":
                    slots += other[other_begin:other_end]
                    idle += [0] * (other_end - other_begin)
            self.slots, self.idle = slots, idle
        self.is_known = True

    def age(self, used: Sequence[int]) -> None:
        """Take down which slots any rank used, and drop those that none has used for long."""
        aged = [0 if mark else passes + 1 for mark, passes in zip(used, self.idle, strict=True)]
        kept = [place for place, passes in enumerate(aged) if passes <= KEPT_IDLE]
        self.slots = [self.slots[place] for place in kept]
        self.idle = [aged[place] for place in kept]


@dataclass
class Pass:
    """One pass of this rank: what of the schedule lies ahead, what it took, what it used."""

    schedule: Schedule
    is_backward: bool
    is_special: bool
    """Whether a forward pass is for gradients, and whether a backward pass reduces them."""
    ahead: deque[tuple[int | None, int]] = field(init=False)
    """Slots that all ranks are about to go through, with their places in the schedule."""
    taken: list[int] = field(default_factory=list)
    used: list[int] = field(init=False)
    has_asked: bool = False
    """Whether any rank needed what was not ahead: then the schedule changes."""

    def __post_init__(self) -> None:
        """Begin with the whole schedule ahead."""
        self.ahead = deque(enumerate(self.schedule.slots))
        self.used = [0] * len(self.schedule.slots)

    @property
    def kind(self) -> int:
        """A number of its kind."""
        return 2 * self.is_backward + self.is_special

    def is_ahead(self, slot: int) -> bool:
        """Tell whether all ranks will come to the slot without being asked."""
        return any(other == slot for _, other in self.ahead)

    def pop(self) -> int:
        """Return the next slot, for a rank that has no use for it."""
        return self.ahead.popleft()[1]

    def take(self) -> None:
        """Use the next slot."""
        place, slot = self.ahead.popleft()
        if place is not None:
            self.used[place] = 1
        self.taken.append(slot)
