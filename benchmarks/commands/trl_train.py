"""A fine-tuning script with TRL's SFTTrainer and Liger, as its documentation writes it."""

import steps
from datasets import Dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer


def main():
    """Train."""
    options = steps.parse()
    records = steps.conversations(options.data)
    data = Dataset.from_list([{"prompt": asked, "completion": answer} for asked, answer in records])
    model = steps.build(options)
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            packing=not options.padded,
            max_length=options.length,
            **steps.arguments(options),
        ),
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=steps.adapters() if options.lora else None,
    )
    steps.count_steps(trainer)
    trainer.train()


if __name__ == "__main__":
    main()
