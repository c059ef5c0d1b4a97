"""The adaptor comes before Megatron in every test session, as in every script."""

import atexit
import gc
import os
import random
import signal
import tempfile

gc.disable()  # until all tests are collected: what is imported stays

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

import mindspeed.megatron_adaptor  # noqa: E402, F401
from mindspeed import device  # noqa: E402
from tests.budget import load_profile  # noqa: E402

load_profile()

# A woken thread waits for its turn. Else it interrupts the one that woke it, which may hold a lock
# for which gloo's thread spins: a third of what tensor-parallel ranks compute. Children inherit it.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# Nothing outlives a test: no wait for the disk. A descriptor that is not open is an error still.
os.fsync = os.fdatasync = lambda descriptor: os.fstat(descriptor) and None

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would all that the
# tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Give what tests cache a folder of the session, not the user's own; workers inherit it.

    Not on a GPU, where that folder holds compiled kernels.
    """
    if hasattr(config, "workerinput") or device.current().name != "cpu":
        return
    folder = tempfile.TemporaryDirectory(prefix="mindspeed-cache-")
    config.add_cleanup(folder.cleanup)
    os.environ["XDG_CACHE_HOME"] = folder.name


def pytest_collection_finish() -> None:
    """Leave what was imported out of every later collection of garbage."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # or Triton, unloaded at the exit, complains of leaks


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let a test, with its fixtures, draw the same numbers whichever tests ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """The real SmolLM2-135M-Instruct as an HF directory for all workers; do not write to it."""
    from tests.llm.smollm2 import shared_smollm2

    base = tmp_path_factory.getbasetemp()
    return shared_smollm2(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base)
