"""Observable effects of every option: dtypes, collectives, order of all-gathers, errors."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed.config import ConfigError, build
from mindspeed.fsdp import FsdpOptions, shard
from tests.distributed.fsdp_model import BATCH, LAYERS, SEQUENCE, Training, new_model, train
from tests.ranks import run_ranks

WORLD = 2
SHARD = {"sharding_size": "auto", "sub_modules_to_wrap": ["embed", "layers.{*}", "head"]}
UNITS = LAYERS + 2
MIXED = {
    **SHARD,
    **{"param_dtype": "bf16", "reduce_dtype": "fp32", "output_dtype": "fp32"},
    "cast_forward_inputs": True,
}
LOG = {
    "zero-3": SHARD,
    "zero-2": {**SHARD, "reshard_after_forward": False},
    "no backward prefetch": {**SHARD, "num_to_backward_prefetch": 0},
    "forward prefetch": {**SHARD, "num_to_forward_prefetch": 2},
    "backward prefetch": {**SHARD, "num_to_backward_prefetch": 3},
    "recomputed": {**SHARD, "recompute_modules": ["layers.{0,2}"]},
}


class Log(TorchDispatchMode):
    """Records, in order, the all-gathers and the events of hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "c10d::_allgather_base_":
            self.events.append("gather")
        return func(*args, **(kwargs or {}))


def observe() -> dict[str, Any]:
    """Run all cases on one rank."""
    ours, theirs = new_model(), new_model()
    shard(ours, build(FsdpOptions, MIXED))
    _shard_by_hand(theirs)
    seen: dict[str, Any] = {
        "mixed": [train(model, dist.get_rank(), WORLD) for model in (ours, theirs)],
        "dtypes": _dtypes(),
        "guide": _guide(),
        "errors": _errors(),
    }
    ahead = {**SHARD, "num_to_forward_prefetch": 1, "num_to_backward_prefetch": 2}
    seen["first pass"], seen["second pass"] = (_log(ahead, True, passes) for passes in (1, 2))
    return seen | {name: _log(values) for name, values in LOG.items()}


