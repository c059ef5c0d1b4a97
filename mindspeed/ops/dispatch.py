"""Pick the implementation of an operator by the device of its tensors, or the forced one.

`MINDSPEED_OPS=swiglu=npu,rms_norm=reference` forces implementations by name.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import logging
import os
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

logger = logging.getLogger(__name__)

VARIABLE = "MINDSPEED_OPS"
REFERENCE = "reference"
NUM_POSITIONAL = 6  # parameters that implementations take by position


@dataclass(frozen=True)
class Impl:
    """One implementation of an operator: where it lives, on which device it runs, what it needs."""

    name: str
    target: str
    device: str
    needs: tuple[str, ...] = ()

    def obstacle(self, device: str) -> str | None:
        """Return why this implementation cannot run on `device`, or None when it can."""
        if device != self.device:
            return f"it runs on {self.device}, the tensors are on {device}"
        for package in self.needs:
            if importlib.util.find_spec(package) is None:
                return f"the package {package} is not installed"
        return None


@dataclass(frozen=True)
class Choice:
    """The implementation of an operator on one device, and why those before it were skipped."""

    name: str
    target: str
    obstacles: tuple[str, ...] = ()


class Op:
    """An operator that runs the fastest implementation for the device of its first tensor.

    `check` takes the operator's arguments and raises for those that no implementation supports.
    `parameters` names all arguments in the documented order, where those past the sixth may be
    given by position too; implementations take these by keyword.
    """

    def __init__(
        self,
        name: str,
        *,
        reference: str,
        impls: tuple[Impl, ...] = (),
        check: str | None = None,
        parameters: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.impls = impls
        self._parameters = parameters
        self._reference = reference
        self._check = check
        self._chosen: dict[str, Callable[..., Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator."""
        for value in args:
            if isinstance(value, torch.Tensor):
                return self.choose(value.device.type)(*args, **kwargs)
        device = _device_of([*args, *kwargs.values()])
        if device is None:
            raise TypeError(
                f"op {self.name} was called without a tensor: pass one, its device selects the "
                "implementation"
            )
        return self.choose(device)(*args, **kwargs)

    def choose(self, device: str) -> Callable[..., Any]:
        """Return the implementation for tensors on `device` ("cpu", "cuda", "npu")."""
        return self._chosen[self._load_for(device)]

    @torch.compiler.assume_constant_result
    def _load_for(self, device: str) -> str:
        # A compiler traces neither the environment nor imports: it takes the key as a constant.
        forced = os.environ.get(VARIABLE)
        key = device if forced is None else f"{device} {forced}"
        if key not in self._chosen:
            self._chosen[key] = self._build(self.choice(device))
        return key

    def choice(self, device: str) -> Choice:
        """Return which implementation runs for tensors on `device`, and why no faster one does."""
        forced = _forced().get(self.name)
        if forced == REFERENCE:
            return Choice(REFERENCE, self._reference)
        if forced is not None:
            return self._force(device, forced)
        obstacles: list[str] = []
        for impl in (impl for impl in self.impls if impl.device == device):
            reason = impl.obstacle(device)
            if reason is None:
                return Choice(impl.name, impl.target, tuple(obstacles))
            obstacles.append(f"{impl.name}: {reason}")
        return Choice(REFERENCE, self._reference, tuple(obstacles))

    def _force(self, device: str, forced: str) -> Choice:
        known = {impl.name: impl for impl in self.impls}
        if forced not in known:
            _raise_unknown(f"{VARIABLE}={self.name}={forced}", forced, [REFERENCE, *known])
        reason = known[forced].obstacle(device)
        if reason is not None:
            raise RuntimeError(
                f"{VARIABLE}={self.name}={forced} cannot run: {reason}. "
                f"Known implementations: {', '.join([REFERENCE, *known])}"
            )
        return Choice(forced, known[forced].target)

    def _build(self, choice: Choice) -> Callable[..., Any]:
        if choice.obstacles:
            reasons = "; ".join(choice.obstacles)
            logger.info("op %s uses %s (%s)", self.name, choice.name, reasons)
        run = _load(choice.target)
        if self._check is not None:
            run = _checked(_load(self._check), run)
        return _by_name(self.name, self._parameters, run) if self._parameters else run


def _checked(check: Callable[..., None], run: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return run(*args, **kwargs)

    return checked


def _by_name(op: str, parameters: tuple[str, ...], run: Callable[..., Any]) -> Callable[..., Any]:
    def named(*args: Any, **kwargs: Any) -> Any:
        unknown = [name for name in kwargs if name not in parameters]
        if unknown or len(args) > len(parameters):
            given = ", ".join(unknown) or f"{len(args)} arguments"
            raise TypeError(f"{op} does not take {given}. It takes: {', '.join(parameters)}")
        later = dict(zip(parameters[NUM_POSITIONAL:], args[NUM_POSITIONAL:]))
        return run(*args[:NUM_POSITIONAL], **later, **kwargs)

    return named


def _forced() -> dict[str, str]:
    text = os.environ.get(VARIABLE, "")
    return _parse(text) if text else {}


@functools.cache
def _parse(text: str) -> dict[str, str]:
    choices = {}
    for item in text.split(","):
        name, separator, choice = (part.strip() for part in item.partition("="))
        if not (name and separator and choice):
            raise ValueError(f"{VARIABLE}={text}: write op=implementation[,op=implementation]")
        known = list(known_ops())
        if name not in known:
            _raise_unknown(f"{VARIABLE}={text}", name, known)
        choices[name] = choice
    return choices


def refuse_gradient(name: str, tensors: Iterable[torch.Tensor | None]) -> None:
    """Raise ValueError if a gradient would get lost in an operator that has none."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise ValueError(f"{name} has no gradient: call it under torch.no_grad()")


def known_ops() -> dict[str, Op]:
    """Return every operator by its name."""
    package = importlib.import_module(__package__)
    found: dict[str, Op] = {}
    for module in pkgutil.iter_modules(package.__path__):
        if module.ispkg:
            values = vars(importlib.import_module(f"{__package__}.{module.name}")).values()
            found.update((value.name, value) for value in values if isinstance(value, Op))
    return dict(sorted(found.items()))


def _raise_unknown(given: str, name: str, known: list[str]) -> NoReturn:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise ValueError(f"{given}: {name} is not known. Known: {', '.join(known)}.{hint}")


def _device_of(values: Iterable[Any]) -> str | None:
    for value in values:
        if isinstance(value, torch.Tensor):
            return value.device.type
        if isinstance(value, (list, tuple)):
            found = _device_of(value)
            if found is not None:
                return found
    return None


def _load(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    implementation: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return implementation


def is_tracing() -> bool:
    """Return whether a compiler or a dispatch mode, such as the FLOP counter, is tracing.

    They need torch's own operators, not those of a package.
    """
    return torch.compiler.is_compiling() or bool(torch._C._len_torch_dispatch_stack())
