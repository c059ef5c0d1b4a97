"""Optimizer state that was saved with experts on every rank, for ranks that share them, and back.

Megatron has a second optimizer for experts that are distributed over ranks. Then `chained_0.` and
`chained_1.` stand before the names of their tensors, and the rest of the state is by number.
"""

import copy
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

_NUMBER = re.compile(r"\bchained_\d+\.")
_KIND = ("wd_mult", "lr_mult", "is_decoupled_lr")
"""What tells the groups of parameters of one optimizer apart."""


def rename(wanted: Any, stored: Collection[str]) -> None:
    """Ask for tensors by the names that a checkpoint has them under."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    known = {_NUMBER.sub("", name, count=1): name for name in stored if "optimizer." in name}
    for value in nested_values(wanted):
        key = getattr(value, "key", None)
        if isinstance(key, str) and key not in stored:
            value.key = known.get(_NUMBER.sub("", key, count=1), key)


def regroup(loaded: dict[Any, Any], optimizers: Sequence[Any]) -> dict[Any, Any]:
    """Return the state of these optimizers, whatever the number of those that were saved."""
    by_number = {key: value for key, value in loaded.items() if isinstance(key, int)}
    plain = {key: value for key, value in loaded.items() if key not in by_number}
    if len(optimizers) == 1 and by_number:
        return _filled(plain, by_number[min(by_number)], optimizers[0])
    if len(optimizers) > 1 and plain:
        return {
            number: _filled(by_number.get(number, {}), plain, optimizer)
            for number, optimizer in enumerate(optimizers)
        }
    states = [loaded] if len(optimizers) == 1 else [loaded[number] for number in sorted(by_number)]
    for state, optimizer in zip(states, optimizers, strict=True):
        _order(state, optimizer)
    return loaded


def _order(state: dict[str, Any], optimizer: Any) -> None:
    """Give each group the settings of its kind: Megatron 0.12 takes those of the same number.

    Groups are in the order of the parameters, and so another one on another pipeline stage, while
    the settings are those of the first.
    """
    is_stub = getattr(optimizer, "is_stub_optimizer", False)
    groups = [] if is_stub else optimizer.optimizer.param_groups
    inner = state["optimizer"] if "optimizer" in state else state
    saved = inner.get("param_groups", [])
    inner["param_groups"] = [
        _settings(group, saved) | {name: mine[name] for name in mine.keys() & {"params"}}
        for group, mine in zip(groups, saved)
    ]


def _filled(state: Mapping[str, Any], saved: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
    """Add what another optimizer saved beside its tensors: settings and the number of steps."""
    whole = _union(state, copy.deepcopy(saved))  # two optimizers may be made of one
    inner = whole["optimizer"] if "optimizer" in whole else whole
    theirs = (saved["optimizer"] if "optimizer" in saved else saved)["param_groups"]
    ours = (state["optimizer"] if "optimizer" in state else state).get("param_groups", [])
    inner["param_groups"] = [
        _settings(group, theirs) | (ours[number] if number < len(ours) else {})
        for number, group in enumerate(optimizer.optimizer.param_groups)
    ]
    return whole


def _settings(group: Mapping[str, Any], saved: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the saved settings of a group, but which parameters it is for."""
    alike = [other for other in saved if all(other[key] == group[key] for key in _KIND)]
    kind = {key: group[key] for key in (*_KIND, "is_expert_parallel")}
    return {**(alike or saved)[0], **kind}


def _union(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    both = {**second, **first}
    for key in first.keys() & second.keys():
        if isinstance(first[key], dict) and isinstance(second[key], dict):
            both[key] = _union(first[key], second[key])
    return both
