"""Attach a debugger to the ranks of a training job."""

from mindspeed.debug.attach import BASE_PORT, attach_if_asked, setup_debugpy

__all__ = ["BASE_PORT", "attach_if_asked", "setup_debugpy"]
