"""What post-training stages share: data that preprocess made of conversations."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from mindspeed.config import ConfigError
from mindspeed_llm.data.instruction import InstructionData, open_stream, split_weights
from mindspeed_llm.data.stream import SampleStream
from mindspeed_llm.tasks.posttrain.rows import Rows
from mindspeed_llm.training.trainer import Batch, Part, Trainer

__all__ = ["BaseTrainer", "Batch"]


HELD = {
    "kto": "labelled completions",
    "instruction": "conversations",
    "pairwise": "pairs",
    "prompts": "prompts",
}
"""What data of each kind is to a user."""


class BaseTrainer(Trainer):
    """Trains on instruction data; a stage gives configure_batches, collate and loss_func."""

    handler = "AlpacaStyleInstructionHandler"
    data_kind: ClassVar[str] = "instruction"
    """What preprocess has to have made of the records."""

    @property
    def stage_name(self) -> str:
        """The value of --stage."""
        return self.options.stage

    def configure_from_data(self) -> None:
        """Check the data sets, and derive from them what batches are like."""
        data = [InstructionData(prefix) for prefix in split_weights(self.data_path)[1]]
        for one in data:
            if one.kind != self.data_kind:
                raise _other_kind(one, self.data_kind, self.options.stage)
        self.check_vocabulary({one.prefix: one.facts for one in data})
        self.configure_batches(data)
        self.check_tokens([file for one in data for file in one.token_files])

    @abstractmethod
    def configure_batches(self, data: Sequence[InstructionData]) -> None:
        """Set the length of rows and how they are padded, from the data sets."""

    def make_rows(self, data: Sequence[InstructionData]) -> Rows:
        """Derive how the sequences of a micro-batch become rows."""
        rows = Rows.of(self.options, self.setup.shape, data, may_pack=self.may_pack)
        if rows.has_documents:
            self.expect_documents()
        return rows

    def open_part(self, part: Part) -> SampleStream:
        """Open a share of the samples."""
        return self.open_samples(part)

    def open_samples(self, part: Part, *, is_numbered: bool = False) -> SampleStream:
        """Open a share of the samples, with their numbers in the data if these are asked for."""
        options = self.options
        return open_stream(
            self.data_path,
            seed=options.seed,
            shuffle=not options.no_shuffle,
            part=part,
            epoch_multiple=self.setup.dims.global_batch_size if options.padded_samples else 1,
            seq_length=options.seq_length,
            balanced_step=self.balanced_step,
            is_numbered=is_numbered,
        )


def _other_kind(data: InstructionData, kind: str, stage: str) -> ConfigError:
    """Return the error for data of another kind than a stage trains on."""
    # Nothing is missing of prompts in conversations, which have the same files and more.
    missing = data.missing(kind)
    needed = f"{missing[0]} is missing: --stage {stage} needs it; " if missing else ""
    return ConfigError(
        f"{needed or f'--stage {stage}: '}{data.prefix} holds {HELD[data.kind]}, not {HELD[kind]}: "
        "preprocess with another --handler-name, or give another --stage"
    )
