"""Stand-ins for the functions and classes of torch.cuda that Megatron calls."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.cuda.nvtx as nvtx
import torch.cuda.random as cuda_random

from mindspeed.device.facade.caller import is_other_library, is_torch
from mindspeed.device.streams import Event, Stream

if TYPE_CHECKING:
    from mindspeed.device.cpu import Cpu

_TENSOR_TYPES = "Byte Char Short Int Long Half BFloat16 Float Double Bool".split()
# A cpu has no such number. With less Megatron refuses grouped GEMMs, with more it asks for what
# newer GPUs have.
_CAPABILITY = (8, 0)
_SENSORS = ("temperature", "power_draw", "utilization", "memory_usage", "clock_rate")


def redirections(cpu: Cpu) -> Iterator[tuple[object, str, object]]:
    """Yield (owner, attribute, stand-in) for torch.cuda and its sub-modules."""
    for table in (_devices(cpu), _streams(cpu), _memory(cpu), _graphs()):
        for name, stand_in in table.items():
            yield torch.cuda, name, stand_in
    for name, stand_in in _random(cpu).items():
        yield torch.cuda, name, stand_in
        if hasattr(cuda_random, name):
            yield cuda_random, name, stand_in
    for name in _TENSOR_TYPES:
        yield torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor")
    for name in ("range_push", "range_pop", "mark"):
        yield nvtx, name, _nothing
    yield nvtx, "range", lambda *args, **kwargs: contextlib.nullcontext()


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: the cpu needs no such call."""


def _devices(cpu: Cpu) -> dict[str, object]:
    # Unwrapped: where one facade stands upon another, the truth lies below both.
    truly_available = inspect.unwrap(torch.cuda.is_available)
    truly_counted = inspect.unwrap(torch.cuda.device_count)
    true_properties = inspect.unwrap(torch.cuda.get_device_properties)

    @functools.wraps(truly_available)
    def is_available() -> bool:
        return truly_available() if is_other_library() else True

    @functools.wraps(truly_counted)
    def device_count() -> int:
        return truly_counted() if is_other_library() else cpu.count()

    def set_device(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        cpu.set_index(index or 0)

    @functools.wraps(true_properties)
    def get_device_properties(device: Any = None) -> Any:
        # The compiler of torch makes its cache keys of a GPU's properties, and of none without one.
        if is_torch():
            return true_properties(device)
        cores = os.cpu_count() or 1
        major, minor = _CAPABILITY
        return SimpleNamespace(
            name="cpu",
            major=major,
            minor=minor,
            total_memory=cpu.memory_total(),
            multi_processor_count=cores,
        )

    return {
        "is_available": is_available,
        "device_count": device_count,
        "current_device": lambda: cpu.index(),
        "set_device": set_device,
        "device": lambda device=None: contextlib.nullcontext(),
        "get_device_properties": get_device_properties,
        "get_device_capability": lambda device=None: _CAPABILITY,
        "get_device_name": lambda device=None: "cpu",
        "is_bf16_supported": lambda including_emulation=True: True,
        # A cpu has no such value; the straggler detector prints what it gets.
        **{sensor: lambda device=None: 0 for sensor in _SENSORS},
        "synchronize": _nothing,
        "init": _nothing,
        "_lazy_init": _nothing,
        "_lazy_call": lambda callback, **kwargs: callback(),
    }


def _streams(cpu: Cpu) -> dict[str, object]:
    return {
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: cpu.current_stream(),
        "default_stream": lambda device=None: cpu.current_stream(),
        "set_stream": _nothing,
        "stream": lambda stream=None: contextlib.nullcontext(stream),
        "_sleep": _nothing,
    }


def _memory(cpu: Cpu) -> dict[str, object]:
    def now(device: Any = None) -> int:
        return cpu.memory_allocated()

    def peak(device: Any = None) -> int:
        return cpu.max_memory_allocated()

    def reset_peak(device: Any = None) -> None:
        cpu.reset_peak_memory()

    def memory_stats(device: Any = None) -> dict[str, int]:
        stats: dict[str, int] = collections.defaultdict(int)
        for kind in ("allocated_bytes", "reserved_bytes", "active_bytes"):
            stats[f"{kind}.all.current"] = now()
            stats[f"{kind}.all.peak"] = peak()
        return stats

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")

    return {
        "memory_allocated": now,
        "memory_reserved": now,
        "device_memory_used": now,
        "max_memory_allocated": peak,
        "max_memory_reserved": peak,
        "memory_stats": memory_stats,
        "mem_get_info": mem_get_info,
        "reset_peak_memory_stats": reset_peak,
        "reset_max_memory_allocated": reset_peak,
        "empty_cache": _nothing,
        "ipc_collect": _nothing,
    }


def _random(cpu: Cpu) -> dict[str, object]:
    def get_rng_state(device: Any = "cuda") -> torch.Tensor:
        return cpu.get_rng_state()

    def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
        cpu.set_rng_state(new_state)

    def get_rng_state_all() -> list[torch.Tensor]:
        return [cpu.get_rng_state() for _ in range(cpu.count())]

    def set_rng_state_all(new_states: Sequence[torch.Tensor]) -> None:
        cpu.set_rng_state(new_states[cpu.index()])

    def seed() -> None:
        cpu.default_generator().seed()

    return {
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        # Torch's own count the devices, find none and do nothing.
        "get_rng_state_all": get_rng_state_all,
        "set_rng_state_all": set_rng_state_all,
        "seed": seed,
        "seed_all": seed,
        "manual_seed": lambda seed: cpu.manual_seed(seed),
        "manual_seed_all": lambda seed: cpu.manual_seed(seed),
        "initial_seed": lambda: cpu.default_generator().initial_seed(),
        # One generator a local rank, all of them the one generator of this process.
        "default_generators": collections.defaultdict(lambda: _DefaultGenerator(cpu)),
    }


class _DefaultGenerator:
    """The generator of the cpu with the two calls that only those of CUDA have."""

    def __init__(self, cpu: Cpu) -> None:
        self._generator = cpu.default_generator()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def graphsafe_get_state(self) -> torch.Generator:
        """Return the state as a generator of its own."""
        return self._generator.clone_state()

    def graphsafe_set_state(self, state: torch.Generator) -> None:
        """Go on where another generator stands."""
        self._generator.set_state(state.get_state())


def _graphs() -> dict[str, object]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "CUDA graphs were asked for and this run is on cpu: leave --enable-cuda-graph, "
            "--cuda-graph-impl and --external-cuda-graph out"
        )

    def class_that_refuses(name: str) -> Callable[..., Any]:
        return type(name, (), {"__init__": refuse})

    profiler = SimpleNamespace(cudaProfilerStart=_nothing, cudaProfilerStop=_nothing)
    return {
        "CUDAGraph": class_that_refuses("CUDAGraph"),
        "graph": class_that_refuses("graph"),
        "graph_pool_handle": refuse,
        "make_graphed_callables": refuse,
        "is_current_stream_capturing": lambda: False,
        "cudart": lambda: profiler,
        "check_error": _nothing,
    }
