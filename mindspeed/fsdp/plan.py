"""The sharding plan of a model, and its description as a tree.

Computed from the options on any device, meta too, before ranks start.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mindspeed.config import ConfigError
from mindspeed.fsdp.options import FsdpOptions
from mindspeed.fsdp.patterns import Pattern, child_names, fold

ROOT = ""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules whose forward is never called, so no hook on it fires."""


@dataclass(frozen=True)
class Unit:
    """One sharded module: the parameters that are gathered together, and their sizes."""

    name: str
    parameters: tuple[str, ...]
    bytes_per_rank: int
    """Bytes of weights that every rank keeps, with the padding of uneven shards."""
    trainable_bytes: int
    """The part of them that has gradients and optimizer state."""
    gathered_bytes: int
    """Bytes of weights while the unit is gathered."""


@dataclass(frozen=True)
class Plan:
    """What is sharded, recomputed, ignored and prefetched, by the names of named_modules."""

    options: FsdpOptions
    world_size: int
    replicas: int
    shards: int
    units: tuple[Unit, ...]
    """In definition order, so the root first; applied from the last to the first."""
    recomputed: tuple[str, ...]
    ignored: tuple[str, ...]
    experts: tuple[str, ...]
    ignored_bytes: int
    trainable_ignored: tuple[str, ...]
    """Parameters that are ignored but trainable: nothing would reduce their gradients."""

    @property
    def bytes_per_rank(self) -> int:
        """Bytes of weights that every rank keeps, ignored ones too."""
        return sum(unit.bytes_per_rank for unit in self.units) + self.ignored_bytes

    @property
    def forward_order(self) -> tuple[str, ...]:
        """The sharded modules below the root, in the expected order of the forward pass."""
        return tuple(unit.name for unit in self.units if unit.name != ROOT)


def make_plan(model: nn.Module, options: FsdpOptions, world_size: int) -> Plan:
    """Return the plan for a model on `world_size` ranks; ConfigError if it is impossible."""
    replicas, shards = options.mesh_shape(world_size)
    tree = _ModuleTree(model)
    tree.check_initialized()
    ignored = tree.find("ignored_modules", options.ignored_modules)
    experts = (
        tree.find("moe_modules", options.moe_modules) if options.expert_parallel_size > 1 else ()
    )
    wrapped = tree.find("sub_modules_to_wrap", options.sub_modules_to_wrap)
    recomputed = tree.find("recompute_modules", options.recompute_modules)
    tree.check_callable("sub_modules_to_wrap", wrapped)
    tree.check_callable("recompute_modules", recomputed)
    tree.check_experts(experts)
    units = tree.in_order({ROOT, *wrapped, *experts})
    _check_not_ignored(units, ignored)
    ignored_params = {
        parameter: path
        for name in ignored
        for path, parameter in model.get_submodule(name).named_parameters(name)
    }
    tree.check_gradients(ignored_params)
    owners = tree.owners(units, ignored_params)
    for name in units:
        _check_one_dtype(name, owners[name])
    sizes = _Sizes(options, world_size, shards, frozenset(experts))
    return Plan(
        options=options,
        world_size=world_size,
        replicas=replicas,
        shards=shards,
        units=tuple(sizes.unit(name, owners[name]) for name in units),
        recomputed=recomputed,
        ignored=ignored,
        experts=tuple(experts),
        ignored_bytes=sum(p.numel() * p.element_size() for p in ignored_params),
        trainable_ignored=tuple(path for p, path in ignored_params.items() if p.requires_grad),
    )


