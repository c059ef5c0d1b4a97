"""The tensors of one rank: which slices of which full weights, under which names.

The same answer serves files to write, files to read and the parameters of a live model.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from mindspeed.checkpoint.assembly import SliceCopy, StoredTensor
from mindspeed.checkpoint.tensor_slice import TensorSlice, full_slice
from mindspeed_llm.checkpoint.layout import Chunk, Rank
from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.models.weight_table import TPSplit, Weight

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
FUSED_LATENT_NORMS = {
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
LATENT_DOWN = ("linear_q_down_proj", "linear_kv_down_proj")


@dataclass(frozen=True)
class NameStyle:
    """How Megatron's layer specs differ in the names and storage of weights."""

    fuses_norms: bool = False
    """Norms belong to the linear layer after them (transformer_engine specs)."""
    experts: str = "each"
    """One module "each", one "numbered" module or one "joined" tensor for all local experts."""
    shards_latent_down: bool = True
    """Tensor parallelism shards the down projections of latent attention."""
    fuses_latent_down: bool = False
    """Both down projections are one replicated linear_qkv (MindSpeed-LLM)."""
    mtp_layer: str = "transformer_layer"
    """The module inside a layer of multi-token prediction."""

    @classmethod
    def detect(cls, tensors: Mapping[str, torch.Tensor], config: ModelConfig) -> "NameStyle":
        """Return the style of existing tensors."""
        names = "\n".join(tensors)
        experts = "each"
        if ".experts.weight1" in names:
            experts = "joined"
        elif ".experts.linear_fc1.weight" in names:
            experts = "numbered"
        latent = [t for n, t in tensors.items() if "linear_kv_down_proj.weight" in n]
        is_cut = bool(latent) and config.mla is not None
        is_cut = is_cut and latent[0].shape[0] != config.mla.kv_down_size  # type: ignore[union-attr]
        return cls(
            fuses_norms=".layer_norm_weight" in names,
            experts=experts,
            shards_latent_down=is_cut,
            fuses_latent_down=config.mla is not None and ".linear_qkv.weight" in names,
            mtp_layer="mtp_model_layer" if ".mtp_model_layer." in names else "transformer_layer",
        )


@dataclass(frozen=True)
class WeightSharding:
    """Names and shards the weights of a model for its ranks."""

    config: ModelConfig
    weights: Sequence[Weight]
    style: NameStyle
    vocab_size: int
    """Rows of the embedding with its padding."""

    def stored(self, chunk: Chunk, rank: Rank) -> list[StoredTensor]:
        """Return the tensors that a rank has in a chunk."""
        found = [
            self._tensor(weight, name, rank)
            for weight, name in self._named(chunk)
            if weight.expert is None or weight.expert in rank.experts(self._num_experts)
        ]
        if self.style.experts == "joined":
            found = list(_fuse_experts(found))
        if self.style.fuses_latent_down:
            found = list(_fuse_latent_down(found))
        return found

    @property
    def _num_experts(self) -> int:
        return self.config.moe.num_experts if self.config.moe else 0

    @cached_property
    def _by_layer(self) -> dict[tuple[str, str], list[Weight]]:
        """Return the weights under ("decoder", its layer), ("mtp", its layer) or ("", "")."""
        found: dict[tuple[str, str], list[Weight]] = {}
        for weight in self.weights:
            part, dot, rest = weight.name.partition(".layers.")
            found.setdefault((part, rest.partition(".")[0]) if dot else ("", ""), []).append(weight)
        return found

    def _named(self, chunk: Chunk) -> Iterator[tuple[Weight, str]]:
        """Yield the weights of a chunk with their names in it."""
        has_mtp = chunk.is_last and self.config.mtp_num_layers > 0
        for weight in self._by_layer[("", "")]:
            if weight.name == EMBEDDING:
                if chunk.is_first or has_mtp:
                    yield weight, EMBEDDING
                if self.config.tied and chunk.is_last and not chunk.is_first:
                    yield weight, OUTPUT
            elif chunk.is_last:
                yield weight, weight.name
        for local, number in chunk.layers:
            head = f"decoder.layers.{number}."
            for weight in self._by_layer[("decoder", str(number))]:
                yield weight, f"decoder.layers.{local}.{weight.name.removeprefix(head)}"
        for number in range(self.config.mtp_num_layers if has_mtp else 0):
            yield from ((weight, weight.name) for weight in self._by_layer[("mtp", str(number))])

    def _tensor(self, weight: Weight, name: str, rank: Rank) -> StoredTensor:
        size, split, is_padded = weight.shape, weight.split, False
        if split is TPSplit.VOCABULARY:
            size, split, is_padded = (self.vocab_size, *size[1:]), TPSplit.ROWS, True
        if any(part in name for part in LATENT_DOWN) and not self.style.shards_latent_down:
            split = TPSplit.NONE
        index, count = rank.tp, rank.tp_size
        if weight.expert is not None:
            index, count = rank.etp, rank.etp_size
        slices = list(_rank_slices(size, split, index, count))
        copies = tuple(
            SliceCopy(weight.name, source, target, is_padded=is_padded) for source, target in slices
        )
        shape = tuple(
            max(stop for _, stop in pairs) for pairs in zip(*(target for _, target in slices))
        )
        styled = self._styled_name(weight, name, rank)
        return StoredTensor(styled, shape, copies, None, weight.is_float32)

    def _styled_name(self, weight: Weight, name: str, rank: Rank) -> str:
        """Return the name in this style."""
        name = name.replace(".transformer_layer.", f".{self.style.mtp_layer}.")
        if weight.expert is not None:
            local = weight.expert - rank.experts(self._num_experts).start
            head, _, tail = name.partition(f".experts.{weight.expert}.")
            if self.style.experts == "numbered":
                return f"{head}.experts.{tail}{local}"
            return f"{head}.experts.local_experts.{local}.{tail}"
        if self.style.fuses_norms:
            return self._fused(weight, name)
        return name

    def _fused(self, weight: Weight, name: str) -> str:
        norms = FUSED_LATENT_NORMS if self.config.mla else FUSED_NORMS
        for plain, fused in norms.items():
            if name.endswith("." + plain):
                # A norm before a router is not fused: no single linear layer follows it.
                if plain.startswith("pre_mlp") and self._is_moe(weight.name):
                    return name
                return name.removesuffix(plain) + fused
        return name

    def _is_moe(self, name: str) -> bool:
        part, _, rest = name.partition("layers.")
        number = int(rest.partition(".")[0])
        return self.config.is_moe_layer(number + (self.config.num_layers if part == "mtp." else 0))


