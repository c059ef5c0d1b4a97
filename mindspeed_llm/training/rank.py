"""One process as one rank of a run: who speaks, and how it ends."""

import atexit
import gc
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mindspeed.config import ConfigError, printable
from mindspeed_llm.training import disk
from mindspeed_llm.training.stop import Stopped

logger = logging.getLogger(__name__)

LAUNCHED = "TORCHELASTIC_USE_AGENT_STORE"
"""What torchrun and `mindspeed run` set in the environment of ranks."""
LOOK_EVERY = 1.0
"""Seconds between two looks at the launcher."""
MISUSE = 2
FAILED = 1


class RunFailed(RuntimeError):
    """A run cannot go on, for a reason that every rank knows and one line explains."""


def run_rank(train: Callable[[], None]) -> int:
    """Train and return the exit code; what concerns all ranks is reported once a machine."""
    speak()
    code, misuse = 0, ""
    try:
        with stopping_with_launcher():
            train()
    except Stopped as stopped:
        code = stopped.exit_code
    except ConfigError as error:
        code, misuse = MISUSE, str(error)
    except RunFailed as error:
        code = FAILED
        _report(error)
    except OSError as error:
        if error.errno not in disk.FULL:
            raise
        code = FAILED
        # Other ranks may have space: this one says what it lacks, whichever it is.
        why = disk.explain(os.strerror(error.errno), Path(tempfile.gettempdir()))
        sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {why}\n")
    finally:
        _leave()
    if misuse and _is_first_here():
        raise ConfigError(misuse)
    return code


def speak() -> None:
    """Let the first rank write the log, and the others only what goes wrong."""
    is_first = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(
        format="%(message)s",
        level=logging.INFO if is_first else logging.ERROR,
        stream=sys.stdout,
    )
    logging.getLogger("megatron").setLevel(logging.WARNING if is_first else logging.ERROR)


def be_a_script() -> None:
    """Let a script of one's own speak and leave as the commands do."""
    speak()
    atexit.register(_leave)
    watch = ExitStack()
    watch.enter_context(stopping_with_launcher())
    atexit.register(watch.close)


@contextmanager
def stopping_with_launcher() -> Iterator[None]:
    """Stop this rank, as SIGTERM does, when the process that launched it has ended.

    torchrun that is killed leaves its ranks behind, which would train on. A rank that no launcher
    has started may outlive its parent: nohup.
    """
    if LAUNCHED not in os.environ:
        yield
        return
    launcher, is_over = os.getppid(), threading.Event()

    def watch() -> None:
        while not is_over.wait(LOOK_EVERY):
            if os.getppid() != launcher:
                if _is_first_here():
                    logger.error("the launcher (process %d) has ended: stopping", launcher)
                os.kill(os.getpid(), signal.SIGTERM)
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """End a script of one's own as the commands end where a user can put something right."""
    try:
        yield
    except (ConfigError, RunFailed) as error:
        _report(error)
        raise SystemExit(MISUSE if isinstance(error, ConfigError) else FAILED) from None


def _report(error: Exception) -> None:
    if _is_first_here():
        sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {printable(str(error))}\n")


def _is_first_here() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _leave() -> None:
    """Leave the other ranks in order, and end the threads of all groups.

    A thread of a group that is there when the interpreter ends may abort the process. Groups end
    with the last that holds them: Megatron, and models in cycles or in the frames of an error.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        return
    if (megatron := sys.modules.get("megatron.core.parallel_state")) is not None:
        megatron.destroy_model_parallel()
        for name, value in list(vars(megatron).items()):
            if isinstance(value, torch.distributed.ProcessGroup):  # which it forgets
                setattr(megatron, name, None)
    torch.distributed.destroy_process_group()
    gc.collect()
    atexit.register(_forget_error)


def _forget_error() -> None:
    """Drop the frames of an error that ended the program, once it is printed."""
    for name in ("last_exc", "last_value", "last_traceback"):
        if hasattr(sys, name):
            setattr(sys, name, None)
    gc.collect()
