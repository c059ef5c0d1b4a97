"""The packages that only videos need: PyAV reads them, torchvision is what their processors use."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

from mindspeed.config import ConfigError


def torchvision_problem() -> str | None:
    """Say why torchvision cannot be used, None if it can."""
    if importlib.util.find_spec("torchvision") is None:
        return "torchvision is not installed"
    try:
        import torchvision  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        found = (f"{name} {importlib.metadata.version(name)}" for name in ("torchvision", "torch"))
        reason = " ".join(str(error).split())
        return f"{' does not load beside '.join(found)} ({reason})"
    return None


def how_to_install() -> str:
    """Return what to type: the torch that is there is named, for pip would take the newest."""
    version = importlib.metadata.version("torch")
    public, _, build = version.partition("+")
    command = f"pip install av torchvision torch=={public}"
    # Builds of torch for a device come from an index of their own, and so do those of torchvision.
    return f"{command} --extra-index-url (where torch {version} came from)" if build else command


def check_torchvision() -> None:
    """Refuse a torchvision that does not load: it takes much of transformers with it."""
    problem = torchvision_problem()
    if problem and importlib.util.find_spec("torchvision") is not None:
        again = f"then, if there are videos, {how_to_install()}"
        raise ConfigError(f"{problem}: pip uninstall torchvision; {again}")


def transformers_class(name: str) -> Any:
    """Return what transformers has under a name, None if it has nothing."""
    import transformers

    try:
        return getattr(transformers, name, None)
    except ImportError:
        check_torchvision()
        raise
