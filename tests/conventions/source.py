"""Parse the packages as syntax trees, once, for every convention test."""

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("mindspeed", "mindspeed_llm", "mindspeed_mm")


@dataclass(frozen=True)
class Source:
    """One Python file."""

    path: Path
    tree: ast.Module

    @property
    def name(self) -> str:
        return self.path.as_posix()

    @property
    def folder(self) -> str:
        """The package and its first subfolder; files beside the subfolders name themselves."""
        return "/".join(self.path.parts[:2])

    @property
    def module(self) -> str:
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def sources(*folders: str) -> tuple[Source, ...]:
    """Parse every file of some folders; without any, of the three packages."""
    return tuple(
        Source(path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8")))
        for folder in folders or PACKAGES
        for path in sorted((ROOT / folder).rglob("*.py"))
    )


def imports(source: Source) -> Iterator[tuple[str, int]]:
    """Yield every absolute module name that a file imports, with the line."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source.name}:{node.lineno} imports relatively"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function and method of a file."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def allowed(rule: str) -> dict[str, str]:
    """Read the exceptions to one rule, each with its reason."""
    entries = {}
    for line in (ROOT / "tests/conventions/allowed.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, where, reason = (part.strip() for part in line.split("|"))
            if name == rule:
                entries[where] = reason
    return entries


def assert_none(violations: Iterator[str]) -> None:
    """Fail with every violation of a rule, one a line."""
    found = list(violations)
    assert not found, "\n" + "\n".join(found)
