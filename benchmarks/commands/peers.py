"""Commands of other projects: Megatron-LM's script, torchtitan, ms-swift, scripts on transformers.

ms-swift and mcore-bridge import transformer_engine in any case, so without it they do not run on
plain megatron-core. The nearest baseline is level 0 of the adaptor: Megatron's own code, with
torch's GEMMs, norms and attention where it uses transformer_engine.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import yaml

from commands import data
from commands.job import Case, Command
from commands.ours import ALL

HERE = Path(__file__).resolve().parent
LINE = "import mindspeed.megatron_adaptor"
SWIFT_TRAIN = """
import mindspeed.megatron_adaptor
import mindspeed
mindspeed.enable(optimization_level={level})
from importlib.util import find_spec
from swift.megatron import megatron_pretrain_main
from swift.megatron.callbacks.base import MegatronCallback
from swift.megatron.callbacks.mapping import megatron_callbacks_map

if find_spec("tensorboard") is None:  # ms-swift has no switch for a run without it
    megatron_callbacks_map["tensorboard"] = MegatronCallback
if __name__ == "__main__":
    megatron_pretrain_main()
"""


def megatron(job, batch, *flags):
    """Build Megatron-LM's pretrain_gpt.py as it is; without Transformer Engine it is local."""
    local = ["--transformer-impl", "local", "--no-gradient-accumulation-fusion", "--no-rope-fusion"]
    local += ["--no-masked-softmax-fusion"]  # its kernels are compiled extensions, as are these
    script = job.site("megatron_lm") / "pretrain_gpt.py"
    return _megatron(job, batch, script, [*local, "--no-persist-layer-norm", *flags])


def megatron_with_us(job, batch, *flags):
    """Build the same script with the one import and nothing else."""
    lines = (job.site("megatron_lm") / "pretrain_gpt.py").read_text().splitlines(keepends=True)
    index = lines.index("import torch\n") + 1
    script = job.folder / "pretrain_gpt_mindspeed.py"
    script.write_text("".join([*lines[:index], f"{LINE}\n", *lines[index:]]))
    return _megatron(job, batch, script, list(flags))


def megatron_local_with_us(job, batch):
    """Build it with the import and the flags that the plain script needs."""
    return megatron_with_us(job, batch, "--transformer-impl", "local")


def _megatron(job, batch, script, flags):
    shape = job.shape
    sizes = {
        "num-layers": shape.layers,
        "hidden-size": shape.hidden,
        "ffn-hidden-size": shape.ffn,
        "num-attention-heads": shape.heads,
        "num-query-groups": shape.kv_heads,
        "seq-length": shape.sequence,
        "max-position-embeddings": shape.sequence,
        "vocab-size": shape.vocabulary - 1,  # its NullTokenizer adds one
        "micro-batch-size": batch,
        "global-batch-size": job.global_batch,
        "train-iters": job.steps,
        "log-memory-interval": job.steps,
    }
    argv = [sys.executable, str(script)]
    for name, value in sizes.items():
        argv += [f"--{name}", str(value)]
    argv += ["--group-query-attention", "--swiglu", "--normalization", "RMSNorm", "--bf16"]
    argv += ["--disable-bias-linear", "--position-embedding-type", "rope", "--log-throughput"]
    argv += ["--rotary-base", "1000000", "--attention-dropout", "0", "--hidden-dropout", "0"]
    argv += ["--lr", "1e-5", "--lr-decay-style", "constant", "--eval-iters", "0"]
    argv += ["--eval-interval", str(job.steps)]
    argv += ["--mock-data", "--tokenizer-type", "NullTokenizer", "--log-interval", "1"]
    argv += ["--add-qkv-bias"] if shape.has_qkv_bias else []
    argv += [] if shape.is_tied else ["--untie-embeddings-and-output-weights"]
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PATH": path_with_make(job.folder)}
    return Command(
        [*argv, *flags], "megatron", env, tokens_per_step=job.tokens_per_step, site="megatron_lm"
    )


def path_with_make(folder):
    """Return a PATH with a `make` that has nothing to do where there is no Makefile.

    The scripts call it for Megatron's index builder, which a wheel contains compiled.
    """
    make = folder / "bin" / "make"
    make.parent.mkdir(parents=True, exist_ok=True)
    real = shutil.which("make") or "false"
    make.write_text(f'#!/bin/sh\n[ -e "$2/Makefile" ] || exit 0\nexec {real} "$@"\n')
    make.chmod(0o700)
    return os.pathsep.join([str(make.parent), os.environ.get("PATH", os.defpath)])


