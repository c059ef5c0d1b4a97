"""Incremental decoding with Megatron's model: KV cache, linear layers for inference, decode state.

Megatron caches keys as they are and rotates all of them again for every token. Rotating only the
new ones makes a step cost one token, however long the context is. Import the adaptor first.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.inference.contexts import StaticInferenceContext

from mindspeed import device
from mindspeed.te.pytorch.module.layernorm_linear import LayerNormLinear
from mindspeed.te.pytorch.module.linear import LinearBase
from mindspeed_llm.generation.model import LoadedModel, to_device


class KVCache(StaticInferenceContext):
    """The keys and values of all layers and rows."""

    def __init__(self, rows: int, length: int) -> None:
        super().__init__(rows, length)
        self._rotation: tuple[torch.Tensor, torch.Tensor] | None = None
        self._angles: torch.Tensor | None = None
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None
        self.position: torch.Tensor | None = None
        """The index of the next token, on the device; None where the host counts them."""

    def restart(self) -> None:
        """Begin with other prompts, in the same memory."""
        self.sequence_len_offset = 0
        self.decode_mode = False
        self._rotation = self.position = None

    def clear_unused(self) -> None:
        """Overwrite memory that a mask will hide: what is not a number would spread from there."""
        for memories in self.key_value_memory_dict.values():
            for memory in memories:
                memory[self.sequence_len_offset :].zero_()

    def go_to(self, position: torch.Tensor) -> None:
        """Run the next token at a position that the host does not know."""
        self.position, self._rotation = position, None

    def append(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a token at the position; return all of the memory, of which a mask hides a part."""
        assert self.position is not None
        keys, values = self.key_value_memory_dict[layer]
        return keys.index_copy_(0, self.position, key), values.index_copy_(0, self.position, value)

    def advance(self, count: int) -> None:
        """Advance by tokens that all layers have processed."""
        self.sequence_len_offset += count
        self.enable_decode_mode()
        self._rotation = None

    def select_rows(self, rows: torch.Tensor) -> None:
        """Continue with these rows, in this order; a row may occur several times."""
        used = self.sequence_len_offset
        for layer, memories in self.key_value_memory_dict.items():
            chosen = tuple(_select(memory, rows, used) for memory in memories)
            self.key_value_memory_dict[layer] = chosen

    def rotation(self, angles: torch.Tensor, factor: float, like: torch.Tensor) -> Any:
        """Return the cosine and the signed sine for the new tokens, shared by all layers."""
        if self._rotation is None:
            # The first table is kept and read ever after: a recorded step reads it by its address,
            # and the model drops its own when it has made those of many other lengths.
            if self._angles is None:
                self._angles = angles
            begin = self.sequence_len_offset
            if self.position is None:
                angles = self._angles[begin : begin + len(like)]
            else:
                angles = self._angles.index_select(0, self.position)
            half = angles.shape[-1] // 2
            cosine, sine = angles.cos() * factor, angles.sin() * factor
            sine[..., :half].neg_()
            self._rotation = cosine.to(like.dtype), sine.to(like.dtype)
        return self._rotation

    def rotary_tables(
        self, factor: float, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return cosines and sines of all positions (length, size), made once.

        The prompt has to have been run; a model without rotary embeddings has none.
        """
        if self._tables is None and self._angles is not None:
            angles = self._angles[: self.max_sequence_length].flatten(1)
            self._tables = (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
        return self._tables


def prepare_decoding(module: Any) -> Callable[[], None]:
    """Prepare a model for incremental decoding; return a function that makes it what it was."""
    # Whole sequences first: the linear layers of inference hold no part of one.
    undo = [keep_sequences_whole(module), use_inference_linears(module)]
    for layer in module.decoder.layers:
        if (attention := getattr(layer, "self_attention", None)) is not None:
            hook = attention.core_attention.register_forward_pre_hook(
                _use_given_mask, with_kwargs=True
            )
            undo += [
                hook.remove,
                cache_rotated_keys(attention),
                attend_by_bias(attention.core_attention),
            ]

    def restore() -> None:
        for step in reversed(undo):
            step()

    return restore


SEQUENCE_PARALLEL = (
    "sequence_parallel",
    "scatter_to_sequence_parallel",
    "reduce_scatter_embeddings",
)


def keep_sequences_whole(module: Any) -> Callable[[], None]:
    """Switch sequence parallelism off: a token that is decoded cannot be shared by ranks.

    Returns a function that switches it on again where it was.
    """
    owners = {id(owner): owner for part in module.modules() for owner in (part, _config(part))}
    switched = [
        (owner, name)
        for owner in owners.values()
        for name in SEQUENCE_PARALLEL
        if getattr(owner, name, False) is True
    ]
    for owner, name in switched:
        setattr(owner, name, False)

    def restore() -> None:
        for owner, name in switched:
            setattr(owner, name, True)

    return restore


def _config(part: torch.nn.Module) -> Any:
    return getattr(part, "config", None)


def _use_given_mask(module: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
    """Make attention use the given mask: after the prompt Megatron would ignore it."""
    from megatron.core.transformer.enums import AttnMaskType

    if arguments[3] is None:
        return None
    return arguments, keywords | {"attn_mask_type": AttnMaskType.arbitrary}


def cache_rotated_keys(attention: Any) -> Callable[[], None]:
    """Make attention rotate keys before it caches them, as latent attention does.

    Returns a function that undoes it.
    """
    if attention.config.multi_latent_attention:
        return lambda: None
    original = attention._adjust_key_value_for_inference
    factor = yarn_factor(attention.config)

    def rotate_and_cache(
        cache: KVCache | None, query: Any, key: Any, value: Any, angles: Any = None, *others: Any
    ) -> Any:
        if cache is not None and angles is not None:
            cosine, sine = cache.rotation(angles[0], factor, key)
            both = torch.cat([query, key], dim=2)
            both = torch.addcmul(both * cosine, both.roll(both.shape[-1] // 2, -1), sine)
            query, key = both.split([query.shape[2], key.shape[2]], dim=2)
            angles = None  # already applied
        if cache is not None and cache.position is not None:
            key, value = cache.append(attention.layer_number, key, value)
            cache = None  # all there is to do
        return original(cache, query, key, value, angles, *others)

    attention._adjust_key_value_for_inference = rotate_and_cache
    return lambda: delattr(attention, "_adjust_key_value_for_inference")


def attend_by_bias(core: Any) -> Callable[[], None]:
    """Make attention add masks that are numbers to the scores of one query a row.

    Returns a function that undoes it.
    """
    original = core.forward

    def forward(query: Any, key: Any, value: Any, mask: Any, *others: Any, **options: Any) -> Any:
        if mask is None or not mask.is_floating_point():
            return original(query, key, value, mask, *others, **options)
        return attend_one(query, key, value, mask, core.softmax_scale)

    core.forward = forward
    return lambda: delattr(core, "forward")


def attend_one(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend a query (1, B, N, H) a row to keys (S, B, G, H); bias (B, 1, 1, S) hides some.

    The N / G queries that share a key become the sequence, so that no key is repeated.
    """
    rows, heads, size = query.shape[1:]
    groups = keys.shape[2]
    queries = query.reshape(rows, groups, heads // groups, size)
    keys, values = (each.permute(1, 2, 0, 3) for each in (keys, values))
    bias = bias.expand(rows, groups, heads // groups, -1)
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=scale)
    return out.reshape(1, rows, heads * size)


def yarn_factor(config: Any) -> float:
    """Return what YaRN multiplies rotary embeddings by; before Megatron 0.13 there is none here."""
    if not hasattr(config, "yarn_rotary_scaling_factor"):
        return 1.0
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn

    return float(yarn._yarn_get_concentration_factor_from_config(config))


def _select(memory: torch.Tensor, rows: torch.Tensor, used: int) -> torch.Tensor:
    """Copy rows of a layer's cache; positions that are not filled need no copy."""
    chosen = memory.new_empty(memory.shape[0], len(rows), *memory.shape[2:])
    chosen[:used] = memory[:used, rows]
    return chosen


class InferenceLinear(torch.nn.Module):
    """A linear layer of `transformer_engine`, with or without a norm, without training state.

    On a cpu that saves a fifth of the time of every token.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.weight, bias = layer.weight, layer.bias
        self.norm = getattr(layer, "layer_norm_weight", None)
        self.eps = getattr(layer, "eps", 0.0)
        self.group = layer.tp_group if layer.tp_size > 1 and layer.parallel_mode == "row" else None
        # The bias is added once, after the all-reduce; some callers add it themselves.
        self.bias = bias if layer.apply_bias and self.group is None else None
        self.late_bias = bias if layer.apply_bias and self.group is not None else None
        self.returned = bias if layer.use_bias and layer.return_bias else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output, and the bias where the caller adds it."""
        if x.dtype != self.weight.dtype:
            x = x.to(self.weight.dtype)
        if self.norm is not None:
            x = F.rms_norm(x, self.norm.shape, self.norm, self.eps)
        out = F.linear(x, self.weight, self.bias)
        if self.group is not None:
            torch.distributed.all_reduce(out, group=self.group)
            out = out if self.late_bias is None else out + self.late_bias
        return out, self.returned

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output with its bias for an x that is normalised already, on one rank."""
        return F.linear(x, self.weight, self.returned if self.bias is None else self.bias)


def use_inference_linears(model: torch.nn.Module) -> Callable[[], None]:
    """Replace every supported linear layer; the weights are shared.

    Returns a function that brings the layers back.
    """
    replaced = []
    for parent in list(model.modules()):
        for name, layer in parent.named_children():
            if _is_supported(layer):
                setattr(parent, name, InferenceLinear(layer))
                replaced.append((parent, name, layer))

    def restore() -> None:
        for parent, name, layer in replaced:
            setattr(parent, name, layer)

    return restore


def _is_supported(layer: torch.nn.Module) -> bool:
    if not isinstance(layer, LinearBase) or layer.sequence_parallel or len(layer._parts) > 1:
        return False
    if layer.low_rank is not None or layer._forward_hooks:  # adapters, in one of their two ways
        return False
    if not isinstance(layer, LayerNormLinear):
        return True
    is_plain = layer.normalization == "RMSNorm" and not layer.zero_centered_gamma
    return is_plain and not layer.return_layernorm_output


@contextmanager
def logits_of_last(module: Any, count: int | None) -> Iterator[None]:
    """Let the output layer of a pipeline stage, if it has one, see the last tokens only."""
    layer: Any = getattr(module, "output_layer", None)
    if count is None or layer is None:
        yield
        return
    # Hidden states are (length, rows, size).
    hook = layer.register_forward_pre_hook(lambda _, given: (given[0][-count:], *given[1:]))
    try:
        yield
    finally:
        hook.remove()


class DecodeState:
    """The tokens and KV cache of several rows, and the forward pass over their next tokens.

    Rows of unequal length are padded on the left and the padding is masked: rotary embeddings
    depend on relative positions only. Without `cached` every step runs over all tokens again.
    There are no gradients, but not in torch's inference mode: rotary embeddings cache what they
    compute, and a model that is trained as well has to use it again.
    """

    def __init__(
        self, model: LoadedModel, padding: Sequence[int], capacity: int, *, cached: bool = True
    ) -> None:
        self._model = model
        self._padding, self._is_padded = to_device(padding), any(padding)
        self._tokens = to_device([[]] * len(padding))
        # One a chunk: Megatron 0.12 numbers the layers of every chunk from the same one on.
        self._caches = [KVCache(len(padding), capacity) for _ in model.chunks] if cached else []

    def step(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Run tokens (rows, length); return the logits of the next one (rows, vocabulary).

        Only ranks of the last pipeline stage have them, others return None.
        """
        logits = self.run(tokens)
        return None if logits is None else logits[:, -1].float()

    @torch.no_grad()
    def run(self, tokens: torch.Tensor, last: int | None = None) -> torch.Tensor | None:
        """Run tokens (rows, length); return the logits after each (rows, length, vocabulary).

        With `last` those after so many tokens at the end of each row are the only ones, and with a
        cache those after the last of a prompt.
        """
        begin = self._tokens.shape[1] if self._caches else 0
        self._tokens = torch.cat([self._tokens, tokens], dim=1)
        end = self._tokens.shape[1]
        with logits_of_last(self._model.chunks[-1], last):
            output = self._forward(self._tokens[:, begin:], self._mask(begin, end))
        for cache in self._caches:
            cache.advance(end - begin)
        return None if output is None else output[..., : self._model.config.vocab_size]

    def restart(self, padding: Sequence[int]) -> None:
        """Begin with other prompts, in the same memory."""
        self._padding.copy_(to_device(padding))
        self._is_padded = any(padding)
        self._tokens = self._tokens[:, :0]
        for cache in self._caches:
            cache.restart()

    def clear_unused(self) -> None:
        """Overwrite what is not filled of the KV cache."""
        for cache in self._caches:
            cache.clear_unused()

    def step_at(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Run one token a row (rows, 1) at a position (1,); return the logits of the next.

        The position is on the device, and the host does not have to know it. There has to be one
        pipeline stage.
        """
        cache = self.cache
        cache.go_to(position)
        keys = torch.arange(cache.max_sequence_length, device=tokens.device)
        hidden = (keys > position) | (keys < self._padding[:, None, None, None])
        bias = torch.zeros_like(hidden, dtype=self._model.chunks[0].config.params_dtype)
        output = self._forward(tokens, bias.masked_fill_(hidden, -torch.inf))
        found: torch.Tensor = output[:, -1, : self._model.config.vocab_size]
        return found

    @property
    def cache(self) -> KVCache:
        """The KV cache of the only pipeline stage."""
        (cache,) = self._caches
        return cache

    @property
    def padding(self) -> torch.Tensor:
        """How many tokens were added to the left of each row (rows,); it stays where it is."""
        return self._padding

    @property
    def cache_bytes(self) -> int:
        """The bytes of all keys and values."""
        memories = (pair for cache in self._caches for pair in cache.key_value_memory_dict.values())
        return sum(each.nbytes for pair in memories for each in pair)

    @torch.no_grad()
    def select_rows(self, rows: Sequence[int]) -> None:
        """Continue with these rows, in this order; a row may occur several times."""
        if list(rows) == list(range(len(self._tokens))):
            return
        chosen = to_device(rows)
        self._tokens, self._padding = self._tokens[chosen], self._padding[chosen]
        for cache in self._caches:
            cache.select_rows(chosen)

    def _mask(self, begin: int, end: int) -> torch.Tensor | None:
        """Return the attention mask (True: masked), None where causal masking suffices."""
        is_plain = begin == 0 or end - begin == 1
        if is_plain and not self._is_padded:
            return None
        keys = torch.arange(end, device=self._tokens.device)
        future = keys > keys[begin:, None]
        return future | (keys < self._padding[:, None, None, None])

    def _forward(self, tokens: torch.Tensor, mask: torch.Tensor | None) -> Any:
        """Run the pipeline stages of this rank, one after the other; return the last output."""
        from megatron.core import parallel_state

        output = None
        for stage, chunk in enumerate(self._model.chunks):
            if len(self._model.chunks) > 1:  # older releases look for it in the forward pass
                parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
            cache = self._caches[stage] if self._caches else None
            output = self._run_stage(chunk, cache, tokens, mask)
        return output

    @staticmethod
    def _run_stage(
        module: Any, cache: KVCache | None, tokens: torch.Tensor, mask: torch.Tensor | None
    ) -> Any:
        """Run a pipeline stage: receive its input, send its output."""
        from megatron.core import parallel_state

        if not module.pre_process:
            hidden = torch.empty(
                (tokens.shape[1], len(tokens), module.config.hidden_size),
                dtype=module.config.params_dtype,
                device=device.current().torch_device,
            )
            torch.distributed.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
            module.set_input_tensor(hidden)
        output = module(
            tokens,
            torch.zeros_like(tokens),  # positions, which rotary embeddings do not use
            mask,
            inference_context=cache,
            runtime_gather_output=True,
        )
        if module.post_process:
            return output
        next_rank = parallel_state.get_pipeline_model_parallel_next_rank()
        torch.distributed.send(output.contiguous(), next_rank)
        return None
