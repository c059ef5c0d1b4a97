"""What one check of a client is, and what may fail because of the client itself."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path


@dataclass(frozen=True)
class Case:
    """One model in one layout of ranks.

    `run` is called in a process that sees the client, with an empty folder. It raises where the
    check fails and returns one line with what it measured.
    """

    model: str
    layout: str
    run: Callable[[Path], str]


@dataclass(frozen=True)
class OwnFailure:
    """A failure that is the client's own: where it occurs (patterns of fnmatch), and why."""

    model: str
    layout: str
    says: str
    """Text that the error contains; any other error at this place is a failure of ours."""
    reason: str
    """One line for the table, with the file of the client that it comes from."""
    core: str = "*"

    def covers(self, case: "Case", core: str, error: str) -> bool:
        """Return whether this error of a case is the one described."""
        return self.is_at(case.model, case.layout, core) and self.says in error

    def is_at(self, model: str, layout: str, core: str) -> bool:
        """Return whether the failure is expected here."""
        places = ((model, self.model), (layout, self.layout), (core, self.core))
        return all(fnmatch(name, pattern) for name, pattern in places)


@dataclass(frozen=True)
class Outcome:
    """What became of a case."""

    client: str
    core: str
    model: str
    layout: str
    verdict: str
    """passed, client (its own failure), failed, or stale (passes, though a failure is listed)."""
    detail: str
    seconds: float

    @property
    def is_fine(self) -> bool:
        """Return whether the check as a whole may pass with this outcome."""
        return self.verdict in ("passed", "client")


def judge(case: Case, core: str, error: str | None, own: Iterable[OwnFailure]) -> tuple[str, str]:
    """Return the verdict on a case that raised `error`, or None, and the reason if it has one."""
    if error is None:
        listed = [each for each in own if each.is_at(case.model, case.layout, core)]
        return ("stale", "passes: drop it from OWN") if listed else ("passed", "")
    for each in own:
        if each.covers(case, core, error):
            return "client", each.reason
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return "failed", lines[-1] if lines else "no message"
