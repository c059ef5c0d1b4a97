"""Checks of what is installed and of the machine, in the order in which one needs another.

torch, mindspeed.device and mindspeed.ops are imported late: the report must appear where torch is
missing. None of the checks imports Megatron in this process.
"""

from __future__ import annotations

import enum
import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from mindspeed.compat import megatron
from mindspeed.launch import RankFailed, call, loopback_interface

if TYPE_CHECKING:
    from mindspeed.device import Device
    from mindspeed.device.hopper import Package

_OLDEST_PYTHON, _NEWEST_PYTHON = (3, 10), (3, 12)
_OLDEST_TORCH = Version("2.7")
_IMPORT_SECONDS = 120

# Distribution, purpose, devices on which it is needed.
_OPTIONAL = (
    ("triton", "fast kernels on cuda", ("cuda",)),
    ("torch-npu", "Ascend NPUs", ("npu",)),
    ("debugpy", "mindspeed.debug", ("cpu", "cuda", "npu")),
    ("transformers", "Hugging Face models", ("cpu", "cuda", "npu")),
    ("safetensors", "Hugging Face weights", ("cpu", "cuda", "npu")),
)
_SHARED_MEMORY = Path("/dev/shm")
_ENOUGH_SHARED_MEMORY = 256 * 2**20
_GROUP_MINUTES = 2


class Status(str, enum.Enum):
    """How a check ended: `fail` means that no training run can start."""

    OK = "ok"
    ABSENT = "-"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One line of the report; `remedy` is the command or action that fixes it."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def ok(name: str, detail: str) -> Check:
    """Report that something is as it should be."""
    return Check(name, Status.OK, detail)


def absent(name: str, detail: str) -> Check:
    """Report something that is absent and not needed."""
    return Check(name, Status.ABSENT, detail)


def warn(name: str, detail: str, remedy: str) -> Check:
    """Report something that a run can do without."""
    return Check(name, Status.WARN, detail, remedy)


def fail(name: str, detail: str, remedy: str = "") -> Check:
    """Report something that no run can do without."""
    return Check(name, Status.FAIL, detail, remedy)


def run_checks() -> list[Check]:
    """Run every check that makes sense; what needs a missing part is left out."""
    torch = check_torch()
    checks = [check_python(), torch, check_megatron()]
    if is_ready([torch]):
        checks += check_devices()
    chosen = chosen_device() if is_ready([torch]) else None
    if chosen is not None:
        checks += [check_process_group(chosen)]
    if is_ready(checks):
        checks += [check_adaptor()]
    if is_ready([torch]):
        checks += [check_operators(chosen.name if chosen else "cpu")]
    if chosen is not None:
        checks += check_hopper(chosen)
    checks += [check_transformer_engine()]
    checks += [check_shared_memory(), check_compiler()]
    return [*checks, *check_optional(chosen.name if chosen else "cpu")]


def is_ready(checks: Sequence[Check]) -> bool:
    """Return whether a training run could start."""
    return all(check.status is not Status.FAIL for check in checks)


def check_python() -> Check:
    """Check the version of Python."""
    name, found = "python", ".".join(map(str, sys.version_info[:3]))
    supported = "supported: 3.10 to 3.12"
    if sys.version_info[:2] < _OLDEST_PYTHON:
        return fail(name, f"{found} is too old ({supported})", "install Python 3.11")
    if sys.version_info[:2] > _NEWEST_PYTHON:
        return warn(name, f"{found} is not tested ({supported})", "use Python 3.11")
    return ok(name, f"{found} ({sys.executable})")


def check_torch() -> Check:
    """Check that torch is there, new enough, and loads."""
    name = "torch"
    if importlib.util.find_spec("torch") is None:
        return fail(name, "not installed", "pip install torch")
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        return fail(name, f"does not load: {error}", "pip install --force-reinstall torch")
    if Version(torch.__version__) < _OLDEST_TORCH:
        detail = f"{torch.__version__} is too old: {_OLDEST_TORCH} or newer is needed"
        return fail(name, detail, f"pip install --upgrade 'torch>={_OLDEST_TORCH}'")
    return ok(name, f"{torch.__version__} from {torch.__path__[0]}")


def check_megatron() -> Check:
    """Check that megatron-core is there and can be used on this machine."""
    name = "megatron-core"
    try:
        megatron.require()
    except RuntimeError as error:
        return fail(name, str(error))
    supported = f"supported: {megatron.OLDEST} or newer"
    return ok(name, f"{megatron.version()} from {megatron.location()} ({supported})")


def check_adaptor() -> Check:
    """Check, in a process of its own, that Megatron loads with the adaptor."""
    name, code = "adaptor", "import torch, mindspeed.megatron_adaptor, megatron.core"
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            capture_output=True,
            text=True,
            timeout=_IMPORT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return fail(name, f"{code}: no result within {_IMPORT_SECONDS} s")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return fail(name, f"{code}: {last}", f"run python -c '{code}' to see where")
    return ok(name, "megatron.core loads with mindspeed.megatron_adaptor")


def check_transformer_engine() -> Check:
    """Report whether Megatron uses the real Transformer Engine or ours."""
    name = "transformer_engine"
    for distribution in (
        "transformer_engine",
        "transformer-engine-cu12",
        "transformer-engine-cu13",
    ):
        found = _version(distribution)
        if found is not None:
            return ok(name, f"{found}, the real one")
    return ok(name, "ours (mindspeed.te); the real one is not installed")


