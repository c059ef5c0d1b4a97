"""Our own commands: pretraining, fine-tuning, LoRA, a vision-language model, the first start."""

import os
import shutil
import site
import sys

import yaml

from commands import data
from commands.job import ROOT, Case, Command

FULL, ALL = ("1.5B", "tiny"), ("1.5B", "8B", "tiny")
RATE = ["--lr", "1e-5", "--lr-decay-style", "constant"]
VLM_LAYERS = 18
"""Of Qwen2.5-VL-3B's 36, as in bench_mm_step.py."""


def pretrain(job, batch, *flags):
    """Build the command of pretraining on full rows."""
    return Command(
        [
            *_train(job, "pretrain_gpt.py", batch, job.global_batch),
            *("--data-path", str(job.folder / "pretrain"), *flags),
        ],
        log="megatron",
    )


def deterministic(job, batch):
    """Build the same for the same bits in every run."""
    return pretrain(job, batch, "--npu-deterministic")


def recompute(job, batch, *flags):
    """Build it with every layer recomputed in backward: for long sequences."""
    full = ("--recompute-granularity", "full", "--recompute-method", "uniform")
    return pretrain(job, batch, *full, "--recompute-num-layers", "1", *flags)


def keep_attention(job, batch):
    """Build it with every layer but its attention recomputed."""
    return recompute(job, batch, "--recompute-keep-attention")


def reuse_fp32(job, batch):
    """Build it with 4 instead of 6 bytes a weight for the weights and their float32 copy."""
    return pretrain(job, batch, "--reuse-fp32-param")


def first_start(job, batch):
    """Build it with no kernel compiled before."""
    shutil.rmtree(job.folder / "caches", ignore_errors=True)
    return _with_caches(job, batch)


def second_start(job, batch):
    """Build it with the caches that the first start left."""
    return _with_caches(job, batch)


def packed(job, batch, *flags):
    """Build fine-tuning on rows that several conversations fill."""
    return _sft(job, batch, "packed", job.global_batch, *flags)


def padded(job, batch, *flags):
    """Build fine-tuning on conversations that are all padded to the longest."""
    return _sft(job, batch, "sft", job.samples_per_step, *flags)


def variable(job, batch):
    """Build it without padding."""
    return padded(job, batch, "--variable-seq-lengths")


def lora(job, batch):
    """Build fine-tuning of adapters on packed rows."""
    return packed(job, batch, "--lora-r", "16")


