"""Routing for benchmarks: every expert gets the same number of tokens, in every run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_CHOSEN = 10.0
"""Score of a chosen expert, and of the others with the other sign."""


def fixed_logits(logits: Tensor, topk: int) -> Tensor:
    """Return scores (tokens, experts) by which token t goes to experts t * topk and following.

    They do not depend on the values of `logits`, whose gradient is zero.
    """
    num_tokens, num_experts = logits.flatten(0, -2).shape
    first = torch.arange(num_tokens, device=logits.device).unsqueeze(1) * topk
    chosen = (first + torch.arange(topk, device=logits.device)) % num_experts
    scores = torch.full_like(logits.detach(), -_CHOSEN).view(num_tokens, num_experts)
    return scores.scatter_(1, chosen, _CHOSEN).view_as(logits) + 0 * logits


def wrap_routing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the router's scores before it chooses, and leave out the bias that it adds to them.

    No score would outweigh it: sigmoid is between 0 and 1, and trained biases lie further apart.
    """

    @functools.wraps(original)
    def routing(self: Any, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        bias, self.expert_bias = self.expert_bias, None
        try:
            return original(self, fixed_logits(logits, self.topk), *args, **kwargs)
        finally:
            self.expert_bias = bias

    return routing
