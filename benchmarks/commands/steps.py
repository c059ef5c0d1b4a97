"""Shared by the scripts on transformers: the model, the text, and a JSON line for each step."""

import argparse
import json
import time


def parse():
    """Read the options of a script."""
    parser = argparse.ArgumentParser()
    for name in ("--model", "--data", "--output", "--attention"):
        parser.add_argument(name, required=True)
    for name in ("--steps", "--length", "--micro-batch", "--global-batch"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--lora", action="store_true")
    for name in ("--padded", "--fp32", "--liger-loss"):
        parser.add_argument(name, action="store_true")
    return parser.parse_args()


def attention(requested):
    """Return the fastest installed attention that supports packed rows."""
    if requested != "auto":
        return requested
    try:
        import flash_attn.cute  # noqa: F401
    except ImportError:
        return "sdpa"
    return "flash_attention_4"


def build(options):
    """Return the model, with random weights: float32, or bf16 where only adapters are trained."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(options.model)
    dtype = torch.bfloat16 if options.lora else torch.float32
    chosen = attention(options.attention)
    print(f"attention: {chosen}", flush=True)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=chosen)


def adapters():
    """Return the peft config of the same adapters as ours."""
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def arguments(options):
    """Return the arguments of both trainers."""
    import torch

    return {
        "output_dir": options.output,
        "max_steps": options.steps,
        "per_device_train_batch_size": options.micro_batch,
        "gradient_accumulation_steps": options.global_batch // options.micro_batch,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "bf16": not options.fp32,
        "use_cpu": not torch.cuda.is_available(),
        "use_liger_kernel": torch.cuda.is_available(),  # its kernels are Triton's
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": False,
        "dataloader_num_workers": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def conversations(path):
    """Return the messages of each conversation."""
    records = [json.loads(line) for line in open(path)]
    return [
        (
            [{"role": "user", "content": record["instruction"]}],
            [{"role": "assistant", "content": record["output"]}],
        )
        for record in records
    ]


def count_steps(trainer):
    """Print seconds, tokens and memory after every step of a trainer."""
    import torch
    from transformers import TrainerCallback

    inner, counts = trainer.training_step, []

    def training_step(model, inputs, *args, **kwargs):
        mask = inputs.get("attention_mask")
        counts.append(inputs["input_ids"].numel() if mask is None else mask.sum())
        return inner(model, inputs, *args, **kwargs)

    class Clock(TrainerCallback):
        """Measures the time between two log lines."""

        def on_train_begin(self, *args, **kwargs):
            self.began = time.perf_counter()

        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" not in logs:
                return
            is_cuda = torch.cuda.is_available()
            if is_cuda:
                torch.cuda.synchronize()
            now = time.perf_counter()
            numbers = {
                "step": state.global_step,
                "seconds": now - self.began,
                "tokens": int(sum(int(count) for count in counts)),
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if is_cuda else 0.0,
                "loss": float(logs["loss"]),
            }
            print(json.dumps(numbers), flush=True)
            counts.clear()
            self.began = now

    trainer.training_step = training_step
    trainer.add_callback(Clock())