def vlm(job, batch):
    """Build the training of a vision-language model with FSDP2."""
    folder = job.folder / "vlm"
    side, patches = (56, 4) if job.shape_name == "tiny" else (896, 64)
    length = data.write_picture_records(job, folder, side, patches * patches // 4)
    write_vlm(job, folder / "model", side)
    processor = {"model_name_or_path": str(folder / "model"), "image_max_pixels": side * side}
    content = {
        "model": {"init_from_hf_path": str(folder / "model")},
        "data": {
            "dataset_param": {
                "preprocess_parameters": processor,
                "basic_parameters": {"dataset": str(folder / "data.json")},
            },
            "dataloader_param": {"num_workers": 0 if job.shape_name == "tiny" else 8},
        },
        "fsdp2_config": {
            "sharding_size": "auto",
            "param_dtype": "bf16",
            "reduce_dtype": "fp32",
            "sub_modules_to_wrap": ["model.visual.blocks.{*}", "model.language_model.layers.{*}"],
        },
        "training": {
            "from_scratch": True,
            "init_model_with_meta_device": True,
            "micro_batch_size": batch,
            "global_batch_size": job.global_batch,
            "train_iters": job.steps,
            "lr": 1e-5,
            "lr_decay_style": "constant",
        },
    }
    path = folder / f"run_{batch}.yaml"
    path.write_text(yaml.safe_dump(content))
    argv = [sys.executable, str(ROOT / "pretrain_transformers.py"), str(path)]
    return Command(
        argv, "megatron", tokens_per_step=job.global_batch * length, packages=("transformers",)
    )


def write_vlm(job, folder, side):
    """Write a model of Qwen2.5-VL's shape without weights, and its processor."""
    from bench_mm_step import shape as vlm_shape
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from tests.mm.processors import qwen2_5_vl_class

    is_tiny = job.shape_name == "tiny"
    words = data.tokenizer(job.shape.vocabulary)
    config = vlm_shape(2 if is_tiny else VLM_LAYERS, is_tiny)
    config.text_config.vocab_size = job.shape.vocabulary
    for key, name in (
        ("image_token_id", "image_token"),
        ("video_token_id", "video_token"),
        ("vision_start_token_id", "vision_start_token"),
    ):
        setattr(config, key, words.convert_tokens_to_ids(data.PICTURE[name]))
    config.save_pretrained(folder)
    images = Qwen2VLImageProcessorPil(
        patch_size=14, temporal_patch_size=2, merge_size=2, min_pixels=784, max_pixels=side * side
    )
    qwen2_5_vl_class()(images, words, chat_template=data.CHAT).save_pretrained(folder)


def _train(job, script, batch, global_batch):
    """Return what all our commands on language models begin with."""
    return [
        *(sys.executable, str(ROOT / script), "--hf-cfg-dir", str(job.folder / "model")),
        *("--from-scratch", "--bf16", "--seq-length", str(job.shape.sequence)),
        *("--micro-batch-size", str(batch), "--global-batch-size", str(global_batch)),
        *("--train-iters", str(job.steps), *RATE),
    ]


def _sft(job, batch, prefix, global_batch, *flags):
    start = _train(job, "posttrain_gpt.py", batch, global_batch)
    data_flags = ["--stage", "sft", "--data-path", str(job.folder / prefix)]
    return Command([*start, *data_flags, *flags], "megatron", global_batch=global_batch)


def _with_caches(job, batch):
    """Give everything that keeps compiled kernels a folder of this job's own."""
    command, caches = pretrain(job, batch), job.folder / "caches"
    names = {"HOME": "home", "XDG_CACHE_HOME": "home/.cache", "TMPDIR": "tmp"}
    names |= {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    for name in names.values():
        (caches / name).mkdir(parents=True, exist_ok=True)
    env = {key: str(caches / name) for key, name in names.items()}
    env["PYTHONUSERBASE"] = os.environ.get("PYTHONUSERBASE", site.getuserbase())
    return Command(command.argv, command.log, env)


CASES = {
    "pretrain": Case(pretrain, "pretrain_gpt.py", (2, 4), ALL),
    "pretrain-deterministic": Case(deterministic, "the same with --npu-deterministic"),
    "pretrain-recompute": Case(recompute, "the same with full recompute", (1,)),
    "pretrain-keep-attention": Case(
        keep_attention, "with full recompute that keeps attention's results", (1,)
    ),
    "pretrain-reuse-fp32": Case(reuse_fp32, "with --reuse-fp32-param", (2,)),
    "first-start": Case(first_start, "pretrain_gpt.py with empty caches", (2,), ALL),
    "second-start": Case(second_start, "the same once more", (2,), ALL),
    "sft-packed": Case(
        packed, "posttrain_gpt.py --stage sft, rows packed", (2, 4, 8), has_conversations=True
    ),
    "sft-padded": Case(
        padded, "conversations padded to the sequence length", (2,), has_conversations=True
    ),
    "sft-variable": Case(
        variable, "--variable-seq-lengths: no padding", (4, 22), has_conversations=True
    ),
    "lora-packed": Case(lora, "--lora-r 16 on packed rows", (2, 4, 8, 16), has_conversations=True),
    "vlm": Case(vlm, "pretrain_transformers.py, Qwen2.5-VL-3B's shape with 18 layers", (2,)),
}