def check_operators(device: str) -> Check:
    """Count the operators that run a kernel of the device."""
    from mindspeed.ops.dispatch import REFERENCE, known_ops

    name = "operators"
    choices = [op.choice(device) for op in known_ops().values()]
    missing = sorted({obstacle for choice in choices for obstacle in choice.obstacles})
    fast = sum(choice.name != REFERENCE for choice in choices)
    detail = f"{fast} of {len(choices)} run a kernel of {device}, the others plain torch"
    if missing:
        return warn(name, f"{detail} ({missing[0]})", "mindspeed features lists them")
    return ok(name, f"{detail}: mindspeed features lists them")


def check_hopper(device: Device) -> list[Check]:
    """On a Hopper GPU, report the packages that are faster than what torch brings."""
    from mindspeed.device.hopper import CAPABILITY, FLASH_ATTENTION, QUACK

    if device.capability() != CAPABILITY:
        return []
    return [
        _check_package(FLASH_ATTENTION, "attention runs on cuDNN; deterministic runs are slower"),
        _check_package(QUACK, "SwiGLU runs as a kernel of its own between the GEMMs of an MLP"),
    ]


def _check_package(package: Package, otherwise: str) -> Check:
    found = _version(package.name)
    if found is not None and package.takes(found):
        return ok(package.name, f"{found}, for {package.purpose}")
    state = "not installed" if found is None else f"{found} is not {package.versions}"
    remedy = f"pip install '{package.requirement}' (beside a CUDA 13 build of torch)"
    return warn(package.name, f"{state}: {otherwise}", remedy)


def check_compiler() -> Check:
    """Check for the compiler that builds Megatron's dataset helpers."""
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if found is None:
        detail = "none found: Megatron cannot build its dataset helpers"
        return warn("c++ compiler", detail, "install g++ or clang++")
    return ok("c++ compiler", found)


def check_optional(device: str) -> list[Check]:
    """List the optional distributions; one that the device has no use for is not needed."""
    checks = []
    for distribution, purpose, devices in _OPTIONAL:
        found = _version(distribution)
        if found is not None:
            checks.append(ok(distribution, found))
        elif device in devices:
            detail = f"not installed: no {purpose}"
            checks.append(warn(distribution, detail, f"pip install {distribution}"))
        else:
            needed_on = " and ".join(devices)
            checks.append(absent(distribution, f"not installed, only needed on {needed_on}"))
    return checks


def chosen_device() -> Device | None:
    """Return the device that a run would use, or None if the one asked for cannot be used."""
    from mindspeed import device

    try:
        return device.current()
    except device.DeviceError:
        return None


def check_devices() -> list[Check]:
    """Report which devices are usable, and which one a run would choose and why."""
    from mindspeed import device

    checks = []
    for name, known in device.known().items():
        reason = known.unusable_reason()
        if reason is None:
            checks.append(ok(name, "usable" if name == "cpu" else f"{known.count()} usable"))
        else:
            checks.append(absent(name, f"not usable: {reason}"))
    asked = os.environ.get("MINDSPEED_DEVICE", "")
    why = f"MINDSPEED_DEVICE={asked}" if asked else f"first usable of {', '.join(device.known())}"
    try:
        return [*checks, ok("chosen device", f"{device.current().name} ({why})")]
    except device.DeviceError as error:
        return [*checks, fail("chosen device", str(error))]


def check_process_group(chosen: Device) -> Check:
    """Start one rank with the launcher and all-reduce a tensor on the chosen device."""
    name = "process group"
    try:
        (result,) = call(_reduce_once, 1, timeout=60 * _GROUP_MINUTES)
    except RankFailed as error:
        return fail(name, f"{chosen.backend}: {str(error).splitlines()[-1]}")
    if result != 1.0:
        return fail(name, f"{chosen.backend}: the sum over one rank of 1 was {result}")
    return ok(name, f"{chosen.backend} works; ranks connect over loopback ({loopback_interface()})")


def check_shared_memory() -> Check:
    """Check the shared memory through which data loaders and ranks pass tensors."""
    name = "shared memory"
    if not _SHARED_MEMORY.is_dir():
        return ok(name, f"this system has no {_SHARED_MEMORY}")
    if not os.access(_SHARED_MEMORY, os.W_OK):
        remedy = f"make {_SHARED_MEMORY} writable"
        return warn(name, f"{_SHARED_MEMORY} cannot be written: no data-loader workers", remedy)
    free = shutil.disk_usage(_SHARED_MEMORY).free
    detail = f"{free / 2**20:.0f} MiB free in {_SHARED_MEMORY}"
    if free < _ENOUGH_SHARED_MEMORY:
        return warn(name, f"{detail}, little", "start the container with --shm-size=1g or more")
    return ok(name, detail)


def _reduce_once() -> float:
    import torch

    from mindspeed import device
    from mindspeed.distributed.process_groups import destroy_distributed, init_distributed

    chosen = device.current()
    init_distributed(chosen, timeout_minutes=_GROUP_MINUTES)
    total = torch.ones(1, device=chosen.torch_device)
    torch.distributed.all_reduce(total)
    destroy_distributed()
    return total.item()


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
