"""Typed options of a training run, in sections."""

from mindspeed_llm.training.options.all import SECTIONS, StageOptions, TrainOptions

__all__ = ["SECTIONS", "StageOptions", "TrainOptions"]