class _ModuleTree:
    """The modules of a model by name."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        first = {module: name for name, module in model.named_modules()}
        every = dict(model.named_modules(remove_duplicate=False))
        self._first = {name: first[module] for name, module in every.items()}
        self._children = child_names(every)

    def find(self, key: str, patterns: Iterable[str]) -> tuple[str, ...]:
        """Return the modules that match any pattern of a key, in definition order."""
        found: set[str] = set()
        for pattern in patterns:
            try:
                found.update(self._first[name] for name in Pattern(pattern).match(self._children))
            except ConfigError as error:
                raise ConfigError(f"{key}: {error}") from None
        return self.in_order(found)

    def in_order(self, names: Iterable[str]) -> tuple[str, ...]:
        """Sort names as named_modules does: parents before children."""
        wanted = set(names)
        return tuple(name for name, _ in self._model.named_modules() if name in wanted)

    def check_callable(self, key: str, names: Iterable[str]) -> None:
        """Reject containers of modules or parameters."""
        for name in names:
            module = self._model.get_submodule(name)
            kind = type(module)
            has_forward = kind.forward is not nn.Module.forward or "forward" in vars(module)
            if issubclass(kind, CONTAINERS) or not has_forward:
                below = f"write {name}.{{*}}" if len(list(module.children())) else "leave it out"
                raise ConfigError(
                    f"{key}: {name} is a {kind.__name__}, which is never called itself: {below}"
                )

    def check_experts(self, experts: Iterable[str]) -> None:
        """Reject experts without an expert-parallel forward."""
        for name in experts:
            module = self._model.get_submodule(name)
            if not callable(getattr(module, "ep_forward", None)):
                raise ConfigError(
                    f"moe_modules: {name} ({type(module).__name__}) has no method "
                    "ep_forward(ep_group, ...): write one, or set expert_parallel_size: 1"
                )

    def owners(
        self, units: Sequence[str], ignored: Mapping[nn.Parameter, object]
    ) -> dict[str, dict[str, nn.Parameter]]:
        """Assign every parameter that is not ignored to its innermost unit."""
        owned: dict[str, dict[str, nn.Parameter]] = {name: {} for name in units}
        seen: dict[nn.Parameter, tuple[str, str]] = {}
        for path, parameter in self._model.named_parameters(remove_duplicate=False):
            if parameter in ignored:
                continue
            unit = next(name for name in self._ancestors(path) if name in owned)
            first_unit, first_path = seen.setdefault(parameter, (unit, path))
            if first_unit != unit:
                raise ConfigError(
                    f"{first_path} and {path} are one tied parameter, but {_name(first_unit)} and "
                    f"{_name(unit)} would be sharded separately, which unties it: remove both from "
                    "sub_modules_to_wrap, or untie them"
                )
            _check_shardable(path, parameter)
            if first_path == path:
                owned[unit][path] = parameter
        return owned

    def check_initialized(self) -> None:
        """Reject parameters of lazy modules, which have no shape before the first forward pass."""
        for path, parameter in self._model.named_parameters():
            if is_lazy(parameter):
                module = self._model.get_submodule(path.rpartition(".")[0])
                raise ConfigError(
                    f"{path} has no shape yet ({type(module).__name__}): give its module all "
                    "sizes, or run the model once before it is sharded, in model_provider"
                )

    def check_gradients(self, ignored: Mapping[nn.Parameter, object]) -> None:
        """Reject embeddings with sparse gradients, which FSDP2 cannot reduce."""
        for name, module in self._model.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
                if module.weight.requires_grad and module.weight not in ignored:
                    raise ConfigError(
                        f"{_name(name)} has sparse gradients (sparse=True), which cannot be "
                        "reduced over ranks: build it with sparse=False"
                    )

    def _ancestors(self, path: str) -> Iterator[str]:
        while path:
            path = path.rpartition(".")[0]
            yield self._first[path]


@dataclass(frozen=True)
class _Sizes:
    """Bytes of parameters on one rank."""

    options: FsdpOptions
    world_size: int
    shards: int
    experts: frozenset[str]

    def unit(self, name: str, parameters: Mapping[str, nn.Parameter]) -> Unit:
        """Return the sizes of one unit."""
        is_expert = name in self.experts
        local = {p: self._local_bytes(path, p, is_expert) for path, p in parameters.items()}
        dtype = self.options.param_dtype
        element = DTYPES[dtype].itemsize if dtype else None
        whole = sum(p.numel() * (element or p.element_size()) for p in local)
        return Unit(
            name=name,
            parameters=tuple(parameters),
            bytes_per_rank=sum(local.values()),
            trainable_bytes=sum(size for p, size in local.items() if p.requires_grad),
            gathered_bytes=whole // (self.options.expert_parallel_size if is_expert else 1),
        )

    def _local_bytes(self, path: str, parameter: nn.Parameter, is_expert: bool) -> int:
        rows, *rest = parameter.shape
        shards = self.shards
        if is_expert:
            ep_size = self.options.expert_parallel_size
            if rows % ep_size:
                raise ConfigError(
                    f"expert_parallel_size: {ep_size} does not divide the {rows} experts of {path}"
                )
            rows //= ep_size
            shards = self.world_size // ep_size if self.options.reshard_local_experts else 1
            if shard_dim((rows, *rest), shards) == 1:
                rest[0] //= shards
                shards = 1
        return math.ceil(rows / shards) * math.prod(rest) * parameter.element_size()


def shard_dim(shape: Sequence[int], shards: int) -> int:
    """Return the dimension along which stacked experts are sharded: few experts, wide matrices."""
    return 1 if len(shape) == 3 and shape[1] % shards == 0 else 0


def _check_not_ignored(units: Iterable[str], ignored: Sequence[str]) -> None:
    for name in units:
        parent = next((i for i in ignored if f"{name}.".startswith(f"{i}.") or i == ROOT), None)
        if parent is not None:
            raise ConfigError(
                f"{_name(name)} is to be sharded, but ignored_modules contains {_name(parent)}: "
                "remove it from one of the two lists"
            )


def _check_shardable(path: str, parameter: nn.Parameter) -> None:
    """Reject what torch cannot shard, or shards without what the user added to it."""
    if parameter.dim() == 0:
        raise ConfigError(
            f"{path} is a scalar, which cannot be sharded: make it a tensor of one "
            "element, or freeze its module and name it in ignored_modules"
        )
    if parameter.numel() == 0 and parameter.requires_grad:
        raise ConfigError(
            f"{path} has no elements (shape {tuple(parameter.shape)}), so nothing could be "
            "reduced: leave it out (register_parameter(name, None))"
        )
    if not parameter.is_contiguous():
        raise ConfigError(
            f"{path} is not contiguous in memory (strides {parameter.stride()}), which torch "
            "cannot shard: in model_provider, make it so (.contiguous(), or model.to("
            "memory_format=torch.contiguous_format) after channels_last)"
        )
    if parameter.requires_grad and (
        parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    ):
        raise ConfigError(
            f"{path} has a hook on its gradient, which sharding would silently drop: change the "
            "weight in forward instead (to train some rows only: torch.where(rows, weight, "
            "weight.detach())), or freeze it"
        )


def _check_one_dtype(unit: str, parameters: Mapping[str, nn.Parameter]) -> None:
    """Reject trained parameters of several dtypes: their gradients are reduced as one tensor."""
    first: dict[torch.dtype, str] = {}
    for path, parameter in parameters.items():
        if parameter.requires_grad:
            first.setdefault(parameter.dtype, path)
    if len(first) > 1:
        (dtype, path), (other_dtype, other) = list(first.items())[:2]
        raise ConfigError(
            f"{path} is {dtype} and {other} is {other_dtype}, both trained as parts of "
            f"{_name(unit)}: give the modules of one dtype units of their own in "
            "sub_modules_to_wrap, or all one dtype (param_dtype sets that of the computation)"
        )


def _name(name: str) -> str:
    return name or "the root"


@dataclass(frozen=True)
class PlanRow:
    """One module, or several equal ones: its depth, its class, and what is applied to it."""

    depth: int
    name: str
    kind: str
    marks: tuple[str, ...]
    parameters: int
    bytes_per_rank: int


@dataclass(frozen=True)
class _Node:
    row: PlanRow
    children: tuple[_Node, ...]


def describe(model: nn.Module, plan: Plan) -> list[PlanRow]:
    """Return the tree of a plan, expanded only where the plan differs among modules."""
    return list(_rows(_RowTree(model, plan).node(ROOT, ROOT, 0)))


class _RowTree:
    """Builds the nodes of the tree."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._modules = dict(model.named_modules())
        self._children = child_names(self._modules)
        self._marks = {name: tuple(_marks(name, plan)) for name in self._modules}
        self._units = {unit.name: unit for unit in plan.units}
        self._ignored = plan.ignored

    def node(self, path: str, name: str, depth: int) -> _Node:
        """Build the node of a module, and of its children if anything is applied to them."""
        module = self._modules[path]
        children: tuple[_Node, ...] = ()
        if any(self._marks[other] for other in self._below(path)):
            children = tuple(
                self.node(f"{path}.{child}" if path else child, child, depth + 1)
                for child in self._children[path]
            )
        row = PlanRow(
            depth=depth,
            name=name,
            kind=type(module).__name__,
            marks=self._marks[path],
            parameters=sum(p.numel() for p in module.parameters()),
            bytes_per_rank=self._bytes_per_rank(path),
        )
        return _Node(row, _merge(children))

    def _below(self, path: str) -> Iterator[str]:
        start = f"{path}." if path else ""
        return (name for name in self._modules if name != path and name.startswith(start))

    def _bytes_per_rank(self, path: str) -> int:
        """Return the bytes that a rank keeps of units and ignored modules at and below a path."""
        within = [path, *self._below(path)]
        ignored = (self._modules[name] for name in within if name in self._ignored)
        whole: int = sum(
            p.numel() * p.element_size() for module in ignored for p in module.parameters()
        )
        units = (self._units[name] for name in within if name in self._units)
        return whole + sum(unit.bytes_per_rank for unit in units)


def _marks(name: str, plan: Plan) -> Iterator[str]:
    if any(unit.name == name for unit in plan.units):
        yield "experts" if name in plan.experts else "sharded"
    if name in plan.recomputed:
        yield "recomputed"
    if name in plan.ignored:
        yield "ignored"


def _merge(nodes: tuple[_Node, ...]) -> tuple[_Node, ...]:
    """Merge runs of numbered nodes that are otherwise equal."""
    merged: list[tuple[_Node, list[str]]] = []
    for node in nodes:
        name = node.row.name
        if merged and name.isdigit() and _unnamed(node) == _unnamed(merged[-1][0]):
            merged[-1][1].append(name)
        else:
            merged.append((node, [name]))
    return tuple(
        replace(node, row=replace(node.row, name=fold(names)[0])) for node, names in merged
    )


def _unnamed(node: _Node) -> _Node:
    is_numbered = node.row.name.isdigit()
    return replace(node, row=replace(node.row, name="")) if is_numbered else node


def _rows(node: _Node) -> Iterator[PlanRow]:
    yield node.row
    for child in node.children:
        yield from _rows(child)
