"""All options of a training run as one strict object."""

from pydantic import create_model

from mindspeed.features.registry import registry
from mindspeed_llm.training.options.accepted import AcceptedOptions
from mindspeed_llm.training.options.data import DataOptions, RawOptions
from mindspeed_llm.training.options.lora import LoraOptions
from mindspeed_llm.training.options.model import ModelOptions
from mindspeed_llm.training.options.optimizer import (
    LossScaleOptions,
    OptimizerOptions,
    ScheduleOptions,
)
from mindspeed_llm.training.options.parallel import ParallelOptions
from mindspeed_llm.training.options.run import (
    CheckpointOptions,
    LogOptions,
    RunOptions,
    ThroughputOptions,
)

SECTIONS = (
    ModelOptions,
    DataOptions,
    RawOptions,
    LoraOptions,
    ParallelOptions,
    OptimizerOptions,
    LossScaleOptions,
    ScheduleOptions,
    CheckpointOptions,
    LogOptions,
    ThroughputOptions,
    AcceptedOptions,
)


class StageOptions(
    AcceptedOptions,
    RunOptions,
    ThroughputOptions,
    LossScaleOptions,
    ParallelOptions,
    LoraOptions,
    RawOptions,
    DataOptions,
    ModelOptions,
):
    """The sections, and the task."""

    stage: str = "sft"
    """The task of post-training: sft."""


# The switches of mindspeed's features (--use-fused-rmsnorm and the like) are options as well.
TrainOptions = create_model("TrainOptions", __base__=(StageOptions, registry().options_class))
TrainOptions.__doc__ = "Everything that decides what a training run does."
