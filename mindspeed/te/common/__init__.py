"""What does not depend on the framework: the quantisation recipes."""

from mindspeed.te.common import recipe

__all__ = ["recipe"]
