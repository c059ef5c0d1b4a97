"""The learning rate as a function of the step, so that nothing of it has to be saved."""

import math
from dataclasses import dataclass
from typing import Any

from mindspeed.config import ConfigError
from mindspeed.training.options import RunOptions


@dataclass(frozen=True)
class Schedule:
    """Warm-up, then a decay from `highest` to `lowest` in one of several styles."""

    highest: float
    lowest: float
    style: str
    warmup: float
    """Steps until the highest rate; may be a fraction."""
    decay: int
    """Steps until the lowest rate."""
    start: float = 0.0
    """Rate before the first step of the warm-up."""
    wsd_decay: int = 0
    """Steps of the decay at the end (WSD)."""
    wsd_style: str = "linear"
    weight_decay: float = 0.0

    def at(self, step: int) -> float:
        """Return the learning rate of a step, the first of which is 0."""
        # Counted as Megatron does: a step uses the rate that the steps before it have reached.
        if self.warmup > 0 and step <= self.warmup:
            return self.start + (self.highest - self.start) * step / self.warmup
        if self.style == "constant":
            return self.highest
        if step > self.decay:
            return self.lowest
        if self.style == "WSD":
            start = self.decay - self.wsd_decay
            if step <= start:
                return self.highest
            return self._decayed((step - start) / self.wsd_decay, self.wsd_style)
        return self._decayed((step - self.warmup) / (self.decay - self.warmup), self.style)

    def _decayed(self, done: float, style: str) -> float:
        """Return the rate when a share of the decay is done."""
        left: float = {
            "linear": 1.0 - done,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
            "exponential": 2.0 * 0.5**done - 1.0,
        }[style]
        return self.lowest + left * (self.highest - self.lowest)

    def apply(self, optimizer: Any, step: int) -> float:
        """Set the learning rate and weight decay of every parameter group; return the rate."""
        rate = self.at(step)
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("lr_mult", 1.0)
            group["weight_decay"] = self.weight_decay * group.get("wd_mult", 1.0)
        return rate


def make_schedule(options: RunOptions, steps: int) -> Schedule:
    """Return the learning-rate schedule of a run of so many steps."""
    lr, decay = options.lr, options.lr_decay_iters or steps
    assert lr is not None  # check_run
    warmup: float = options.lr_warmup_iters
    if options.lr_warmup_fraction is not None:
        if warmup:
            raise ConfigError("give one of --lr-warmup-iters and --lr-warmup-fraction")
        warmup = options.lr_warmup_fraction * decay
    if warmup >= decay and options.lr_decay_style != "constant":
        raise ConfigError(
            f"a warm-up of {warmup:g} steps leaves none of the {decay} steps of the decay: "
            "lower --lr-warmup-iters or raise --train-iters"
        )
    if not 0 <= options.min_lr <= lr:
        raise ConfigError(f"--min-lr {options.min_lr:g} must be between 0 and --lr {lr:g}")
    wsd = options.lr_wsd_decay_iters or max(1, decay // 10)
    return Schedule(
        highest=lr,
        lowest=options.min_lr,
        style=options.lr_decay_style,
        warmup=warmup,
        decay=decay,
        start=options.lr_warmup_init,
        wsd_decay=min(wsd, decay),
        wsd_style=options.lr_wsd_decay_style,
        weight_decay=options.weight_decay,
    )
