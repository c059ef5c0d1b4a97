"""Timing of short GPU work: CUDA graphs, events, launches, memory and the two hardware peaks."""

import gc
import statistics
import time

import torch

from mindspeed import device

L2_BYTES = 256 * 2**20
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync")


class CudaClock:
    """Times on one CUDA stream, the L2 cache flushed before every sample."""

    def __init__(self):
        self.device = torch.device("cuda")
        self.stream = torch.cuda.Stream()
        self._cache = torch.empty(L2_BYTES, dtype=torch.uint8, device=self.device)

    def capture(self, function):
        """Return (a replay of `function` as a CUDA graph, "graph"), or (itself, "events")."""
        if self._synchronises(function):
            return function, "events"
        graph = torch.cuda.CUDAGraph()
        try:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=self.stream):
                function()
        except RuntimeError:
            torch.cuda.synchronize()
            # The generator is still in capture mode, and would refuse to draw.
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())
            return function, "events"
        return graph.replay, "graph"

    def _synchronises(self, function):
        """Return whether a call synchronises; a failed capture leaves torch in a broken state."""
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
        """Wall time of a call, launches included."""
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
        """Return the peak memory of one call beyond what was allocated, results included."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def peaks(self):
        """Measure the copy bandwidth (read + written) and the throughput of a bf16 GEMM."""
        source = torch.randn(2**28, device=self.device)
        target = torch.empty_like(source)
        copy = self._median(lambda: target.copy_(source))
        a, b = (torch.randn(8192, 8192, device=self.device, dtype=torch.bfloat16) for _ in "ab")
        gemm = self._median(lambda: a @ b)
        return 2 * source.nbytes / copy, 2 * 8192**3 / gemm

    def release(self):
        """Free the memory of dropped graphs."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def _median(self, function, samples=20):
        for _ in range(3):
            function()
        return statistics.median(self.gpu_seconds(function) for _ in range(samples))


class CpuClock:
    """Wall time only: for testing the cases without an accelerator."""

    stream = None
    device = torch.device("cpu")

    def capture(self, function):
        """Return the function itself."""
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

    def peaks(self):
        """Measure a copy and a GEMM that do not fit the cache."""
        source = torch.randn(2**22)
        target = torch.empty_like(source)
        copy = min(self.wall_seconds(lambda: target.copy_(source)) for _ in range(5))
        a = torch.randn(256, 256)
        gemm = min(self.wall_seconds(lambda: a @ a) for _ in range(5))
        return 2 * source.nbytes / copy, 2 * 256**3 / gemm

    def release(self):
        """Do nothing: no memory is held."""


def make_clock():
    """Return the clock of the device that MindSpeed chose."""
    return CudaClock() if device.current().name == "cuda" else CpuClock()
