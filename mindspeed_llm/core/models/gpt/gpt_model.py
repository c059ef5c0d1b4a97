"""The model that training and generation build. Import the adaptor first."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_model as megatron


class GPTModel(megatron.GPTModel):  # type: ignore[misc]
    """Megatron's model, in which padding of the vocabulary is no token.

    To change the model of every command, change this class.
    """

    def hide_padding(self, vocab_size: int) -> None:
        """Keep rows beyond `vocab_size` out of the softmax, so that no layout changes the loss."""
        padded = self.vocab_size
        if vocab_size == padded:
            return
        rows = padded // parallel_state.get_tensor_model_parallel_world_size()
        here = max(0, vocab_size - rows * parallel_state.get_tensor_model_parallel_rank())

        def hide(module: Any, arguments: Any, output: Any) -> None:
            logits = output[0]
            is_gathered = logits.shape[-1] == padded
            logits[..., vocab_size if is_gathered else here :] = torch.finfo(logits.dtype).min

        self.output_layer.register_forward_hook(hide)