def titan(job, batch, recompute="none"):
    """Build torchtitan's trainer, compiled: float32 weights, bf16 by autocast, fused AdamW."""
    options = {
        "model.name": "qwen3" if job.shape.num_experts else "llama3",
        "model.flavor": "benchmark",
        "model.hf_assets_path": job.folder / "tokenizer",
        "experimental.custom_import": "commands.titan_shape",
        "training.dataset": "c4_test",
        "training.dataset_path": job.folder / "documents",
        "training.dataloader.num_workers": 2,
        "training.local_batch_size": batch,
        "training.global_batch_size": job.global_batch,
        "training.seq_len": job.shape.sequence,
        "training.steps": job.steps,
        "optimizer.lr": 1e-5,
        "lr_scheduler.warmup_steps": 0,
        "activation_checkpoint.mode": recompute,
        "metrics.log_freq": 1,
        "job.dump_folder": job.folder / "titan",
    }
    argv = [sys.executable, "-m", "torchtitan.train", "--compile.enable"]
    for name, value in options.items():
        argv += [f"--{name}", str(value)]
    env = {"BENCHMARK_SHAPE": json.dumps(vars(job.shape))}
    env["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # as its own run_train.sh sets it
    return Command(
        argv,
        "titan",
        env,
        tokens_per_step=job.tokens_per_step,
        site="torchtitan",
        packages=("torchtitan",),
    )


def titan_recompute(job, batch):
    """Build it with every layer recomputed in backward."""
    return titan(job, batch, recompute="full")


def swift(job, batch, level=2):
    """Build ms-swift's `megatron pt` under the adaptor; what is not named is ms-swift's default."""
    folder = job.folder / "swift"
    _prepare_swift(job, folder)
    script = folder / f"pt_level_{level}.py"
    script.write_text(SWIFT_TRAIN.format(level=level))
    options = {
        "model": folder / "model",
        "model_type": "qwen2",
        "template": "chatml",
        "dataset": folder / "rows.jsonl",
        "output_dir": folder / f"output_{level}",
        "add_version": "false",
        "torch_dtype": "bfloat16",
        "micro_batch_size": batch,
        "global_batch_size": job.global_batch,
        "max_length": job.shape.sequence,
        "train_iters": job.steps + 100,  # ended by stop_after, before it saves
        "lr": 1e-5,
        "lr_decay_style": "constant",
        "split_dataset_ratio": 0,
        "dataset_shuffle": "false",
        "train_dataloader_shuffle": "false",
        "dataset_num_proc": 1,
        "logging_steps": 1,
        "save_steps": 10**6,
        "check_model": "false",
        "perform_initialization": "true",
    }
    argv = [sys.executable, str(script)]
    for name, value in options.items():
        argv += [f"--{name}", str(value)]
    return Command(
        argv,
        "swift",
        {"LOCAL_WORLD_SIZE": "1"},
        tokens_per_step=job.tokens_per_step,
        stop_after=(r"\{'loss': .*\}", job.steps),
        site="ms_swift",
        packages=("ms-swift",),
    )


def swift_level_0(job, batch):
    """Build it at level 0 of the adaptor, the nearest to plain Megatron."""
    return swift(job, batch, level=0)


def _prepare_swift(job, folder):
    """Write the model with random weights, its tokenizer and full rows of text, once."""
    if (folder / "rows.jsonl").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    data.write_model(job.shape, folder / "model")
    data.write_random_weights(folder / "model")
    data.write_swift_rows(job, folder / "rows.jsonl")


def hf_packed(job, batch, *flags):
    """Build a script with transformers' Trainer and Liger on packed rows."""
    return _script(job, batch, "hf_train.py", *flags)


def hf_lora(job, batch):
    """Build it with peft's adapters."""
    return hf_packed(job, batch, "--lora")


def trl_packed(job, batch, *flags):
    """Build a script with TRL's SFTTrainer and Liger on packed rows."""
    return _script(job, batch, "trl_train.py", *flags)


def trl_padded(job, batch):
    """Build it with micro-batches padded to their longest conversation."""
    return trl_packed(job, batch, "--padded")


def trl_lora(job, batch):
    """Build it with peft's adapters on packed rows."""
    return trl_packed(job, batch, "--lora")


def _script(job, batch, name, *flags):
    is_padded = "--padded" in flags
    global_batch = job.samples_per_step if is_padded else job.global_batch
    argv = [
        *(sys.executable, str(HERE / name), "--model", str(job.folder / "model")),
        *("--data", str(job.folder / "conversations.jsonl"), "--steps", str(job.steps)),
        *("--length", str(job.shape.sequence), "--micro-batch", str(batch)),
        *("--global-batch", str(global_batch), "--attention", job.attention),
        *("--output", str(job.folder / "hf_output"), *flags),
    ]
    packages = ("transformers", "liger-kernel", "trl", "peft", "accelerate")
    return Command(argv, "json", global_batch=global_batch, site="peers", packages=packages)


def llamafactory(job, batch, **more):
    """Build `llamafactory-cli train` on packed rows with Liger."""
    folder = job.folder / "llamafactory"
    folder.mkdir(exist_ok=True)
    datasets = {"conversations": {"file_name": str(job.folder / "conversations.jsonl")}}
    (folder / "dataset_info.json").write_text(json.dumps(datasets))
    options = {
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "model_name_or_path": str(job.folder / "model"),
        "train_from_scratch": True,
        "dataset_dir": str(folder),
        "dataset": "conversations",
        "template": "chatml",
        "cutoff_len": job.shape.sequence,
        "packing": True,
        "neat_packing": True,
        "enable_liger_kernel": True,
        "flash_attn": "auto" if job.attention == "auto" else job.attention,
        "disable_gradient_checkpointing": True,
        "output_dir": str(folder / "output"),
        "overwrite_output_dir": True,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "include_num_input_tokens_seen": True,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": job.global_batch // batch,
        "max_steps": job.steps,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "bf16": True,
        "disable_tqdm": True,
    } | more
    path = folder / f"train_{options['finetuning_type']}_{batch}.yaml"
    path.write_text(yaml.safe_dump(options))
    program = "from llamafactory.cli import main; main()"  # what llamafactory-cli runs
    return Command(
        [sys.executable, "-u", "-c", program, "train", str(path)],
        "arrivals",
        {"DISABLE_VERSION_CHECK": "1"},
        tokens_per_step=job.tokens_per_step,
        site="llamafactory",
        packages=("llamafactory", "transformers", "liger-kernel", "peft"),
    )


def llamafactory_lora(job, batch):
    """Build it with adapters."""
    return llamafactory(
        job, batch, finetuning_type="lora", lora_rank=16, lora_alpha=32, lora_target="all"
    )


CASES = {
    "megatron-lm": Case(megatron, "Megatron-LM's pretrain_gpt.py, local implementation", (2,)),
    "megatron-lm-mindspeed": Case(megatron_with_us, f"the same script and `{LINE}`", (2,)),
    "megatron-lm-mindspeed-local": Case(
        megatron_local_with_us, "the same with --transformer-impl local", (2,)
    ),
    "ms-swift": Case(swift, "ms-swift's `megatron pt` at level 2 of the adaptor", (2,)),
    "ms-swift-level-0": Case(swift_level_0, "the same at level 0", (2,)),
    "torchtitan": Case(titan, "python -m torchtitan.train --compile.enable", (2, 4), ALL),
    "torchtitan-recompute": Case(titan_recompute, "the same, every layer recomputed", (1,)),
    "hf-packed": Case(
        hf_packed, "transformers Trainer + Liger, rows packed", (2, 4), has_conversations=True
    ),
    "hf-lora": Case(
        hf_lora, "transformers Trainer + Liger + peft, rows packed", (2, 4), has_conversations=True
    ),
    "trl-packed": Case(
        trl_packed, "TRL SFTTrainer + Liger, rows packed", (2, 4), has_conversations=True
    ),
    "trl-padded": Case(
        trl_padded, "TRL SFTTrainer + Liger, padded to the longest", (4,), has_conversations=True
    ),
    "trl-lora": Case(
        trl_lora, "TRL SFTTrainer + Liger + peft, rows packed", (2, 4), has_conversations=True
    ),
    "llamafactory": Case(
        llamafactory, "llamafactory-cli train + Liger, rows packed", (2,), has_conversations=True
    ),
    "llamafactory-lora": Case(
        llamafactory_lora, "the same with LoRA", (2,), has_conversations=True
    ),
}
