"""Where a run begins, what it keeps and what it tells."""

from mindspeed.config import Options
from mindspeed_llm.training.options.optimizer import OptimizerOptions, ScheduleOptions


class CheckpointOptions(Options):
    """Where weights come from and go to."""

    load: str | None = None
    """Where to begin: a Hugging Face model, a converted checkpoint in any layout, or a training
    checkpoint to go on from."""
    from_scratch: bool = False
    """Begin with random weights; without it --load must hold weights."""
    save: str | None = None
    """Where to put checkpoints. If one is there the run goes on from it, whatever --load says."""
    no_auto_resume: bool = False
    """Start from the beginning although --save holds a checkpoint; it will be replaced."""
    save_interval: int | None = None
    """Steps between checkpoints; one is also saved at the end."""
    async_save: bool = False
    """Go on training while a checkpoint is written; what it holds is copied first."""
    keep_last: int | None = None
    """Keep only so many of the newest checkpoints (default: all)."""
    finetune: bool = False
    """Take only the weights of --load: begin with step 0 and a new optimizer."""
    no_verify: bool = False
    """Do not compare the files that are loaded with the digests written beside them."""
    no_load_optim: bool = False
    """Do not load the optimizer's state."""
    no_save_optim: bool = False
    """Do not save it: smaller checkpoints, but resuming from them resets Adam."""
    seed: int = 1234
    """Fixes new weights, the order of samples and dropout."""


class LogOptions(Options):
    """What is logged, where and how often."""

    log_interval: int = 1
    """Steps between lines."""
    log_file: str | None = None
    """The same numbers as lines of JSON (default: log.jsonl in --save)."""
    tensorboard_dir: str | None = None
    """The same numbers for TensorBoard."""
    eval_interval: int | None = None
    """Steps between evaluations on the validation data."""
    eval_iters: int = 0
    """Steps of one evaluation; 0 for none."""


class ThroughputOptions(Options):
    """What is logged about the speed, beside tokens."""

    log_throughput: bool = False
    """Add the arithmetic throughput to the line."""


class RunOptions(LogOptions, CheckpointOptions, ScheduleOptions, OptimizerOptions):
    """What every kind of training needs to know."""
