"""A family's weight table: which slices of HF tensors each Megatron tensor is made of.

Megatron names are those of local layer specs, with the number of the layer in the full model and of
the expert in the full layer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from mindspeed.checkpoint.tensor_slice import TensorSlice, full_slice
from mindspeed_llm.models.config import ModelConfig

ALWAYS = "hidden_size"
Experts = Literal["each", "fused"]
"""How HF tensors hold experts: one for each projection of each expert, as most models are
published, or one for all experts of a layer, as transformers 5 has them in memory."""
FUSED = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}
"""The HF tensors of all experts: each expert's matrix in them is the one that Megatron has."""


class TPSplit(Enum):
    """How tensor parallelism splits a weight."""

    NONE = "every rank has all of it"
    ROWS = "each rank has a range of rows"
    COLUMNS = "each rank has a range of columns"
    HALVES = "each rank has a range of rows of either half"
    VOCABULARY = "as rows, padded until they divide"


@dataclass(frozen=True)
class SliceMap:
    """Slice `mcore_slice` of a Megatron tensor is slice `hf_slice` of the HF tensor `hf_name`.

    The HF tensor may have more dimensions in front; `hf_slice` has size one in those.
    """

    hf_name: str
    hf_slice: TensorSlice
    mcore_slice: TensorSlice


