"""How long is a step of a vision-language model, next to loops written by hand?

    python benchmarks/bench_mm_step.py [--layers 18] [--rounds 4] [--against plain] [--tiny]

Processes train a model of the shape of Qwen2.5-VL-3B (all of its vision tower, as many text layers
as let two models share the device) on pictures and text, with FSDP2, bf16 and AdamW on fp32
weights. `mindspeed-mm train`'s own steps alternate with a hand-written loop on transformers and
torch's fully_shard with the same fused operators, then with the same loop without them. Prints and
records seconds, peak memory and the ratio to ours in the same rounds, peer by peer; losses must be
close, or there is no result.
"""

import argparse
import itertools
import os
import statistics
import sys
import tempfile
from pathlib import Path

from record import record
from workers import Worker, serve

ROOT = Path(__file__).resolve().parents[1]
IMAGE, START, VOCABULARY = 151655, 151652, 151936
OURS, FUSED, PLAIN = "ours", "hand, fused", "hand, plain"
BASELINES = {"fused": FUSED, "plain": PLAIN}
STEPS, WARM_UP, BATCHES, RATE, EPS, CLIP = 3, 3, 32, 1e-5, 1e-8, 1.0


def shape(layers, is_tiny):
    """Return the configuration of the model as transformers' own object."""
    from transformers import Qwen2_5_VLConfig

    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256 if is_tiny else 2048,
        "intermediate_size": 512 if is_tiny else 11008,
        "num_hidden_layers": layers,
        "num_attention_heads": 2 if is_tiny else 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [16, 24, 24],
            "rope_theta": 1e6,
        },
        "tie_word_embeddings": True,
    }
    vision = {
        "depth": 2 if is_tiny else 32,
        "hidden_size": 128 if is_tiny else 1280,
        "intermediate_size": 256 if is_tiny else 3420,
        "num_heads": 2 if is_tiny else 16,
        "out_hidden_size": text["hidden_size"],
        "fullatt_block_indexes": [1] if is_tiny else [7, 15, 23, 31],
        "window_size": 112,
    }
    ids = {"image_token_id": IMAGE, "video_token_id": 151656, "vision_start_token_id": START}
    config = Qwen2_5_VLConfig(**ids, text_config=text, vision_config=vision)
    config.tie_word_embeddings = True
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    return config


def batches(is_tiny, device):
    """Give batch after batch: two sequences, each with one picture, the same in every process.

    They are ready on the device, as a loader's workers would have made them meanwhile.
    """
    import torch

    length, side = (64, 8) if is_tiny else (4096, 64)
    pictures = side * side // 4
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(2 * side * side, 1176, generator=generator).to(device)
    ready = []
    for _ in range(BATCHES):
        tokens = torch.randint(0, 150000, (2, length), generator=generator)
        tokens[:, 1] = START
        tokens[:, 2 : 2 + pictures] = IMAGE
        labels = tokens.clone()
        labels[:, : 2 + pictures] = -100
        ready.append(
            {
                "input_ids": tokens.to(device),
                "attention_mask": torch.ones_like(tokens).to(device),
                "labels": labels.to(device),
                "pixel_values": pixels,
                "image_grid_thw": torch.tensor([[1, side, side]] * 2, device=device),
                "mm_token_type_ids": (tokens == IMAGE).int().to(device),
            }
        )
    return map(dict, itertools.cycle(ready))  # copies: a step may take things out


def our_step(config, is_tiny):
    """Return what runs the next step of our loop."""
    import mindspeed.megatron_adaptor  # noqa: F401
    from mindspeed import device
    from mindspeed.fsdp import FsdpOptions
    from mindspeed_mm.models.options import ModelConfig
    from mindspeed_mm.training import transformers_task as task
    from mindspeed_mm.training.arguments import Run, Sections
    from mindspeed_mm.training.callbacks import Callbacks
    from mindspeed_mm.training.options import MmOptions
    from mindspeed_mm.training.setup import prepare
    from mindspeed_mm.training.trainer import FsdpTrainer

    folder = tempfile.mkdtemp()
    config.save_pretrained(folder)
    options = MmOptions(
        train_iters=1000000,
        micro_batch_size=2,
        lr=RATE,
        lr_decay_style="constant",
        weight_decay=0.0,
        clip_grad=CLIP,
        adam_eps=EPS,
        from_scratch=True,
        init_model_with_meta_device=True,
        log_interval=1000000,
    )
    fsdp = FsdpOptions(
        sharding_size="auto",
        param_dtype="bf16",
        reduce_dtype="fp32",
        sub_modules_to_wrap=("model.visual.blocks.{*}", "model.language_model.layers.{*}"),
    )
    model = ModelConfig(init_from_hf_path=folder)
    data = batches(is_tiny, device.current().torch_device)
    callbacks = Callbacks(
        task.model_provider, lambda: (Endless(data), None, None), task.forward_step
    )
    setup = prepare(Run(options, fsdp, Sections(model=model)), callbacks)
    trainer, state = FsdpTrainer(setup, callbacks), setup.state

    def step():
        nonlocal state
        state, result = trainer.loop.step(trainer, state)
        return result.metrics["loss"]

    return step


