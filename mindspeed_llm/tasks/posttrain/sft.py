"""Supervised fine-tuning: learn the answers, token by token."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from mindspeed.config import ConfigError
from mindspeed_llm.data.collate import collate_fixed, collate_packed, collate_variable
from mindspeed_llm.data.instruction import InstructionData
from mindspeed_llm.data.stream import Sample
from mindspeed_llm.losses.token_loss import token_loss
from mindspeed_llm.tasks.posttrain.base import BaseTrainer, Batch, on_device


class SFTTrainer(BaseTrainer):
    """Trains on samples whose labels say which tokens are trained."""

    is_joined = False
    """Whether the samples of a micro-batch follow each other instead of being padded."""

    def look_at(self, data: Sequence[InstructionData]) -> None:
        """Find the length of rows, how they are padded, and whether they hold several samples."""
        options = self.options
        for one in data:
            if one.kind != "instruction":
                raise ConfigError(
                    f"{one.missing('instruction')[0]} is missing: --stage sft needs it (without "
                    f"it {one.prefix} is {one.kind} data)"
                )
            self.check_vocabulary(one.prefix, one.facts)
        self.pad_id: int = next((one.facts.get("pad_id", 0) for one in data), 0)
        asked = options.neat_pack or options.reset_position_ids or options.reset_attention_mask
        self.is_packed = asked or any(_is_neat(one) for one in data)
        if self.is_packed and options.transformer_impl == "local":
            raise ConfigError("packed samples need --transformer-impl transformer_engine")
        if self.is_packed and options.variable_seq_lengths:
            raise ConfigError("packed rows all have one length: drop --variable-seq-lengths")
        # Multi-token prediction and Megatron's local layers know rows of one sample only.
        is_one_sample = self.setup.shape.mtp_num_layers or options.transformer_impl == "local"
        self.is_joined = options.variable_seq_lengths and not is_one_sample
        # With sequence parallelism every rank takes an equal share of the positions.
        self.multiple = math.lcm(options.pad_to_multiple_of, self.setup.dims.tp)
        longest = max(one.longest for one in data)
        length = options.seq_length or -(-longest // self.multiple) * self.multiple
        if self.is_packed:
            length = longest
        if options.sequence_parallel and length % self.setup.dims.tp:
            raise ConfigError(
                f"--sequence-parallel: a length of {length} cannot be shared by "
                f"{self.setup.dims.tp} ranks: choose --seq-length a multiple of it"
            )
        self.length = length

    def check_vocabulary(self, prefix: str, facts: Mapping[str, Any]) -> None:
        """Refuse data of a tokenizer that has tokens which the model has not."""
        tokens, rows = facts.get("vocabulary", 0), self.setup.shape.vocab_size
        if tokens > rows:
            raise ConfigError(
                f"{prefix}: its tokenizer ({facts.get('tokenizer')}) has {tokens} tokens, the "
                f"model's embedding has {rows}: preprocess with the tokenizer of the model"
            )

    @property
    def sizes(self) -> tuple[int, int]:
        """Packed rows are joined to one long one."""
        size = self.options.micro_batch_size
        return (self.length * size, 1) if self.is_packed else (self.length, size)

    def collate(self, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        """Pad or join the samples, and count their tokens."""
        if self.is_packed:
            batch = collate_packed(samples)
            real = sum(int((sample["attention_mask"] != 0).sum()) for sample in samples)
        else:
            batch = self._joined(samples) if self.is_joined else self._padded(samples)
            real = sum(len(sample["input_ids"]) for sample in samples)
        return batch | {"real_tokens": torch.tensor(real)}

    def get_batch(self, data_iterator: Iterator[Any]) -> Batch:
        """Take the next micro-batch; where its samples begin is known without the device."""
        from mindspeed.te.pytorch.attention.core import remember

        on_host = next(data_iterator)
        batch = on_device(on_host)
        if "cu_seqlens" in batch:
            remember(batch["cu_seqlens"], on_host["cu_seqlens"].tolist())
        return batch

    def loss_func(self, batch: Batch, output_tensor: torch.Tensor) -> Any:
        """Sum the losses of what is to be trained; Megatron divides by the number of tokens."""
        total, count = token_loss(output_tensor, batch["loss_mask"])
        report = {
            "lm loss": torch.stack([total.detach(), count.float()]),
            "tokens": batch["real_tokens"],
        }
        # A micro-batch without anything to learn counts as one token of loss 0.
        divisor = count if self.options.calculate_per_token_loss else count.clamp(min=1)
        return total, divisor, report

    def forward_step(self, data_iterator: Iterator[Any], model: Any) -> tuple[torch.Tensor, Any]:
        """Run the model on the next micro-batch, without any mask of size s x s."""
        batch = self.get_batch(data_iterator)
        output = model(
            batch["tokens"],
            batch["position_ids"],
            None,
            labels=batch["labels"],
            packed_seq_params=_packed(batch),
        )
        return output, partial(self.loss_func, batch)

    def _joined(self, samples: Any) -> dict[str, torch.Tensor]:
        return collate_packed(samples, multiple=self.multiple, pad_id=self.pad_id)

    def _padded(self, samples: Any) -> dict[str, torch.Tensor]:
        if not self.options.variable_seq_lengths:
            return collate_fixed(samples, seq_length=self.length, pad_id=self.pad_id)
        return collate_variable(samples, multiple=self.multiple, pad_id=self.pad_id)


def _packed(batch: Batch) -> Any:
    """Tell attention where samples begin, if they share rows."""
    if "cu_seqlens" not in batch:
        return None
    from megatron.core.packed_seq_params import PackedSeqParams

    borders, longest = batch["cu_seqlens"], int(batch["max_seqlen"])
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _is_neat(data: InstructionData) -> bool:
    """Say whether rows hold several samples; the mask of such a row counts them."""
    noted = data.facts.get("pack")
    return noted == "neat" if data.facts else len(data) > 0 and data[0]["attention_mask"].max() > 1
