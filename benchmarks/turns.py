"""Processes that take turns on the one device, so that clocks and neighbours disturb all alike."""

import contextlib
import gc
import json
import os
import socket
import subprocess
import sys
import time


def serve(step, steps, warm_up, look=None):
    """In a worker: warm up for the first line on standard input, run `steps` for each other one.

    `look` is called with the step when that is warm and the device is this worker's alone.
    """
    import torch

    sys.stdin.readline()
    for _ in range(warm_up):
        step()
    if look is not None:
        look(step)
    torch.cuda.empty_cache()
    gc.collect()
    gc.freeze()  # a collection that looks through all imports takes as long as a step
    _answer({})
    for _ in sys.stdin:
        step()  # takes back the memory that was lent to the others
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            last = step()
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / steps
        peak = torch.cuda.max_memory_allocated() / 2**30
        _answer(
            {"seconds": seconds, "peak_gib": peak, "last": None if last is None else float(last)}
        )
        torch.cuda.empty_cache()  # the others need the memory in between


def _answer(values):
    print("#", json.dumps(values), file=sys.__stdout__, flush=True)


class Worker:
    """One process of the race: it starts at once and works only when asked."""

    def __init__(self, *command):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([sys.executable, *command], env=environment, **pipes)

    def begin(self):
        """Let the worker take its first steps, without waiting for them."""
        self._tell()

    def has_begun(self):
        """Wait for the first steps; say whether the worker could take them."""
        return self._answer() is not None

    def warm_up(self):
        """Let the worker take its first steps; say whether it could."""
        self.begin()
        return self.has_begun()

    def measure(self):
        """Let the worker run its steps; return seconds a step, peak memory and the last value."""
        self._tell()
        return self._answer()

    def end(self):
        """Let the process end."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self):
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("go\n")
            self._process.stdin.flush()

    def _answer(self):
        for line in self._process.stdout:
            if line.startswith("# "):
                return json.loads(line[2:])
        return None
