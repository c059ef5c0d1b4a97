"""Worker processes that run alternately on one device, so that other load affects all alike."""

import contextlib
import gc
import json
import os
import socket
import subprocess
import sys
import time


def serve(step, steps, warm_up, on_warm=None):
    """In a worker: warm up at the first line on standard input, run `steps` at each further one.

    `on_warm` is called with the step after the warm-up, while the device is otherwise idle.
    """
    import torch

    sys.stdin.readline()
    for _ in range(warm_up):
        step()
    if on_warm is not None:
        on_warm(step)
    torch.cuda.empty_cache()
    gc.collect()
    gc.freeze()  # a collection over all imports takes as long as a step
    _reply({})
    for _ in sys.stdin:
        step()  # allocates the memory again
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            last = step()
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / steps
        peak = torch.cuda.max_memory_allocated() / 2**30
        _reply(
            {"seconds": seconds, "peak_gib": peak, "last": None if last is None else float(last)}
        )
        torch.cuda.empty_cache()  # the other workers need the memory in between


def _reply(values):
    print("#", json.dumps(values), file=sys.__stdout__, flush=True)


class Worker:
    """One worker process: it starts at once and runs steps on request."""

    def __init__(self, *command, tree=None):
        """Start a command; `tree` is a folder whose packages come before all others."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        if tree is not None:
            paths = [str(tree), os.environ.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([sys.executable, *command], env=environment, **pipes)

    def begin(self):
        """Start the warm-up, without waiting for it."""
        self._request()

    def has_begun(self):
        """Wait for the warm-up; return whether it succeeded."""
        return self._reply() is not None

    def warm_up(self):
        """Run the warm-up; return whether it succeeded."""
        self.begin()
        return self.has_begun()

    def measure(self):
        """Run the steps; return seconds per step, peak memory and the last value."""
        self._request()
        return self._reply()

    def end(self):
        """End the process."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _request(self):
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("go\n")
            self._process.stdin.flush()

    def _reply(self):
        for line in self._process.stdout:
            if line.startswith("# "):
                return json.loads(line[2:])
        return None
