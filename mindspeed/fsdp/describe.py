"""A plan as a tree of lines: what happens to every module, with equal neighbours in one line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from mindspeed.fsdp.patterns import child_names, fold
from mindspeed.fsdp.plan import ROOT, Plan


@dataclass(frozen=True)
class Line:
    """One module, or several equal ones: where in the tree, what it is, what happens to it."""

    depth: int
    name: str
    kind: str
    marks: tuple[str, ...]
    parameters: int
    held: int


@dataclass(frozen=True)
class _Node:
    line: Line
    inside: tuple[_Node, ...]


def describe(model: nn.Module, plan: Plan) -> list[Line]:
    """Return the tree, opened only as far as something differs inside."""
    return list(_lines(_Tree(model, plan).node(ROOT, ROOT, 0)))


class _Tree:
    """Builds the nodes."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._modules = dict(model.named_modules())
        self._children = child_names(self._modules)
        self._marks = {name: tuple(_marks(name, plan)) for name in self._modules}
        self._owned = {unit.name: unit for unit in plan.units}
        self._ignored = plan.ignored

    def node(self, path: str, name: str, depth: int) -> _Node:
        """Build the node of a module, and those of its children if anything happens to them."""
        module = self._modules[path]
        inside: tuple[_Node, ...] = ()
        if any(self._marks[other] for other in self._below(path)):
            inside = tuple(
                self.node(f"{path}.{child}" if path else child, child, depth + 1)
                for child in self._children[path]
            )
        line = Line(
            depth=depth,
            name=name,
            kind=type(module).__name__,
            marks=self._marks[path],
            parameters=sum(p.numel() for p in module.parameters()),
            held=self._held(path),
        )
        return _Node(line, _merge(inside))

    def _below(self, path: str) -> Iterator[str]:
        start = f"{path}." if path else ""
        return (name for name in self._modules if name != path and name.startswith(start))

    def _held(self, path: str) -> int:
        """Sum up what a rank keeps of the units, and of the ignored, at and below a path."""
        within = [path, *self._below(path)]
        kept = (self._modules[name] for name in within if name in self._ignored)
        whole: int = sum(
            p.numel() * p.element_size() for module in kept for p in module.parameters()
        )
        return whole + sum(self._owned[name].held for name in within if name in self._owned)


def _marks(name: str, plan: Plan) -> Iterator[str]:
    if any(unit.name == name for unit in plan.units):
        yield "experts" if name in plan.experts else "sharded"
    if name in plan.recomputed:
        yield "recomputed"
    if name in plan.ignored:
        yield "ignored"


def _merge(nodes: tuple[_Node, ...]) -> tuple[_Node, ...]:
    """Write a run of numbered nodes that differ in nothing else as one."""
    merged: list[tuple[_Node, list[str]]] = []
    for node in nodes:
        name = node.line.name
        if merged and name.isdigit() and _unnamed(node) == _unnamed(merged[-1][0]):
            merged[-1][1].append(name)
        else:
            merged.append((node, [name]))
    return tuple(
        replace(node, line=replace(node.line, name=fold(names)[0])) for node, names in merged
    )


def _unnamed(node: _Node) -> _Node:
    is_numbered = node.line.name.isdigit()
    return replace(node, line=replace(node.line, name="")) if is_numbered else node


def _lines(node: _Node) -> Iterator[Line]:
    yield node.line
    for inner in node.inside:
        yield from _lines(inner)
