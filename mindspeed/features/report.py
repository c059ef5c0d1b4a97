"""Which features are on, why, and what each of them changed; `str()` is a table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mindspeed.features.selection import Choice
from mindspeed.patching import PatchRecord

HEADER = ("feature", "level", "state", "why")


@dataclass(frozen=True)
class Report:
    """A snapshot of every feature and of every patch and effect in force."""

    choices: Sequence[Choice]
    patches: Sequence[PatchRecord]
    effects: Mapping[str, Sequence[str]]
    """What features changed by other means than patches, by feature name."""

    @property
    def on(self) -> tuple[str, ...]:
        """The names of the features that are on."""
        return tuple(choice.feature.name for choice in self.choices if choice.on)

    def __str__(self) -> str:
        choices = sorted(self.choices, key=lambda choice: not choice.on)
        rows = [HEADER, *map(_row, choices)]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = []
        for row, choice in zip(rows, [None, *choices]):
            lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
            lines.extend(f"    {line}" for line in self._changes(choice))
        applied = sum(patch.state == "applied" for patch in self.patches)
        lines.append(
            f"{len(self.on)} of {len(self.choices)} features on; patches: {applied} applied, "
            f"{len(self.patches) - applied} waiting for their module to be imported"
        )
        return "\n".join(lines)

    def _changes(self, choice: Choice | None) -> Iterator[str]:
        if choice is None:
            return
        yield from self.effects.get(choice.feature.name, ())
        for patch in self.patches:
            if patch.owner == choice.feature.name:
                copies = f", {patch.copies} copies rebound" if patch.state == "applied" else ""
                yield f"{patch.kind} {patch.target}: {patch.state}{copies}"


def _row(choice: Choice) -> tuple[str, ...]:
    return choice.feature.name, str(int(choice.feature.level)), choice.state, choice.why
