"""Traces of train steps."""

from mindspeed.profiling.trace import Trace

__all__ = ["Trace"]
