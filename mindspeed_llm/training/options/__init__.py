"""Typed options of a training run, in sections."""

from mindspeed_llm.training.options.all import SECTIONS, StageOptions, TrainOptions
from mindspeed_llm.training.options.run import RunOptions

__all__ = ["SECTIONS", "RunOptions", "StageOptions", "TrainOptions"]
