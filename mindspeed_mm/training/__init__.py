"""Training with callbacks: what a script of the user imports."""

from mindspeed.compat.stand_ins.megatron_training.global_vars import get_args
from mindspeed_mm.training.arguments import Schema
from mindspeed_mm.training.callbacks import move_to_device
from mindspeed_mm.training.script import pretrain, train

__all__ = ["Schema", "get_args", "move_to_device", "pretrain", "train"]
