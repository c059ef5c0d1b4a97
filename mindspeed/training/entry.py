"""One process as one rank of a run: its logging, its signals, and how it exits."""

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
from types import FrameType
from typing import Any

from mindspeed.config import ConfigError, RankConfigError, printable
from mindspeed.distributed import environment
from mindspeed.training import disk

logger = logging.getLogger(__name__)

LAUNCHED = "TORCHELASTIC_USE_AGENT_STORE"
"""What torchrun and `mindspeed run` set in the environment of ranks."""
POLL_SECONDS = 1.0
"""Seconds between two checks that the launcher is alive."""
CONFIG_ERROR = 2
"""Exit code of what a user can correct."""
FAILED = 1
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class RunFailed(RuntimeError):
    """A run cannot continue, for a reason that every rank knows and one line explains."""


class OutOfMemory(RuntimeError):
    """The device of one rank has no memory left; the message says what would save some."""


class Stopped(SystemExit):
    """A run that was asked to stop before its last step; its exit code is 128 + the signal."""

    def __init__(self, number: int, iteration: int) -> None:
        self.exit_code = 128 + number
        super().__init__(self.exit_code)
        self.iteration = iteration
        """The last iteration that was trained."""


class StopRequest:
    """Records SIGTERM and the first Ctrl-C; a second Ctrl-C has its usual effect.

    SIGTERM may come any number of times: a scheduler sends it to every process of a job, and each
    launcher among them sends it to its ranks once more.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        """The first signal, if one was received."""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def is_set(self) -> bool:
        """Whether the run was asked to stop."""
        return self.signal is not None

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        if number == signal.SIGINT:
            signal.signal(number, self._previous[number])


def run_rank(train: Callable[[], None]) -> int:
    """Train and return the exit code; an error of all ranks is reported once a machine."""
    setup_logging()
    code, misuse = 0, ""
    try:
        with stop_with_launcher():
            train()
    except Stopped as stopped:
        code = stopped.exit_code
    except RankConfigError as error:
        code = CONFIG_ERROR
        _report_here(error)
    except ConfigError as error:
        code, misuse = CONFIG_ERROR, str(error)
    except RunFailed as error:
        code = FAILED
        _report(error)
    except OutOfMemory as error:
        code = FAILED
        # Other ranks may have memory: every rank that has none reports it.
        _report_here(error)
    except RuntimeError as error:
        from mindspeed.device import DeviceError  # with torch, which --help leaves out

        if not isinstance(error, DeviceError):
            raise
        code, misuse = CONFIG_ERROR, str(error)
    except OSError as error:
        if error.errno not in disk.FULL:
            raise
        code = FAILED
        # Other ranks may have space: every rank that has none reports it.
        why = disk.explain(os.strerror(error.errno), Path(tempfile.gettempdir()))
        sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {why}\n")
    finally:
        _teardown()
    if misuse and environment.local_rank() == 0:
        raise ConfigError(misuse)
    return code


@contextmanager
def importing() -> Iterator[None]:
    """Collect no garbage while modules are imported: what they make stays.

    Half a second of the start of a training is collections that find nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def setup_logging() -> None:
    """Log everything on the first rank, and only errors on the others."""
    is_first = environment.is_rank_zero()
    logging.basicConfig(
        format="%(message)s",
        level=logging.INFO if is_first else logging.ERROR,
        stream=sys.stdout,
    )
    logging.getLogger("megatron").setLevel(logging.WARNING if is_first else logging.ERROR)


def script_mode() -> None:
    """Make a user's own script log and exit as the commands do."""
    setup_logging()
    atexit.register(_teardown)
    watch = ExitStack()
    watch.enter_context(stop_with_launcher())
    atexit.register(watch.close)


@contextmanager
def stop_with_launcher() -> Iterator[None]:
    """Stop this rank, as SIGTERM does, when the process that launched it has ended.

    torchrun that is killed leaves its ranks behind, which would train on. A rank that no launcher
    has started may outlive its parent: nohup.
    """
    if LAUNCHED not in os.environ:
        yield
        return
    launcher, is_over = os.getppid(), threading.Event()

    def watch() -> None:
        while not is_over.wait(POLL_SECONDS):
            if os.getppid() != launcher:
                if environment.local_rank() == 0:
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
def exit_on_config_error() -> Iterator[None]:
    """Exit a user's own script as the commands exit: one line for what a user can correct."""
    try:
        yield
    except (ConfigError, RunFailed, OutOfMemory) as error:
        # What only some ranks know each of them reports.
        is_local = isinstance(error, (RankConfigError, OutOfMemory))
        (_report_here if is_local else _report)(error)
        raise SystemExit(CONFIG_ERROR if isinstance(error, ConfigError) else FAILED) from None


def _report(error: Exception) -> None:
    if environment.local_rank() == 0:
        _report_here(error)


def _report_here(error: Exception) -> None:
    sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {printable(str(error))}\n")


def _teardown() -> None:
    if "torch" in sys.modules:  # a command that has not loaded it has no process group either
        from mindspeed.distributed.process_groups import destroy_distributed

        destroy_distributed()
