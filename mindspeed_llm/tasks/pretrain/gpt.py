"""Pretraining: learn every token of plain documents."""

from typing import Any

from mindspeed.config import ConfigError
from mindspeed_llm.data.collate import collate_fixed
from mindspeed_llm.data.handlers import PRETRAIN
from mindspeed_llm.data.instruction import split_parts, split_weights
from mindspeed_llm.data.stream import SampleStream
from mindspeed_llm.tasks.posttrain.sft import SFTTrainer
from mindspeed_llm.training.documents import document_facts, document_tokens, open_documents


class PretrainTrainer(SFTTrainer):
    """Trains on windows over documents; the loss is that of fine-tuning with all tokens trained."""

    handler = PRETRAIN

    def open_data(self) -> tuple[SampleStream, SampleStream | None]:
        """Cut the documents into samples of --seq-length."""
        if self.options.seq_length is None:
            raise ConfigError("--seq-length is missing: the length of the samples")
        self.is_packed, self.length = False, self.options.seq_length
        for prefix in split_weights(self.data_path)[1]:
            self.check_vocabulary(prefix, document_facts(prefix))
        self.check_tokens([document_tokens(p) for p in split_weights(self.data_path)[1]])
        train, valid, _ = split_parts(self.options.split)
        return self._windows(train), self._windows(valid) if self.evaluates(valid) else None

    def _padded(self, samples: Any) -> dict[str, Any]:
        return collate_fixed(samples, seq_length=self.length, pad_id=0, shift=False)

    def _windows(self, part: tuple[float, float]) -> SampleStream:
        options = self.options
        return open_documents(
            self.data_path,
            self.length,
            seed=options.seed,
            shuffle=not options.no_shuffle,
            part=part,
        )
