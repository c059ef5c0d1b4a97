"""Reading tokens: each pass of a model over the next ones, through all pipeline stages."""

from collections.abc import Sequence
from typing import Any

import torch

from mindspeed import device
from mindspeed_llm.generation.model import LoadedModel, here


class Reading:
    """What a model has read of several rows, and how it reads on.

    Rows of unequal length begin with padding that nobody sees: rotary positions count differences
    only, so it does not matter where a row begins. Without `cached` every token reads all again.
    """

    def __init__(
        self, model: LoadedModel, padding: Sequence[int], capacity: int, *, cached: bool = True
    ) -> None:
        from mindspeed_llm.generation.cache import Cache

        self._model = model
        self._padding, self._is_padded = here(padding), any(padding)
        self._tokens = here([[]] * len(padding))
        self._cache = Cache(len(padding), capacity) if cached else None

    @torch.inference_mode()
    def read(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Read tokens (rows, length); return the logits of the next (rows, vocabulary).

        Only ranks of the last pipeline stage have them.
        """
        begin = self._tokens.shape[1] if self._cache is not None else 0
        self._tokens = torch.cat([self._tokens, tokens], dim=1)
        end = self._tokens.shape[1]
        output = self._pass(self._tokens[:, begin:], self._mask(begin, end))
        if self._cache is not None:
            self._cache.advance(end - begin)
        return None if output is None else output[:, -1, : self._model.shape.vocab_size].float()

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order; a row may be there several times."""
        if list(rows) == list(range(len(self._tokens))):
            return
        chosen = here(rows)
        self._tokens, self._padding = self._tokens[chosen], self._padding[chosen]
        if self._cache is not None:
            self._cache.keep(chosen)

    def _mask(self, begin: int, end: int) -> torch.Tensor | None:
        """Say what is hidden from whom, where causality alone does not."""
        is_plain = begin == 0 or end - begin == 1
        if is_plain and not self._is_padded:
            return None
        keys = torch.arange(end, device=self._tokens.device)
        future = keys > keys[begin:, None]
        return future | (keys < self._padding[:, None, None, None])

    def _pass(self, tokens: torch.Tensor, mask: torch.Tensor | None) -> Any:
        """Take tokens, or what the stage before made of them, and hand on what comes out."""
        from megatron.core import parallel_state

        model, module = self._model, self._model.module
        if not model.is_first:
            hidden = torch.empty(
                (tokens.shape[1], len(tokens), module.config.hidden_size),
                dtype=module.config.params_dtype,
                device=device.current().torch_device,
            )
            torch.distributed.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
            module.set_input_tensor(hidden)
        output = module(
            tokens,
            torch.zeros_like(tokens),  # positions, which rotary embeddings count by themselves
            mask,
            inference_context=self._cache,
            runtime_gather_output=True,
        )
        if model.is_last:
            return output
        after = parallel_state.get_pipeline_model_parallel_next_rank()
        torch.distributed.send(output.contiguous(), after)
        return None
