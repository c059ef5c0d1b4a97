"""Checks of what is installed. None of them needs torch, and none imports Megatron here."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from packaging.version import Version

from mindspeed.compat import megatron
from mindspeed.doctor.check import Check, absent, fail, ok, warn

if TYPE_CHECKING:
    from mindspeed.device import Device
    from mindspeed.device.hopper import Package

_OLDEST_PYTHON, _NEWEST_PYTHON = (3, 10), (3, 12)
_OLDEST_TORCH = Version("2.7")
_IMPORT_SECONDS = 120

# Distribution, what it is for, where it is missed.
_OPTIONAL = (
    ("triton", "fast kernels on cuda", ("cuda",)),
    ("torch-npu", "Ascend NPUs", ("npu",)),
    ("debugpy", "mindspeed.debug", ("cpu", "cuda", "npu")),
    ("transformers", "Hugging Face models", ("cpu", "cuda", "npu")),
    ("safetensors", "Hugging Face weights", ("cpu", "cuda", "npu")),
)


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
        return fail(name, f"{code}: no answer within {_IMPORT_SECONDS} s")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return fail(name, f"{code}: {last}", f"run python -c '{code}' to see where")
    return ok(name, "megatron.core loads with mindspeed.megatron_adaptor")


def check_transformer_engine() -> Check:
    """Tell whether the real Transformer Engine or ours answers Megatron."""
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
    """On a Hopper GPU, tell of the packages that are faster than what torch brings."""
    from mindspeed.device.hopper import CAPABILITY, FLASH_ATTENTION, QUACK

    if device.capability() != CAPABILITY:
        return []
    return [
        _of_package(FLASH_ATTENTION, "cuDNN attends, and deterministic runs are slower"),
        _of_package(QUACK, "SwiGLU passes over memory between the products of an MLP"),
    ]


def _of_package(package: Package, otherwise: str) -> Check:
    found = _version(package.name)
    if found is not None and package.takes(found):
        return ok(package.name, f"{found}, for {package.purpose}")
    state = "not installed" if found is None else f"{found} is not {package.versions}"
    remedy = f"pip install '{package.requirement}' (beside a CUDA 13 build of torch)"
    return warn(package.name, f"{state}: {otherwise}", remedy)


def check_compiler() -> Check:
    """Look for the compiler that builds Megatron's dataset helpers."""
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if found is None:
        detail = "none found: Megatron cannot build its dataset helpers"
        return warn("c++ compiler", detail, "install g++ or clang++")
    return ok("c++ compiler", found)


def check_optional(device: str) -> list[Check]:
    """List the optional distributions; one that the device has no use for is not missed."""
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


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