def _shard_by_hand(model: torch.nn.Module) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32, True)
    mesh = init_device_mesh("cpu", (WORLD,))
    for module in (model.embed, *model.layers, model.head, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(BATCH, SEQUENCE, dtype=torch.long), torch.ones(BATCH, SEQUENCE, 5)


def _log(values: dict[str, Any], is_reversed: bool = False, passes: int = 1) -> list[str]:
    """Return the events of the last pass of a model, which may run its layers in reverse."""
    model, log = new_model(), Log()
    names = dict(model.named_modules())
    for name in ("embed", *(f"layers.{n}" for n in range(LAYERS)), "head"):
        inner = names[name].forward

        def forward(*args: Any, _name: str = name, _inner: Any = inner, **kwargs: Any) -> Any:
            log.events.append(_name)
            output = _inner(*args, **kwargs)
            tensor = output[0] if isinstance(output, tuple) else output
            if tensor.requires_grad:
                tensor.register_hook(lambda _: log.events.append(f"{_name} reached"))
            return output

        names[name].forward = forward
    shard(model, build(FsdpOptions, values))
    if is_reversed:
        model.layers = torch.nn.ModuleList(reversed(model.layers))
    for _ in range(passes):
        log.events.clear()
        with log:
            loss = model(*_batch()).sum()
            log.events.append("backward")
            loss.backward()
    return log.events


class Probe(torch.nn.Module):
    """Records the dtypes of its input and of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: Any) -> Any:
        self.seen = [x.dtype, self.weight.dtype]
        return x * 1


def _dtypes() -> dict[str, list[torch.dtype]]:
    """Return the dtypes of the input, the gathered weight, the output and the sharded weight."""
    found = {}
    for name, values in {
        "cast": {"param_dtype": "bf16", "output_dtype": "fp16"},
        "not cast": {"param_dtype": "fp16", "cast_forward_inputs": False},
        "left alone": {},
    }.items():
        probe = Probe()
        shard(probe, build(FsdpOptions, values))
        output = probe(torch.ones(2))
        probe.reshard()
        found[name] = [*probe.seen, output.dtype, probe.weight.dtype]
    return found


def _guide() -> tuple[list[torch.dtype], list[float]]:
    """Train with the file of the guide: a frozen encoder in fp32 within a model in bf16."""
    model = new_model()
    types = []
    model.image_encoder[0].register_forward_hook(lambda *given: types.append(given[2].dtype))
    values = {**SHARD, "ignored_modules": ["image_encoder"], "param_dtype": "bf16"}
    shard(model, build(FsdpOptions, {**values, "reduce_dtype": "fp32"}))
    model.image_encoder.register_forward_hook(lambda *given: types.append(given[2].dtype))
    losses = train(model, dist.get_rank(), WORLD).losses
    return types[:2], losses


def _errors() -> dict[str, str]:
    errors = {}
    for key, values in {
        "trained": {"ignored_modules": ["layers.1"]},
        "size": {"sharding_size": 3},
        "part": {**SHARD, "reshard_after_forward": 2},
        "typo": {"sub_modules_to_wrap": ["layer.{*}"]},
        "experts": {"moe_modules": ["layers.{*}.proj"], "expert_parallel_size": 2},
    }.items():
        try:
            shard(new_model(), build(FsdpOptions, values))
        except ConfigError as error:
            errors[key] = str(error)
    return errors


@functools.cache
def seen() -> dict[str, Any]:
    return run_ranks(observe, WORLD, timeout=300)[0]


def test_mixed_precision_is_bit_equal_to_torch():
    ours, theirs = seen()["mixed"]
    assert isinstance(ours, Training)
    assert ours.losses == theirs.losses
    for mine, other in zip(ours.gradients, theirs.gradients, strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_dtypes_are_cast_as_configured():
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    dtypes = seen()["dtypes"]
    assert dtypes["cast"] == [bf16, bf16, fp16, fp32]
    assert dtypes["not cast"] == [fp32, fp16, fp32, fp32]
    assert dtypes["left alone"] == [fp32] * 4


def test_an_ignored_module_keeps_its_dtype():
    types, losses = seen()["guide"]
    assert types == [torch.float32, torch.bfloat16]
    assert losses == pytest.approx(train(new_model()).losses, rel=0.02)


def gathers(name: str) -> tuple[int, int]:
    events = seen()[name]
    middle = events.index("backward")
    return events[:middle].count("gather"), events[middle:].count("gather")


def test_zero3_gathers_twice_and_zero2_once():
    assert gathers("zero-3") == (UNITS + 1, UNITS)  # the root stays for the backward pass
    assert gathers("zero-2") == (UNITS + 1, 0)
    assert gathers("forward prefetch") == gathers("backward prefetch") == gathers("zero-3")


def gathered_before(name: str) -> list[int]:
    """Return the all-gathers issued before each unit ran forward, without that of the root."""
    events = seen()[name][: seen()[name].index("backward")]
    indices = [index for index, event in enumerate(events) if event != "gather"]
    return [events[:index].count("gather") - 1 for index in indices]


def test_forward_prefetch():
    assert gathered_before("zero-3") == [1, 2, 3, 4, 5]
    assert gathered_before("forward prefetch") == [3, 4, 5, 5, 5]


def gathered_before_backward(name: str) -> list[int]:
    """Return the all-gathers issued when the backward pass reached each unit, last unit first."""
    events = seen()[name][seen()[name].index("backward") :]
    indices = [index for index, event in enumerate(events) if event.endswith("reached")]
    return [events[:index].count("gather") for index in indices]


def test_backward_prefetch():
    assert gathered_before_backward("no backward prefetch") == [0, 1, 2, 3, 4]
    assert gathered_before_backward("zero-3") == [0, 2, 3, 4, 5]
    assert gathered_before_backward("backward prefetch") == [0, 4, 5, 5, 5]


def test_prefetch_follows_the_order_of_the_first_pass():
    """The layers run from the last to the first."""
    assert [e for e in seen()["second pass"] if e.startswith("layers")][:3] == [
        f"layers.{number}" for number in reversed(range(LAYERS))
    ]
    assert gathered_before("first pass") != gathered_before("second pass") == [2, 3, 4, 5, 5]
    assert gathered_before_backward("second pass") == [0, 3, 4, 5, 5]


def test_recompute_reruns_the_named_layers():
    events = seen()["recomputed"]
    again = [event for event in events[events.index("backward") :] if event.startswith("layers")]
    assert [event for event in again if "reached" not in event] == ["layers.2", "layers.0"]


def test_impossible_options_raise_one_line_errors():
    errors = seen()["errors"]
    assert "layers.1.input_norm.weight, which is trainable" in errors["trained"]
    assert errors["size"] == "sharding_size: 3 does not divide 2 rank(s): use 1, 2"
    assert errors["part"].endswith("use true, false")
    assert errors["typo"].endswith("the model has no layer; did you mean layers?")
    assert "layers.0.proj (Linear) has no method ep_forward" in errors["experts"]


def test_a_process_group_of_one_rank():
    (losses,) = run_ranks(_single_rank, 1, timeout=300)
    assert losses == pytest.approx(train(new_model()).losses, abs=1e-6)


def _single_rank() -> list[float]:
    model = new_model()
    shard(model, build(FsdpOptions, SHARD))
    return train(model).losses
