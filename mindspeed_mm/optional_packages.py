"""Optional packages for videos: PyAV decodes them, their processors use torchvision."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

from mindspeed.config import ConfigError


def torchvision_problem() -> str | None:
    """Return why torchvision cannot be used, None if it can."""
    if importlib.util.find_spec("torchvision") is None:
        return "torchvision is not installed"
    try:
        import torchvision  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        versions = (
            f"{name} {importlib.metadata.version(name)}" for name in ("torchvision", "torch")
        )
        reason = " ".join(str(error).split())
        return f"{' does not load with '.join(versions)} ({reason})"
    return None


def install_command() -> str:
    """Return the pip command, which pins the installed torch: pip would upgrade it."""
    version = importlib.metadata.version("torch")
    public, _, build = version.partition("+")
    command = f"pip install av torchvision torch=={public}"
    # Device builds of torch, and so of torchvision, come from a package index of their own.
    return f"{command} --extra-index-url (the index of torch {version})" if build else command


def check_torchvision() -> None:
    """Reject a torchvision that fails to import: much of transformers then fails too."""
    problem = torchvision_problem()
    if problem and importlib.util.find_spec("torchvision") is not None:
        reinstall = f"then, if the data has videos, {install_command()}"
        raise ConfigError(f"{problem}: pip uninstall torchvision; {reinstall}")


def transformers_class(name: str) -> Any:
    """Return a class of transformers by name, None if there is none."""
    import transformers

    try:
        return getattr(transformers, name, None)
    except ImportError:
        check_torchvision()
        raise
