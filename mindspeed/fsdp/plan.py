"""What the options mean for a model: computed on any device, meta too, before ranks start."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from mindspeed.config import ConfigError
from mindspeed.fsdp.options import FsdpOptions
from mindspeed.fsdp.patterns import Pattern, child_names

ROOT = ""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NEVER_RUN = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Unit:
    """One sharded module: the parameters that are gathered together, and what they take."""

    name: str
    parameters: tuple[str, ...]
    held: int
    """Bytes of weights that every rank keeps, with the padding of uneven shards."""
    trained: int
    """The part of them that has gradients and optimizer state."""
    gathered: int
    """Bytes of weights while the unit is gathered."""


@dataclass(frozen=True)
class Plan:
    """What is sharded, recomputed, ignored and prefetched; names are those of named_modules."""

    options: FsdpOptions
    ranks: int
    replicas: int
    shards: int
    units: tuple[Unit, ...]
    """In the order of definition, so the root first; applied from the last to the first."""
    recomputed: tuple[str, ...]
    ignored: tuple[str, ...]
    experts: tuple[str, ...]
    ignored_bytes: int
    trained_ignored: tuple[str, ...]
    """Parameters that are ignored and yet trained: nothing would bring their gradients together."""

    @property
    def held(self) -> int:
        """Bytes of weights that every rank keeps, ignored ones too."""
        return sum(unit.held for unit in self.units) + self.ignored_bytes

    @property
    def order(self) -> tuple[str, ...]:
        """The sharded modules below the root, as the forward pass is expected to need them."""
        return tuple(unit.name for unit in self.units if unit.name != ROOT)


def make_plan(model: nn.Module, options: FsdpOptions, ranks: int) -> Plan:
    """Work out the plan for a model on so many ranks; ConfigError for what cannot be done."""
    replicas, shards = options.layout(ranks)
    names = _Names(model)
    ignored = names.find("ignored_modules", options.ignored_modules)
    experts = (
        names.find("moe_modules", options.moe_modules) if options.expert_parallel_size > 1 else ()
    )
    wrapped = names.find("sub_modules_to_wrap", options.sub_modules_to_wrap)
    recomputed = names.find("recompute_modules", options.recompute_modules)
    names.must_run("sub_modules_to_wrap", wrapped)
    names.must_run("recompute_modules", recomputed)
    names.must_split(experts)
    units = names.in_order({ROOT, *wrapped, *experts})
    _must_not_be_ignored(units, ignored)
    kept = {
        parameter: path
        for name in ignored
        for path, parameter in model.get_submodule(name).named_parameters(name)
    }
    owners = names.owners(units, kept)
    sizes = _Sizes(options, ranks, shards, frozenset(experts))
    return Plan(
        options=options,
        ranks=ranks,
        replicas=replicas,
        shards=shards,
        units=tuple(sizes.unit(name, owners[name]) for name in units),
        recomputed=recomputed,
        ignored=ignored,
        experts=tuple(experts),
        ignored_bytes=sum(p.numel() * p.element_size() for p in kept),
        trained_ignored=tuple(path for p, path in kept.items() if p.requires_grad),
    )


class _Names:
    """The module tree of a model by name."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        first = {module: name for name, module in model.named_modules()}
        every = dict(model.named_modules(remove_duplicate=False))
        self._first = {name: first[module] for name, module in every.items()}
        self._children = child_names(every)

    def find(self, key: str, patterns: Iterable[str]) -> tuple[str, ...]:
        """Return the modules that match any of the patterns of a key, in order of definition."""
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

    def must_run(self, key: str, names: Iterable[str]) -> None:
        """Refuse containers: their forward is never called, so no hook on it would fire."""
        for name in names:
            kind = type(self._model.get_submodule(name))
            if issubclass(kind, NEVER_RUN):
                raise ConfigError(
                    f"{key}: {name} is a {kind.__name__}, which is never called itself: "
                    f"write {name}.{{*}}"
                )

    def must_split(self, experts: Iterable[str]) -> None:
        """Refuse experts that cannot run on a part of themselves."""
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
        """Give every parameter that is not ignored to the innermost unit around it."""
        owned: dict[str, dict[str, nn.Parameter]] = {name: {} for name in units}
        seen: dict[nn.Parameter, tuple[str, str]] = {}
        for path, parameter in self._model.named_parameters(remove_duplicate=False):
            if parameter in ignored:
                continue
            unit = next(name for name in self._around(path) if name in owned)
            first_unit, first_path = seen.setdefault(parameter, (unit, path))
            if first_unit != unit:
                raise ConfigError(
                    f"{first_path} and {path} are one tied parameter, but {_named(first_unit)} and "
                    f"{_named(unit)} would be sharded apart and untie it: take both out of "
                    "sub_modules_to_wrap, or untie them"
                )
            if parameter.dim() == 0:
                raise ConfigError(
                    f"{path} is a scalar, which cannot be sharded: make it a tensor of one "
                    "element, or freeze its module and name it in ignored_modules"
                )
            if first_path == path:
                owned[unit][path] = parameter
        return owned

    def _around(self, path: str) -> Iterator[str]:
        while path:
            path = path.rpartition(".")[0]
            yield self._first[path]


@dataclass(frozen=True)
class _Sizes:
    """Bytes of parameters on one rank."""

    options: FsdpOptions
    ranks: int
    shards: int
    experts: frozenset[str]

    def unit(self, name: str, parameters: Mapping[str, nn.Parameter]) -> Unit:
        """Sum up one unit."""
        is_expert = name in self.experts
        held = {p: self._held(path, p, is_expert) for path, p in parameters.items()}
        dtype = self.options.param_dtype
        element = DTYPES[dtype].itemsize if dtype else None
        whole = sum(p.numel() * (element or p.element_size()) for p in held)
        return Unit(
            name=name,
            parameters=tuple(parameters),
            held=sum(held.values()),
            trained=sum(size for p, size in held.items() if p.requires_grad),
            gathered=whole // (self.options.expert_parallel_size if is_expert else 1),
        )

    def _held(self, path: str, parameter: nn.Parameter, is_expert: bool) -> int:
        rows, *rest = parameter.shape
        shards = self.shards
        if is_expert:
            local = self.options.expert_parallel_size
            if rows % local:
                raise ConfigError(
                    f"expert_parallel_size: {local} does not divide the {rows} experts of {path}"
                )
            rows //= local
            shards = self.ranks // local if self.options.reshard_local_experts else 1
            if shard_dim((rows, *rest), shards) == 1:
                rest[0] //= shards
                shards = 1
        return math.ceil(rows / shards) * math.prod(rest) * parameter.element_size()


def shard_dim(shape: Sequence[int], shards: int) -> int:
    """Return the dimension along which stacked experts are sharded: few experts, wide matrices."""
    return 1 if len(shape) == 3 and shape[1] % shards == 0 else 0


def _must_not_be_ignored(units: Iterable[str], ignored: Sequence[str]) -> None:
    for name in units:
        around = next((i for i in ignored if f"{name}.".startswith(f"{i}.") or i == ROOT), None)
        if around is not None:
            raise ConfigError(
                f"{_named(name)} is to be sharded, but ignored_modules holds {_named(around)}: "
                "take it out of one of the two lists"
            )


def _named(name: str) -> str:
    return name or "the root"
