"""The lines of a weight-name table: parts of Megatron tensors and the HF parts that they are.

A box is one (start, stop) pair per dimension.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from mindspeed.checkpoint.tensor_slice import TensorSlice, full_slice
from mindspeed_llm.models.shape import ModelShape

ALWAYS = "hidden_size"


class Cut(Enum):
    """How tensor parallelism cuts a weight."""

    NONE = "every rank has all of it"
    ROWS = "each rank has a range of rows"
    COLUMNS = "each rank has a range of columns"
    HALVES = "each rank has a range of rows of either half"
    VOCABULARY = "as rows, padded until they divide"


@dataclass(frozen=True)
class Link:
    """The box `place` of a Megatron tensor is the box `at` of an HF tensor."""

    hf: str
    at: TensorSlice
    place: TensorSlice


@dataclass(frozen=True)
class Rule:
    """A line: the names, with {expert} for its number, and how their boxes correspond."""

    mcore: str
    hf: tuple[str, ...]
    size: tuple[str, ...]
    """Dimensions, as fields or properties of ModelShape."""
    boxes: Callable[["Rule", ModelShape], Iterator[Link]]
    cut: Cut
    when: str = ALWAYS
    """A field or property of ModelShape: the tensor is there if it is true."""
    is_float32: bool = False
    """Stays in 32 bits whatever the others are cast to."""

    def sizes(self, shape: ModelShape) -> tuple[int, ...]:
        """Return the dimensions in numbers."""
        return tuple(shape.get(name) for name in self.size)


def copy(
    mcore: str,
    hf: str,
    *size: str,
    cut: Cut = Cut.NONE,
    when: str = ALWAYS,
    is_float32: bool = False,
) -> Rule:
    """One HF tensor, number for number."""
    return Rule(mcore, (hf,), size, _same_boxes, cut, when, is_float32)


def stack(mcore: str, hf: tuple[str, ...], *size: str, when: str = ALWAYS) -> Rule:
    """HF tensors of one size below each other: gate, then up."""
    return Rule(mcore, hf, size, _stacked_boxes, Cut.HALVES, when)


def qkv(mcore: str, hf: tuple[str, str, str], *rest: str, when: str = ALWAYS) -> Rule:
    """Query, key and value rows by group: its queries, its key, its value; `rest` follows rows."""
    return Rule(mcore, hf, rest, _grouped_boxes, Cut.ROWS, when)


def _same_boxes(rule: Rule, shape: ModelShape) -> Iterator[Link]:
    box = full_slice(rule.sizes(shape))
    yield Link(rule.hf[0], box, box)


def _stacked_boxes(rule: Rule, shape: ModelShape) -> Iterator[Link]:
    rows, *rest = rule.sizes(shape)
    for number, name in enumerate(rule.hf):
        place = ((number * rows, (number + 1) * rows), *full_slice(rest))
        yield Link(name, full_slice((rows, *rest)), place)


def _grouped_boxes(rule: Rule, shape: ModelShape) -> Iterator[Link]:
    rest = full_slice(rule.sizes(shape))
    groups, head = shape.num_query_groups, shape.kv_channels
    queries = shape.num_attention_heads // groups * head
    start = 0
    for group in range(groups):
        for name, rows in zip(rule.hf, (queries, head, head)):
            at = (group * rows, (group + 1) * rows)
            yield Link(name, (at, *rest), ((start, start + rows), *rest))
            start += rows