def _fuse_experts(found: Iterable[StoredTensor]) -> Iterator[StoredTensor]:
    """Fuse the experts of a layer in weight1 and weight2, each expert transposed in memory."""
    groups: dict[str, list[StoredTensor]] = {}
    for tensor in found:
        if ".experts.local_experts." not in tensor.name:
            yield tensor
            continue
        head, _, tail = tensor.name.partition(".local_experts.")
        number = 1 if "linear_fc1" in tail else 2
        groups.setdefault(f"{head}.weight{number}", []).append(tensor)
    for name, tensors in groups.items():
        rows, columns = tensors[0].shape
        copies = tuple(
            _transposed(copy, number)
            for number, tensor in enumerate(tensors)
            for copy in tensor.copies
        )
        count = len(tensors)
        # Megatron views the memory, which is laid out expert by expert, as one matrix.
        shape = (columns, count * rows) if name.endswith("1") else (count * columns, rows)
        yield StoredTensor(name, shape, copies, (count, columns, rows))


def _transposed(copy: SliceCopy, number: int) -> SliceCopy:
    target = ((number, number + 1), *copy.target[::-1])
    return replace(copy, target=target, is_transposed=True)


def _fuse_latent_down(found: Iterable[StoredTensor]) -> Iterator[StoredTensor]:
    """Stack the query's down projection on that of key and value in one linear_qkv."""
    queries: dict[str, StoredTensor] = {}
    for tensor in found:
        if ".linear_q_down_proj." in tensor.name:
            queries[tensor.name.replace("linear_q_down_proj", "linear_qkv")] = tensor
        elif ".linear_kv_down_proj." in tensor.name:
            name = tensor.name.replace("linear_kv_down_proj", "linear_qkv")
            above = queries.get(name)
            start = above.shape[0] if above else 0
            copies = tuple(
                replace(copy, target=((start, start + tensor.shape[0]), *copy.target[1:]))
                for copy in tensor.copies
            )
            shape = (start + tensor.shape[0], *tensor.shape[1:])
            yield StoredTensor(name, shape, (*(above.copies if above else ()), *copies))
        else:
            yield tensor


def _rank_slices(
    size: tuple[int, ...], split: TPSplit, index: int, count: int
) -> Iterator[tuple[TensorSlice, TensorSlice]]:
    """Yield the slices of a full weight that a rank has, and where they are in its tensor."""
    region = full_slice(size)
    if split is TPSplit.NONE or count == 1:
        yield region, region
    elif split is TPSplit.COLUMNS:
        width = size[1] // count
        yield (region[0], (index * width, (index + 1) * width)), (region[0], (0, width))
    else:
        parts = 2 if split is TPSplit.HALVES else 1
        part = size[0] // parts
        height = part // count
        for number in range(parts):
            start = number * part + index * height
            target = (number * height, (number + 1) * height)
            yield ((start, start + height), *region[1:]), (target, *region[1:])
