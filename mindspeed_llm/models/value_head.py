"""The head of a model whose output is a value for every token, such as a reward or a return."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from torch import Tensor, nn


class ValueHead(nn.Module):
    """A linear layer without bias, in the position of GPTModel's output layer.

    It is Hugging Face's `score` of sequence-classification models. Every tensor-parallel rank
    holds all of it; the product is computed in float32.
    """

    def __init__(self, config: Any, num_labels: int, seed: int = 0) -> None:
        super().__init__()
        # Of a generator of its own: the same values in every layout.
        generator = torch.Generator().manual_seed(seed)
        weight = torch.empty(num_labels, config.hidden_size)
        weight.normal_(0, config.init_method_std, generator=generator)
        self.weight = nn.Parameter(weight.to(config.params_dtype))
        self.sequence_parallel = config.sequence_parallel
        # Ranks that hold parts of the sequence have parts of the gradient; Megatron adds them.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        """Return the values (s, b, labels) of hidden states (s, b, h), as an output layer does."""
        values = F.linear(input_.float(), self.weight.float())
        if self.sequence_parallel:
            # Every rank goes on with the same values, so their gradient is not added up.
            values = tensor_parallel.gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False
            )
        return values, None
