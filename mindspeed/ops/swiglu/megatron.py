"""Puts the SwiGLU operator behind Megatron's `bias_swiglu_impl`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from mindspeed.ops.swiglu import swiglu

Implementation = Callable[..., torch.Tensor]


def wrap_bias_swiglu_impl(original: Implementation) -> Implementation:
    """Serve SwiGLU with or without bias; inputs stored as fp8 or offloaded stay with Megatron."""

    @functools.wraps(original)
    def bias_swiglu_impl(
        input: torch.Tensor,
        bias: torch.Tensor | None,
        fp8_input_store: bool = False,
        cpu_offload_input: bool = False,
    ) -> torch.Tensor:
        if cpu_offload_input:  # not a parameter of megatron-core 0.12
            return original(input, bias, fp8_input_store, cpu_offload_input)
        if fp8_input_store:
            return original(input, bias, fp8_input_store)
        return swiglu(input if bias is None else input + bias)

    return bias_swiglu_impl
