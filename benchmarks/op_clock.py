"""Clocks for short pieces of GPU work: graphs, events, launches, memory and the two ceilings."""

import gc
import statistics
import time

import torch

from mindspeed import device

L2_BYTES = 256 * 2**20
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync")


class CudaClock:
    """Times on one CUDA stream, the L2 cache overwritten before every sample."""

    def __init__(self):
        self.device = torch.device("cuda")
        self.stream = torch.cuda.Stream()
        self._cache = torch.empty(L2_BYTES, dtype=torch.uint8, device=self.device)

    def capture(self, function):
        """Return (what replays `function` as a graph, "graph"), or (itself, "events")."""
        if self._waits(function):
            return function, "events"
        graph = torch.cuda.CUDAGraph()
        try:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=self.stream):
                function()
        except RuntimeError:
            torch.cuda.synchronize()
            # The generator believes that it is being captured still, and would refuse to draw.
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())
            return function, "events"
        return graph.replay, "graph"

    def _waits(self, function):
        """Say whether a call reads a number back; a capture that fails leaves torch in disorder."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            function()
        except RuntimeError:
            return True
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return False

    def gpu_seconds(self, function):
        """Time on the device; the flush before hides the launch of a graph."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._cache.zero_()
        start.record()
        function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def wall_seconds(self, function):
        """Time as the caller sees it, launches included."""
        self._cache.zero_()
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def launches(self, function):
        """Count kernels, copies and fills of one call."""
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            function()
            torch.cuda.synchronize()
        return sum(event.name.startswith(LAUNCHES) for event in profile.events())

    def peak_bytes(self, function):
        """Return the most memory that one call holds beyond what was there, results included."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def ceilings(self):
        """Measure the copy bandwidth (read + written) and the rate of a bf16 product right now."""
        source = torch.randn(2**28, device=self.device)
        target = torch.empty_like(source)
        copy = self._median(lambda: target.copy_(source))
        a, b = (torch.randn(8192, 8192, device=self.device, dtype=torch.bfloat16) for _ in "ab")
        product = self._median(lambda: a @ b)
        return 2 * source.nbytes / copy, 2 * 8192**3 / product

    def release(self):
        """Give the memory of dropped graphs back."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def _median(self, function, samples=20):
        for _ in range(3):
            function()
        return statistics.median(self.gpu_seconds(function) for _ in range(samples))


class CpuClock:
    """Wall time only: for trying the entries where there is no accelerator."""

    stream = None
    device = torch.device("cpu")

    def capture(self, function):
        """Nothing is captured."""
        return function, "wall"

    def gpu_seconds(self, function):
        """Time one call."""
        return self.wall_seconds(function)

    def wall_seconds(self, function):
        """Time one call."""
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    def launches(self, function):
        """A cpu launches nothing."""
        return ""

    def peak_bytes(self, function):
        """Not known on a cpu."""
        return ""

    def ceilings(self):
        """Measure a copy and a product that do not fit the cache."""
        source = torch.randn(2**22)
        target = torch.empty_like(source)
        copy = min(self.wall_seconds(lambda: target.copy_(source)) for _ in range(5))
        a = torch.randn(256, 256)
        product = min(self.wall_seconds(lambda: a @ a) for _ in range(5))
        return 2 * source.nbytes / copy, 2 * 256**3 / product

    def release(self):
        """Nothing is held."""


def make_clock():
    """Return the clock of the device that MindSpeed chose."""
    return CudaClock() if device.current().name == "cuda" else CpuClock()
