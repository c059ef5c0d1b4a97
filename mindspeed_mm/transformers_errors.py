"""Errors of transformers about a user's files, as one line; other errors keep their traceback.

transformers validates little of config.json and the files of a processor: wrong values raise
whatever the first computation with them raises.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb

from mindspeed.config import ConfigError

MAX_LENGTH = 300
UPSTREAM = {"transformers", "torch", "huggingface_hub", "safetensors", "tokenizers"}
OURS = {"mindspeed", "mindspeed_llm", "mindspeed_mm"}
INTERNAL = ("mindspeed", "torch.distributed")
"""Origins of errors that are not about the user's files: our code, and other ranks."""

FACADE = "mindspeed.device.facade."
"""Its functions wrap those of torch."""


@contextmanager
def config_errors(source: str) -> Iterator[None]:
    """Raise errors of transformers about a config as a one-line ConfigError."""
    from huggingface_hub.errors import StrictDataclassError

    expected = (
        *(ValueError, TypeError, OSError, KeyError, ImportError, RecursionError),
        StrictDataclassError,
    )
    try:
        yield
    except expected as error:
        raise ConfigError(f"{source}: {' '.join(str(error).split())}") from None
    except Exception as error:
        if not is_transformers_error(error):
            raise
        raise ConfigError(f"{source}: {with_location(error)}") from None


def is_transformers_error(error: Exception) -> bool:
    """Return whether code of transformers raised an error, without user code in between.

    User code, `trust_remote_code` and our own code keep their tracebacks.
    """
    import torch

    if isinstance(error, (ConfigError, MemoryError, torch.OutOfMemoryError)):
        return False
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]
    modules = [name for name in modules if not name.startswith(FACADE)]
    packages = {name.partition(".")[0] for name in modules}
    if packages - UPSTREAM - OURS - sys.stdlib_module_names:
        return False
    indices = [n for n, name in enumerate(modules) if name.startswith("transformers.")]
    return bool(indices) and not any(
        name.startswith(INTERNAL) for name in modules[indices[-1] + 1 :]
    )


def with_location(error: Exception) -> str:
    """Return the message of an error of transformers and the line of the model that raised it."""
    frames = [(frame.f_globals.get("__name__", ""), n) for frame, n in walk_tb(error.__traceback__)]
    upstream = [frame for frame in frames if frame[0].startswith("transformers.")]
    models = [frame for frame in upstream if frame[0].startswith("transformers.models.")]
    module, line = (models or upstream)[-1]
    return f"{one_line(error)} ({type(error).__name__}, {module}, line {line})"


def one_line(error: Exception) -> str:
    """Return the message of an error as one line of limited length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_LENGTH else f"{text[:MAX_LENGTH]}..."
