"""Where the numbers of a log go beside its file: TensorBoard and Weights & Biases."""

import hashlib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mindspeed.config import ConfigError
from mindspeed.training.options import RunOptions


def check_trackers(options: RunOptions) -> None:
    """Raise ConfigError for a tracker that cannot run."""
    if "tensorboard" in options.report_to and board_folder(options) is None:
        raise ConfigError("--report-to tensorboard: give --tensorboard-dir or --save for its files")
    if "wandb" in options.report_to and find_spec("wandb") is None:
        raise ConfigError("--report-to wandb: wandb is not installed: pip install wandb")


def board_folder(options: RunOptions) -> str | None:
    """Return the folder of TensorBoard's files, None if they are not asked for."""
    if options.tensorboard_dir is not None:
        return options.tensorboard_dir
    if "tensorboard" in options.report_to and options.save is not None:
        return f"{options.save}/tensorboard"
    return None


def open_board(folder: str) -> Any:
    """Return TensorBoard's writer."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder)


class WandbRun:
    """A run of Weights & Biases; a resumed training goes on with the run of its --save.

    Project, entity and mode are those of the environment (WANDB_PROJECT and so on).
    """

    def __init__(self, options: RunOptions) -> None:
        import wandb

        save = None if options.save is None else str(Path(options.save).resolve())
        known = {}
        if save is not None:
            known = {"id": hashlib.sha256(save.encode()).hexdigest()[:16], "resume": "allow"}
        self._run: Any = wandb.init(config=options.model_dump(mode="json"), **known)

    def log(self, numbers: Mapping[str, Any]) -> None:
        """Send the numbers of one iteration."""
        values = {name: value for name, value in numbers.items() if name != "iteration"}
        self._run.log(values, step=numbers["iteration"])

    def finish(self) -> None:
        """Send what is left."""
        self._run.finish()
