"""Process reward model: a verdict on every step of a solution, predicted at its placeholder."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from mindspeed.config import ConfigError
from mindspeed.training.metrics import Metric
from mindspeed_llm.data.instruction import InstructionData
from mindspeed_llm.data.stream import Sample
from mindspeed_llm.losses.next_token import LM_LOSS
from mindspeed_llm.losses.vocab_parallel import select_tokens, verdict_losses
from mindspeed_llm.tasks.posttrain.base import BaseTrainer, Batch

ACCURACY = "accuracy"


class PRMTrainer(BaseTrainer):
    """Trains a language model to name the verdict on a step where its placeholder is.

    The verdict is one of --reward-tokens, to which the softmax is restricted; without them it is
    one of the verdicts of the data.
    """

    handler = "AlpacaStyleProcessRewardHandler"
    splits_sequences = True
    may_pack = True

    def configure_batches(self, data: Sequence[InstructionData]) -> None:
        """Derive the length of rows, and the tokens that are verdicts."""
        self.rows = self.make_rows(data)
        self.verdicts = self._find_verdicts(data)

    @property
    def sizes(self) -> tuple[int, int]:
        """A row a sample, or all packed rows as one."""
        return self.rows.sizes(self.options.micro_batch_size)

    def collate(self, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        """Pad or concatenate the samples; the label of a placeholder is its verdict."""
        return self.rows.collate(samples, shift=False)

    @property
    def metrics(self) -> Sequence[Metric]:
        """The loss, and how often the right verdict is the likeliest."""
        per_token = self.options.calculate_per_token_loss
        return Metric(LM_LOSS, "mean" if per_token else "micro_batch_mean"), Metric(ACCURACY)

    def run_model(self, model: Any, batch: Batch, *, has_labels: bool = True) -> torch.Tensor:
        """Return the logits of all tokens, of which a rank has those of its part."""
        return super().run_model(model, batch, has_labels=False)

    def loss_func(self, batch: Batch, output_tensor: torch.Tensor) -> Any:
        """Sum the losses of verdicts; Megatron divides by their number."""
        is_step = batch["loss_mask"].flatten() != 0
        logits = select_tokens(output_tensor.flatten(0, 1)[is_step], self._verdict_ids)
        labels = batch["labels"].flatten()[is_step]
        losses, is_right = verdict_losses(logits, labels, self._verdict_ids)
        total, count, ranks = losses.sum(), losses.new_tensor(len(losses)), self.setup.dims.cp
        # Of a sequence that is split this rank has a part of the steps, as of tokens in SFT.
        everywhere = losses.new_tensor(float(batch["trained_tokens"])) if ranks > 1 else count
        report = {
            LM_LOSS: torch.stack([total.detach() * ranks, everywhere]),
            ACCURACY: torch.stack([is_right.float().sum(), count]),
            "tokens": batch["real_tokens"],
        }
        if self.options.calculate_per_token_loss:
            return total, count.to(torch.int32), report
        # A micro-batch without steps has a loss of 0.
        if ranks == 1:
            return total, count.clamp(min=1).to(torch.int32), report
        return total / everywhere.clamp(min=1), report

    @cached_property
    def _verdict_ids(self) -> torch.Tensor:
        from mindspeed import device

        return torch.tensor(self.verdicts, device=device.current().torch_device)

    def _find_verdicts(self, data: Sequence[InstructionData]) -> list[int]:
        """Return the ids of --reward-tokens, or of the verdicts in the data."""
        seen = sorted({token for one in data for token in one.label_values()})
        if not self.options.reward_tokens:
            return seen
        given = self._reward_ids()
        if unknown := set(seen) - set(given):
            raise ConfigError(
                f"--reward-tokens {' '.join(self.options.reward_tokens)}: are tokens {given}, and "
                f"the data has the verdict {min(unknown)}: give the --reward-tokens of preprocess"
            )
        return given

    def _reward_ids(self) -> list[int]:
        from mindspeed_llm.data.encoder import TextEncoder
        from mindspeed_llm.data.handlers.alpaca import one_token
        from mindspeed_llm.data.tokenizer import load_facts

        options = self.options
        folder = options.tokenizer_name_or_path or self.setup.config_folder
        facts = load_facts(None if folder is None else str(folder), cache_dir=options.cache_dir)
        encoder = TextEncoder(facts, parse_special=False, accelerate=False)
        return [one_token(encoder, "--reward-tokens", text) for text in options.reward_tokens]
