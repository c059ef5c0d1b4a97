"""How weights change: the optimizer, the learning rate, the length of the run."""

from typing import Literal

from mindspeed.config import Options


class OptimizerOptions(Options):
    """AdamW or SGD."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """AdamW, or SGD with momentum."""
    weight_decay: float = 0.01
    """Decay of weights; biases and norms do not decay."""
    clip_grad: float = 1.0
    """Largest norm of the gradient; 0 for no limit."""
    adam_beta1: float = 0.9
    """How slowly the mean of gradients moves."""
    adam_beta2: float = 0.999
    """How slowly the mean of their squares moves."""
    adam_eps: float = 1e-8
    """Keeps Adam from dividing by zero."""
    sgd_momentum: float = 0.9
    """How slowly the direction of SGD moves."""
    max_nan_iterations: int = 5
    """Stop after so many steps in a row whose loss or gradient is not a number; such steps change
    no weight."""


class LossScaleOptions(Options):
    """How gradients keep their precision in Megatron's optimizer."""

    loss_scale: float | None = None
    """Fixed scale of the loss with --fp16; without it, the scale is found."""
    initial_loss_scale: float = 2.0**32
    """Scale at which the search begins."""
    min_loss_scale: float = 1.0
    """Scale below which it never goes."""
    loss_scale_window: float = 1000
    """Steps without overflow after which the scale is doubled."""
    hysteresis: int = 2
    """Overflows after which it is halved."""
    accumulate_allreduce_grads_in_fp32: bool = False
    """Add and reduce gradients in float32; always so with --bf16."""


class ScheduleOptions(Options):
    """The length of the run and the learning rate over it."""

    train_iters: int | None = None
    """Steps."""
    epochs: float | None = None
    """Passes over the data, instead of --train-iters."""
    lr: float | None = None
    """Highest learning rate."""
    min_lr: float = 0.0
    """Lowest learning rate after the highest."""
    lr_decay_style: Literal["constant", "linear", "cosine", "WSD"] = "linear"
    """How the learning rate falls."""
    lr_decay_iters: int | None = None
    """Steps until it is lowest (default: all)."""
    lr_warmup_iters: int = 0
    """Steps until it is highest."""
    lr_warmup_fraction: float | None = None
    """The same as a share of --lr-decay-iters."""
    lr_warmup_init: float = 0.0
    """Learning rate of the very beginning."""
    lr_wsd_decay_iters: int | None = None
    """Steps of the fall at the end, for WSD (default: a tenth)."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential"] = "linear"
    """Shape of that fall."""
