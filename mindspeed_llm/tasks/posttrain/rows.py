"""How the sequences of a micro-batch become rows: of one length, or one after the other."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from mindspeed.config import ConfigError, Spelling
from mindspeed_llm.data.collate import (
    Samples,
    collate_fixed,
    collate_packed,
    collate_variable,
    split_pairs,
)
from mindspeed_llm.data.context_split import ContextSplit
from mindspeed_llm.data.instruction import InstructionData
from mindspeed_llm.data.shared_prompts import collate_shared_pairs
from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.training.joined_samples import why_not_joined
from mindspeed_llm.training.options import TrainOptions

Kind = Literal["fixed", "longest", "concatenated", "packed"]
PACK_FLAGS = ("neat_pack", "reset_position_ids", "reset_attention_mask")
"""Options that say that rows are packed, where the data does not say it."""


@dataclass(frozen=True)
class Rows:
    """The length of rows, and how they are filled."""

    length: int
    """Longest sequence."""
    multiple: int
    """What the length of rows, where it varies, is a multiple of."""
    pad_id: int
    kind: Kind
    """Padded to the length, padded to the longest of the micro-batch, one row without padding, or
    rows that preprocess filled with several samples."""

    @classmethod
    def of(
        cls,
        options: TrainOptions,
        shape: ModelConfig,
        data: Sequence[InstructionData],
        *,
        may_pack: bool = False,
    ) -> "Rows":
        """Derive the rows from the options and the data sets, which may hold packed rows."""
        is_packed = _is_packed(options, data, may_pack)
        tp = options.tensor_model_parallel_size
        # With sequence parallelism every rank takes an equal share of the positions.
        multiple = math.lcm(options.pad_to_multiple_of, tp)
        longest = max(one.longest for one in data)
        length = options.seq_length or -(-longest // multiple) * multiple
        if is_packed:
            length = longest
        split = ContextSplit(options.context_parallel_size, tp=tp)
        if options.sequence_parallel and split.padded(length) % tp:
            raise ConfigError(
                f"--sequence-parallel: a length of {length} cannot be shared by {tp} ranks: choose "
                "--seq-length a multiple of it"
            )
        reason = why_not_joined(options, shape)
        kind: Kind = "fixed"
        if is_packed:
            if reason is not None:
                raise ConfigError(f"packed samples: {reason}")
            kind = "packed"
        elif options.variable_seq_lengths:
            kind = "concatenated" if reason is None else "longest"
        pad_id = next((one.facts.get("pad_id", 0) for one in data), 0)
        return cls(length, multiple, pad_id, kind)

    @property
    def has_documents(self) -> bool:
        """Whether a row holds several sequences."""
        return self.kind in ("concatenated", "packed")

    def sizes(self, micro_batch_size: int) -> tuple[int, int]:
        """Return the length and the number of rows; packed ones are concatenated to one."""
        if self.kind == "packed":
            return self.length * micro_batch_size, 1
        return self.length, micro_batch_size

    def collate(self, sequences: Samples, *, shift: bool = True) -> dict[str, torch.Tensor]:
        """Make the tensors of a micro-batch, and count its sequences and their tokens."""
        pad_id, multiple = self.pad_id, self.multiple
        if self.kind == "packed":
            real = sum(int((each["attention_mask"] != 0).sum()) for each in sequences)
            batch = collate_packed(sequences, shift=shift)
            return batch | {"real_tokens": torch.tensor(real)}
        if self.kind == "concatenated":
            batch = collate_packed(sequences, multiple=multiple, pad_id=pad_id, shift=shift)
        elif self.kind == "longest":
            batch = collate_variable(sequences, multiple=multiple, pad_id=pad_id, shift=shift)
        else:
            batch = collate_fixed(sequences, seq_length=self.length, pad_id=pad_id, shift=shift)
        return batch | _counts(sequences)

    def collate_pairs(self, pairs: Samples, *, is_shared: bool) -> dict[str, torch.Tensor]:
        """Do that for the sequences of pairs, chosen ones first, with each prompt once or twice."""
        sequences = split_pairs(pairs)
        if not is_shared:
            return self.collate(sequences)
        batch = collate_shared_pairs(pairs, multiple=self.multiple, pad_id=self.pad_id)
        return batch | _counts(sequences)


def _counts(sequences: Samples) -> dict[str, torch.Tensor]:
    """Count sequences and their tokens, which are the user's: also those that are computed once."""
    tokens = sum(len(each["input_ids"]) for each in sequences)
    return {"num_sequences": torch.tensor(len(sequences)), "real_tokens": torch.tensor(tokens)}


def _is_packed(options: TrainOptions, data: Sequence[InstructionData], may_pack: bool) -> bool:
    """Return whether rows hold several samples, by the options or by the data."""
    asked = [Spelling.FLAG.name_of(name) for name in PACK_FLAGS if getattr(options, name)]
    if not may_pack:
        if asked:
            raise ConfigError(
                f"{asked[0]}: --stage {options.stage} has no packed rows: give "
                "--variable-seq-lengths, which puts a micro-batch into one row without padding"
            )
        return False
    if not asked and not any(one.is_neat for one in data):
        return False
    if options.variable_seq_lengths:
        raise ConfigError("packed rows all have one length: drop --variable-seq-lengths")
    return True


def last_tokens(batch: dict[str, torch.Tensor], lengths: Sequence[int]) -> torch.Tensor:
    """Return the flat index of the last token of every sequence of a micro-batch."""
    if "cu_seqlens" in batch:
        return batch["cu_seqlens"][1 : len(lengths) + 1] - 1
    return torch.arange(len(lengths)) * batch["tokens"].shape[1] + torch.tensor(lengths) - 1
