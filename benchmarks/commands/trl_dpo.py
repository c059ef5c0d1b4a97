"""A script with TRL's DPOTrainer and Liger, as its documentation writes it."""

import json

import steps
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer


class LigerDPOTrainer(DPOTrainer):
    """Computes the loss from the last hidden states, by Liger's fused DPO loss."""

    def _compute_loss(self, model, inputs, return_outputs):
        from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss

        given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)[:, 1:]
        with self.accelerator.autocast():
            hidden = model.model(**given, use_cache=False).last_hidden_state[:, :-1]
            with torch.no_grad():
                reference = self.ref_model.model(**given, use_cache=False).last_hidden_state[:, :-1]
            loss, _ = LigerFusedLinearDPOLoss(beta=self.beta)(
                model.lm_head.weight,
                hidden,
                labels.contiguous(),
                ref_input=reference,
                ref_weight=self.ref_model.lm_head.weight,
            )
        return loss


def load(options, dtype):
    """Return the model, with its weights in a dtype."""
    attention = steps.attention(options.attention)
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=dtype, attn_implementation=attention
    )
    return model.cuda() if torch.cuda.is_available() else model


def main():
    """Train."""
    options = steps.parse()
    records = [json.loads(line) for line in open(options.data)]
    data = Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": record["instruction"]}],
                "chosen": [{"role": "assistant", "content": record["chosen"]}],
                "rejected": [{"role": "assistant", "content": record["rejected"]}],
            }
            for record in records
        ]
    )
    kind = LigerDPOTrainer if options.liger_loss else DPOTrainer
    trainer = kind(
        model=load(options, torch.float32),
        ref_model=load(options, torch.float32 if options.fp32 else torch.bfloat16),
        args=DPOConfig(
            max_length=options.length,
            train_sampling_strategy="sequential",
            **steps.arguments(options) | {"learning_rate": 1e-6, "weight_decay": 0.0},
        ),
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(options.model),
    )
    steps.count_steps(trainer)
    trainer.train()


if __name__ == "__main__":
    main()
