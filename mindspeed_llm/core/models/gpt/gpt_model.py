"""The model that training and generation build. Import the adaptor first."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_model as megatron


class GPTModel(megatron.GPTModel):  # type: ignore[misc]
    """Megatron's model, in which padding of the vocabulary is no token.

    To change the model of every command, change this class.
    """

    config: Any
    mtp_process: bool

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Run the layers of multi-token prediction only where their loss trains them."""
        is_trained = named.get("labels") is not None and self.config.mtp_loss_scaling_factor
        if is_trained or not self.config.mtp_num_layers:
            return super().forward(*arguments, **named)
        with self._next_token_only():
            return super().forward(*arguments, **named)

    @contextmanager
    def _next_token_only(self) -> Iterator[None]:
        """Be a model without multi-token prediction, whose labels Megatron reads unasked."""
        config, mtp_process = self.config, self.mtp_process
        self.config, self.mtp_process = copy.copy(config), False
        self.config.mtp_num_layers = None
        try:
            yield
        finally:
            self.config, self.mtp_process = config, mtp_process

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
