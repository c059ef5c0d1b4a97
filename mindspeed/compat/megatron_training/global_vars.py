"""Where callbacks of scripts look for the arguments of the run."""

from mindspeed.compat.run_arguments import get_args, set_args

__all__ = ["get_args", "set_args"]
