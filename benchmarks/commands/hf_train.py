"""A script with transformers' Trainer and Liger on packed rows; samples do not attend to others."""

import steps
import torch
from transformers import AutoTokenizer, DataCollatorWithFlattening, Trainer, TrainingArguments


def encode(tokenizer, path, length):
    """Return token ids and labels of every conversation; only answers are trained."""
    samples = []
    for question, answer in steps.conversations(path):
        asked = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(question + answer, tokenize=False)
        ids = tokenizer(whole)["input_ids"]
        prompt = len(tokenizer(asked)["input_ids"])
        if len(ids) <= length:
            labels = [-100] * prompt + ids[prompt:]
            samples.append({"input_ids": ids, "labels": labels})
    return samples


def pack(samples, length):
    """Fill rows, the longest samples first, each into the fullest row that has the space."""
    rows, space = [], []
    for sample in sorted(samples, key=lambda sample: -len(sample["input_ids"])):
        size = len(sample["input_ids"])
        fitting = [index for index, left in enumerate(space) if left >= size]
        if fitting:
            index = min(fitting, key=space.__getitem__)
            rows[index].append(sample)
            space[index] -= size
        else:
            rows.append([sample])
            space.append(length - size)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    return [rows[index] for index in order.tolist()]


class Flattening(DataCollatorWithFlattening):
    """Concatenates the rows of a micro-batch, and passes their bounds to flash attention."""

    def __call__(self, features, return_tensors=None, separator_id=None):
        """Concatenate all samples of all rows."""
        return super().__call__([sample for row in features for sample in row])


def main():
    """Train."""
    options = steps.parse()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = pack(encode(tokenizer, options.data, options.length), options.length)
    model = steps.build(options)
    if options.lora:
        from peft import get_peft_model

        model = get_peft_model(model, steps.adapters())
    has_borders = "flash" in model.config._attn_implementation
    trainer = Trainer(
        model=model,
        args=TrainingArguments(remove_unused_columns=False, **steps.arguments(options)),
        train_dataset=rows,
        data_collator=Flattening(return_flash_attn_kwargs=has_borders),
    )
    steps.count_steps(trainer)
    trainer.train()


if __name__ == "__main__":
    main()