@dataclass(frozen=True)
class HfView:
    """How slices see an HF tensor that is not laid out as Megatron's."""

    has_pairs: bool
    """The last dimension is pairs, and is split into two."""
    order: tuple[int, ...]
    """The dimensions, with those of pairs, in the order in which slices name them."""

    def shapes(self, seen: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shape of the tensor, and that with pairs, from the one that slices see."""
        split = [0] * len(seen)
        for size, dim in zip(seen, self.order, strict=True):
            split[dim] = size
        whole = [*split[:-2], split[-2] * split[-1]] if self.has_pairs else split
        return tuple(whole), tuple(split)


@dataclass(frozen=True)
class WeightRule:
    """A row of the table: the names, with {expert} for its number, and how the slices map."""

    mcore: str
    hf: tuple[str, ...]
    size: tuple[str, ...]
    """Dimensions, as fields or properties of ModelConfig."""
    slice_maps: Callable[["WeightRule", ModelConfig], Iterator[SliceMap]]
    split: TPSplit
    when: str = ALWAYS
    """A field or property of ModelConfig: the tensor exists if it is true."""
    is_float32: bool = False
    """Keep float32 whatever the others are cast to."""
    is_stacked: bool = False
    """The HF tensor has all experts, in its first dimension."""

    def sizes(self, model: ModelConfig) -> tuple[int, ...]:
        """Return the dimensions in numbers."""
        return tuple(model.get(name) for name in self.size)


def copy(
    mcore: str,
    hf: str,
    *size: str,
    split: TPSplit = TPSplit.NONE,
    when: str = ALWAYS,
    is_float32: bool = False,
    is_stacked: bool = False,
) -> WeightRule:
    """Map one HF tensor unchanged."""
    return WeightRule(mcore, (hf,), size, _same_slices, split, when, is_float32, is_stacked)


def interleave(mcore: str, hf: str, *size: str) -> WeightRule:
    """Gate, then up, of an expert whose rows alternate in the HF tensor of all experts."""
    return WeightRule(mcore, (hf,), size, _paired_slices, TPSplit.HALVES, is_stacked=True)


def stack(mcore: str, hf: tuple[str, ...], *size: str, when: str = ALWAYS) -> WeightRule:
    """Stack HF tensors of one size along the rows: gate, then up."""
    return WeightRule(mcore, hf, size, _stacked_slices, TPSplit.HALVES, when)


def qkv(mcore: str, hf: tuple[str, str, str], *rest: str, when: str = ALWAYS) -> WeightRule:
    """Query, key and value rows by group: its queries, its key, its value; `rest` follows rows."""
    return WeightRule(mcore, hf, rest, _grouped_slices, TPSplit.ROWS, when)


def _same_slices(rule: WeightRule, model: ModelConfig) -> Iterator[SliceMap]:
    region = full_slice(rule.sizes(model))
    yield SliceMap(rule.hf[0], region, region)


def _stacked_slices(rule: WeightRule, model: ModelConfig) -> Iterator[SliceMap]:
    rows, *rest = rule.sizes(model)
    for number, name in enumerate(rule.hf):
        mcore = ((number * rows, (number + 1) * rows), *full_slice(rest))
        yield SliceMap(name, full_slice((rows, *rest)), mcore)


def _paired_slices(rule: WeightRule, model: ModelConfig) -> Iterator[SliceMap]:
    rows, *rest = rule.sizes(model)
    for number in range(2):
        mcore = ((number * rows, (number + 1) * rows), *full_slice(rest))
        yield SliceMap(rule.hf[0], ((number, number + 1), *full_slice((rows, *rest))), mcore)


def _grouped_slices(rule: WeightRule, model: ModelConfig) -> Iterator[SliceMap]:
    rest = full_slice(rule.sizes(model))
    groups, head = model.num_query_groups, model.kv_channels
    queries = model.num_attention_heads // groups * head
    start = 0
    for group in range(groups):
        for name, rows in zip(rule.hf, (queries, head, head)):
            at = (group * rows, (group + 1) * rows)
            yield SliceMap(name, (at, *rest), ((start, start + rows), *rest))
            start += rows


@dataclass(frozen=True)
class Weight:
    """One full Megatron tensor and the HF tensors that it is made of."""

    name: str
    shape: tuple[int, ...]
    split: TPSplit
    slice_maps: tuple[SliceMap, ...]
    expert: int | None
    is_float32: bool


@dataclass(frozen=True)
class WeightTable:
    """The rows of a family: outside the layers, in every layer, in dense and in MoE layers."""

    model: tuple[WeightRule, ...]
    layer: tuple[WeightRule, ...]
    dense: tuple[WeightRule, ...]
    moe: tuple[WeightRule, ...] = ()
    expert: tuple[WeightRule, ...] = ()
    mtp: tuple[WeightRule, ...] = ()
    """In a layer of multi-token prediction, beside its decoder layer."""
    mtp_copies: tuple[tuple[str, str], ...] = ()
    """HF tensors of such a layer that repeat a Megatron tensor outside the layers."""
    hf_layer: str = "model.layers.{layer}."
    fused_names: tuple[tuple[str, str], ...] = ()
    """Parts of HF names that are others where experts are fused."""
    hf_views: tuple[tuple[str, HfView], ...] = ()
    """Suffixes of HF tensors that slices see in another shape."""
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    """Suffixes of HF tensors that are not weights."""

    def weights(self, model: ModelConfig, experts: Experts = "each") -> Iterator[Weight]:
        """Yield every tensor of a model."""
        for weight in self._weights(model):
            yield weight if experts == "each" else self._fused(weight)

    def _fused(self, weight: Weight) -> Weight:
        """Return a weight with the HF tensors of fused experts."""
        maps = weight.slice_maps
        if len(maps[0].hf_slice) > len(weight.shape):  # the family has no others
            return weight
        for each, fused in self.fused_names:
            maps = tuple(replace(m, hf_name=m.hf_name.replace(each, fused)) for m in maps)
        if (number := weight.expert) is not None:
            layer = maps[0].hf_name.partition(f".experts.{number}.")[0]
            name = f"{layer}.experts.{FUSED[weight.name.split('.')[-2]]}"
            region = full_slice(weight.shape)
            maps = (SliceMap(name, ((number, number + 1), *region), region),)
        return replace(weight, slice_maps=maps)

    def hf_view(self, name: str) -> HfView | None:
        """Return how slices see an HF tensor, nothing where they see it as it is."""
        return next((view for ending, view in self.hf_views if name.endswith(ending)), None)

    def _weights(self, model: ModelConfig) -> Iterator[Weight]:
        yield from _named(self.model, model)
        for layer in range(model.num_layers):
            yield from self._layer(model, layer, f"decoder.layers.{layer}.")
        for number in range(model.mtp_num_layers):
            layer, prefix = model.num_layers + number, f"mtp.layers.{number}."
            yield from _named(self.mtp, model, prefix, self.hf_layer.format(layer=layer))
            yield from self._layer(model, layer, prefix + "transformer_layer.")

    def hf_copies(self, model: ModelConfig) -> dict[str, str]:
        """Return the HF tensors that repeat a Megatron tensor, each with that tensor's name."""
        layers = range(model.num_layers, model.num_layers + model.mtp_num_layers)
        prefixes = [self.hf_layer.format(layer=layer) for layer in layers]
        return {prefix + hf: mcore for prefix in prefixes for hf, mcore in self.mtp_copies}

    def _layer(self, model: ModelConfig, layer: int, prefix: str) -> Iterator[Weight]:
        hf = self.hf_layer.format(layer=layer)
        yield from _named(self.layer, model, prefix, hf)
        if not model.is_moe_layer(layer):
            yield from _named(self.dense, model, prefix, hf)
            return
        assert model.moe is not None
        yield from _named(self.moe, model, prefix, hf)
        for expert in range(model.moe.num_experts):
            yield from _named(self.expert, model, prefix, hf, expert)


def _named(
    rules: tuple[WeightRule, ...],
    model: ModelConfig,
    prefix: str = "",
    hf_prefix: str = "",
    expert: int | None = None,
) -> Iterator[Weight]:
    for rule in rules:
        if not model.get(rule.when):
            continue
        stack: TensorSlice = ()
        if rule.is_stacked and expert is not None:
            stack = ((expert, expert + 1),)
        slice_maps = tuple(
            SliceMap(
                hf_prefix + m.hf_name.format(expert=expert), (*stack, *m.hf_slice), m.mcore_slice
            )
            for m in rule.slice_maps(rule, model)
        )
        size = _extent([m.mcore_slice for m in slice_maps])
        name = prefix + rule.mcore.format(expert=expert)
        yield Weight(name, size, rule.split, slice_maps, expert, rule.is_float32)


def _extent(slices: list[TensorSlice]) -> tuple[int, ...]:
    return tuple(max(stop for _, stop in pairs) for pairs in zip(*slices))
