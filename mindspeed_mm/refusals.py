"""What transformers raises about a folder of the user, as one line; other errors keep their trace.

transformers checks little of what config.json and the files of a processor say: values that do not
fit raise whatever the first computation with them raises.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb

from mindspeed.config import ConfigError

LONGEST_REASON = 300
UPSTREAM = {"transformers", "torch", "huggingface_hub", "safetensors", "tokenizers"}
OURS = {"mindspeed", "mindspeed_llm", "mindspeed_mm"}
NOT_ABOUT_INPUTS = ("mindspeed", "torch.distributed")
"""Where errors come from that say nothing of the user's files: our code, and other ranks."""

FACADE = "mindspeed.device.facade."
"""Its functions stand in front of those of torch."""


@contextmanager
def explained(source: str) -> Iterator[None]:
    """Give in one line what transformers does not like about a config."""
    from huggingface_hub.errors import StrictDataclassError

    refused = (ValueError, TypeError, OSError, KeyError, ImportError, RecursionError)
    refused += (StrictDataclassError,)
    try:
        yield
    except refused as error:
        raise ConfigError(f"{source}: {' '.join(str(error).split())}") from None
    except Exception as error:
        if not is_of_transformers(error):
            raise
        raise ConfigError(f"{source}: {located(error)}") from None


def is_of_transformers(error: Exception) -> bool:
    """Say whether code of transformers raised an error, with no code of the user in between.

    Code that a user brings, and `trust_remote_code`, has to keep its traceback; so have we.
    """
    import torch

    if isinstance(error, (ConfigError, MemoryError, torch.OutOfMemoryError)):
        return False
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]
    modules = [name for name in modules if not name.startswith(FACADE)]
    packages = {name.partition(".")[0] for name in modules}
    if packages - UPSTREAM - OURS - sys.stdlib_module_names:
        return False
    places = [n for n, name in enumerate(modules) if name.startswith("transformers.")]
    return bool(places) and not any(
        name.startswith(NOT_ABOUT_INPUTS) for name in modules[places[-1] + 1 :]
    )


def located(error: Exception) -> str:
    """Return what an error of transformers says and the line of the model that it comes from."""
    frames = [(frame.f_globals.get("__name__", ""), n) for frame, n in walk_tb(error.__traceback__)]
    models = [place for place in frames if place[0].startswith("transformers.models.")]
    module, line = (models or [place for place in frames if place[0].startswith("transformers.")])[
        -1
    ]
    return f"{reason(error)} ({type(error).__name__}, {module}, line {line})"


def reason(error: Exception) -> str:
    """Return what an error says, in one line that can be read."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}..."
