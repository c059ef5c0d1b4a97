"""The list of one-line faults: one YAML file an area, and what each fault does to its file."""

import difflib
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Fault:
    """A change of one line that the tests of its area have to notice."""

    area: str
    name: str
    file: str
    find: str
    """Text that occurs exactly once in the file."""
    replace: str
    tests: tuple[str, ...]
    reason: str | None = None
    """Why no test can notice it; only for accepted survivors."""

    @property
    def title(self) -> str:
        """Return the name by which `--only` selects it."""
        return f"{self.area}/{self.name}"

    def apply(self, text: str) -> str:
        """Return the file with the fault; raise ValueError where it does not fit the file."""
        count = text.count(self.find)
        if count != 1:
            raise ValueError(f"{self.title}: {self.file} holds {self.find!r} {count} times, not 1")
        changed = text.replace(self.find, self.replace)
        lines = list(difflib.ndiff(self.find.splitlines(), self.replace.splitlines()))
        removed, added = (sum(line.startswith(mark) for line in lines) for mark in ("- ", "+ "))
        if changed == text or max(removed, added) > 1:
            raise ValueError(f"{self.title}: changes {max(removed, added)} lines, not 1")
        compile(changed, self.file, "exec")
        return changed


def read_faults(folder: Path = FOLDER) -> list[Fault]:
    """Read the faults of all areas, sorted by area."""
    faults = []
    for path in sorted(folder.glob("*.yaml")):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        for entry in content["faults"]:
            tests = tuple(entry.pop("tests", content["tests"]))
            faults.append(Fault(area=path.stem, tests=tests, **entry))
    return faults
