"""Traces of train steps by torch's profiler."""

from mindspeed.profiling.trace import Trace

__all__ = ["Trace"]
