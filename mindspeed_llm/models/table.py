"""A family's weight-name table, and every tensor of a model that it names.

Megatron names are those of local layer specs, with the number of the layer in the whole model and
of the expert in the whole layer.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mindspeed.checkpoint.tensor_slice import TensorSlice
from mindspeed_llm.models.rules import Cut, Link, Rule
from mindspeed_llm.models.shape import ModelShape


@dataclass(frozen=True)
class Weight:
    """One whole Megatron tensor and the HF tensors that make it up."""

    name: str
    shape: tuple[int, ...]
    cut: Cut
    links: tuple[Link, ...]
    expert: int | None
    is_float32: bool


@dataclass(frozen=True)
class WeightTable:
    """The lines of a family: outside the layers, in every layer, in dense and in MoE layers."""

    model: tuple[Rule, ...]
    layer: tuple[Rule, ...]
    dense: tuple[Rule, ...]
    moe: tuple[Rule, ...] = ()
    expert: tuple[Rule, ...] = ()
    mtp: tuple[Rule, ...] = ()
    """In a layer of multi-token prediction, beside its decoder layer."""
    mtp_copies: tuple[tuple[str, str], ...] = ()
    """HF tensors of such a layer that repeat a Megatron tensor outside the layers."""
    hf_layer: str = "model.layers.{layer}."
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    """Endings of HF tensors that are no weights."""

    def weights(self, shape: ModelShape) -> Iterator[Weight]:
        """Yield every tensor of a model."""
        yield from _named(self.model, shape)
        for layer in range(shape.num_layers):
            yield from self._layer(shape, layer, f"decoder.layers.{layer}.")
        for number in range(shape.mtp_num_layers):
            layer, prefix = shape.num_layers + number, f"mtp.layers.{number}."
            yield from _named(self.mtp, shape, prefix, self.hf_layer.format(layer=layer))
            yield from self._layer(shape, layer, prefix + "transformer_layer.")

    def hf_copies(self, shape: ModelShape) -> dict[str, str]:
        """Return the HF tensors that repeat a Megatron tensor, each with that tensor's name."""
        layers = range(shape.num_layers, shape.num_layers + shape.mtp_num_layers)
        prefixes = [self.hf_layer.format(layer=layer) for layer in layers]
        return {prefix + hf: mcore for prefix in prefixes for hf, mcore in self.mtp_copies}

    def _layer(self, shape: ModelShape, layer: int, prefix: str) -> Iterator[Weight]:
        hf = self.hf_layer.format(layer=layer)
        yield from _named(self.layer, shape, prefix, hf)
        if not shape.is_moe_layer(layer):
            yield from _named(self.dense, shape, prefix, hf)
            return
        assert shape.moe is not None
        yield from _named(self.moe, shape, prefix, hf)
        for expert in range(shape.moe.num_experts):
            yield from _named(self.expert, shape, prefix, hf, expert)


def _named(
    rules: tuple[Rule, ...],
    shape: ModelShape,
    prefix: str = "",
    hf_prefix: str = "",
    expert: int | None = None,
) -> Iterator[Weight]:
    for rule in rules:
        if not shape.get(rule.when):
            continue
        links = tuple(
            Link(hf_prefix + link.hf.format(expert=expert), link.at, link.place)
            for link in rule.boxes(rule, shape)
        )
        size = _extent([link.place for link in links])
        name = prefix + rule.mcore.format(expert=expert)
        yield Weight(name, size, rule.cut, links, expert, rule.is_float32)


def _extent(boxes: list[TensorSlice]) -> tuple[int, ...]:
    return tuple(max(stop for _, stop in pairs) for pairs in zip(*boxes))
