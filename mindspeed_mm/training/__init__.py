"""Training with callbacks: what a script of the user imports."""

from typing import TYPE_CHECKING

from mindspeed.compat.stand_ins.megatron_training.global_vars import get_args
from mindspeed.lazy_import import lazy_names
from mindspeed_mm.training.arguments import Schema

if TYPE_CHECKING:
    from mindspeed_mm.training.callbacks import move_to_device
    from mindspeed_mm.training.script import pretrain, train

__all__ = ["Schema", "get_args", "move_to_device", "pretrain", "train"]

# Options are read, and `--help` is shown, without torch.
__getattr__ = lazy_names(
    __name__,
    {"move_to_device": "callbacks", "pretrain": "script", "train": "script"},
)
