"""Recomputed layers that keep the results of their attention.

Of all that a layer computes twice, attention is the only part whose time grows with the square of
the sequence, and its backward needs no more than its output and log-sum-exp: about as many bytes as
the layer's input. See `mindspeed.ops.fusion_attention.kept`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from mindspeed.ops.fusion_attention.kept import KeptResults


def wrap_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let what is checkpointed keep the results of attention from its first run."""

    @functools.wraps(original)
    def checkpoint(function: Any, distribute_saved_activations: bool, *args: Any) -> Any:
        # Without gradients it is part of a layer that is checkpointed itself, or is never rerun.
        if torch.is_grad_enabled():
            function = KeptResults().wrap_function(function)
        return original(function, distribute_saved_activations, *args)

    return checkpoint