class Endless:
    """A loader that never ends."""

    batch_size = 2

    def __init__(self, data):
        self._data = data

    def __iter__(self):
        return self._data

    def __len__(self):
        return 1000000


def hand_step(config, is_tiny, is_fused):
    """Return what runs the next step of a loop that a user would write."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import Qwen2_5_VLForConditionalGeneration

    import mindspeed.megatron_adaptor  # noqa: F401
    from mindspeed import device
    from mindspeed.ops.cross_entropy import cross_entropy
    from mindspeed_mm.models.fused_ops import fuse

    here = device.current()
    torch.distributed.init_process_group(here.backend, device_id=None)
    with torch.device(here.torch_device):
        model = Qwen2_5_VLForConditionalGeneration(config)
    if is_fused:
        fuse(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (*model.model.visual.blocks, *model.model.language_model.layers, model):
        fully_shard(layer, mp_policy=policy)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, eps=EPS, weight_decay=0.0, fused=not is_tiny
    )
    data = batches(is_tiny, here.torch_device)

    def step():
        batch = next(data)
        if is_fused:
            targets = torch.nn.functional.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
            logits = model(**batch, use_cache=False).logits
            losses = cross_entropy(logits, targets, ignore_index=-100)
            loss = losses.sum() / (targets != -100).sum()
        else:
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def work(options):
    """Be one of the processes."""
    sys.path.insert(0, str(ROOT))
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    config = shape(options.layers, options.tiny)
    if options.work == OURS:
        step = our_step(config, options.tiny)
    else:
        step = hand_step(config, options.tiny, options.work == FUSED)
    serve(step, STEPS, WARM_UP)


def start(peer, options):
    """Start a process and let it take its first steps."""
    command = [__file__, "--layers", str(options.layers), *(["--tiny"] if options.tiny else [])]
    worker = Worker(*command, "--work", peer)
    if not worker.warm_up():
        sys.exit(f"{peer} could not run; see its output above")
    return worker


def compare(ours, other, options):
    """Run ours and a peer alternately; return a row of each."""
    rival = start(other, options)
    found = {OURS: [], other: []}
    for _ in range(options.rounds):
        for peer, worker in ((OURS, ours), (other, rival)):
            found[peer].append(worker.measure())
    rival.end()
    base = statistics.median(result["seconds"] for result in found[OURS])
    return [
        row(peer, results, base) | {"against": other, "layers": options.layers}
        for peer, results in found.items()
    ]


def row(peer, results, base):
    """Return median, spread, memory, and the ratio to ours in the same rounds."""
    seconds = [result["seconds"] for result in results]
    return {
        "peer": peer,
        "milliseconds": round(1000 * statistics.median(seconds), 1),
        "fastest": round(1000 * min(seconds), 1),
        "slowest": round(1000 * max(seconds), 1),
        "peak_gib": round(max(result["peak_gib"] for result in results), 2),
        "times_ours": round(statistics.median(seconds) / base, 3),
        "last_loss": round(results[-1]["last"], 4),
    }


def main():
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=18, help="text layers (3B has 36)")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script")
    parser.add_argument("--against", choices=BASELINES, help="one baseline only")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options)
        return
    ours = start(OURS, options)
    for other in [BASELINES[options.against]] if options.against else BASELINES.values():
        found = compare(ours, other, options)
        for each in found:
            print("  ".join(f"{name} {value}" for name, value in each.items()), flush=True)
        losses = [each["last_loss"] for each in found]
        if max(losses) - min(losses) > 0.2:  # they begin with other random numbers
            sys.exit(f"the last losses differ, so these were not the same steps: {losses}")
        if not options.tiny:
            record("mm_step", found)
    ours.end()


if __name__ == "__main__":
    main()
