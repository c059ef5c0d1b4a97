"""The copies of patched objects: where they are, what they held, and what they hold now."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from mindspeed.patching.slots import Slot, swap
from mindspeed.patching.target import Target


@dataclass(eq=False)
class _Holder:
    """A place with what it held without any patch and what was put there last."""

    place: Slot
    original: object
    placed: object
    targets: set[Target] = field(default_factory=set)


class Holders:
    """Every place, other than the targets themselves, that was rebound."""

    def __init__(self) -> None:
        self._holders: dict[object, _Holder] = {}

    def add(self, place: Slot, target: Target) -> None:
        """Let `place`, which holds the target's current content, follow the target."""
        holder = self._holders.get(place.identity)
        if holder is None or holder.place.read() is not holder.placed:
            held = place.read()
            holder = self._holders[place.identity] = _Holder(place, held, held)
        holder.original = swap(holder.original, target.restoration())
        holder.targets.add(target)

    def rebind(self, targets: Collection[Target]) -> None:
        """Bring the places that follow any of `targets` up to date."""
        for identity, holder in list(self._holders.items()):
            if holder.targets.isdisjoint(targets):
                continue
            if holder.place.read() is not holder.placed:
                del self._holders[identity]  # somebody else put something there since
                continue
            exchange: dict[int, object] = {}
            for target in holder.targets:
                exchange.update(target.exchange())
            value = swap(holder.original, exchange)
            if value is not holder.placed:
                holder.place.write(value)
                holder.placed = value
            holder.targets = {target for target in holder.targets if target.entries}
            if not holder.targets:
                del self._holders[identity]

    def count(self, target: Target) -> int:
        """Return how many places follow `target`."""
        return sum(target in holder.targets for holder in self._holders.values())
