"""How much host memory does a rank take to start from a Hugging Face folder?

    python benchmarks/bench_mm_startup.py [--ranks 2 4] [--layers 8] [--folder DIR]

Writes a model of the shape of Qwen2.5-VL-3B (all of its vision tower, fewer text layers) in
bfloat16, and lets ranks start a run of `mindspeed-mm train` from the meta device, weights in
float32. The peak is anonymous memory, above what the process had before the model: pages of the
files are the system's, which takes them back. The limit is 1.2 x the rank's shard + the largest
tensor. Prints and records.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from bench_mm_step import shape
from record import record

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
FILE_BYTES = 1 << 30


def write_model(folder, layers, is_tiny):
    """Write random weights in files of about a gigabyte, without ever having the model."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen2_5_VLForConditionalGeneration

    config = shape(layers, is_tiny)
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(config)
    files, size = [{}], 0
    for name, parameter in model.named_parameters():  # of tied ones the first
        if size > FILE_BYTES:
            files, size = [*files, {}], 0
        files[-1][name] = parameter.shape
        size += 2 * parameter.numel()
    places = {}
    for number, shapes in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        save_file(
            {name: torch.randn(size).mul_(0.02).bfloat16() for name, size in shapes.items()},
            folder / file,
        )
        places |= dict.fromkeys(shapes, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def anonymous():
    """Return the bytes of this process that no file stands behind."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10


def start(folder, layers, is_tiny):
    """Be a rank: start a run and write down what that took."""
    sys.path.insert(0, str(ROOT))
    import torch.distributed as dist

    import mindspeed.megatron_adaptor  # noqa: F401
    from mindspeed import device
    from mindspeed.distributed.process_groups import init_distributed
    from mindspeed.fsdp import FsdpOptions
    from mindspeed_mm.models.options import ModelConfig
    from mindspeed_mm.training import transformers_task as task
    from mindspeed_mm.training.arguments import Run, Sections
    from mindspeed_mm.training.options import MmOptions
    from mindspeed_mm.training.setup import prepare

    options = MmOptions(train_iters=1, lr=1e-5, init_model_with_meta_device=True)
    wrapped = ("model.visual.blocks.{*}", "model.language_model.layers.{*}")
    fsdp = FsdpOptions(sharding_size="auto", sub_modules_to_wrap=wrapped)
    # What a process loads, and groups set aside, it does for any model.
    import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl  # noqa: F401

    init_distributed(device.current(), timeout_minutes=options.distributed_timeout_minutes)
    dist.barrier()
    before, highest, done = anonymous(), [0], threading.Event()

    def watch():
        while not done.wait(0.002):
            highest[0] = max(highest[0], anonymous())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    began = time.perf_counter()
    sections = Sections(model=ModelConfig(init_from_hf_path=str(folder)))
    model = prepare(Run(options, fsdp, sections), task.callbacks()).model
    seconds = time.perf_counter() - began
    done.set()
    watcher.join()
    sizes = [p.numel() * p.element_size() for p in model.parameters()]
    shard = sum(p.to_local().nbytes for p in model.parameters())
    own = (highest[0] - before, shard, max(sizes), sum(sizes), seconds)
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    if dist.get_rank() == 0:
        (folder / "measured.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure(folder, ranks, layers, is_tiny):
    """Let ranks start; return the row of the one that came nearest to its limit."""
    own = [__file__, "--work", "--folder", str(folder), "--layers", str(layers)]
    command = [sys.executable, "-m", "mindspeed", "run", "--nproc", str(ranks), *own]
    subprocess.run([*command, *(["--tiny"] if is_tiny else [])], check=True, cwd=ROOT)
    found = json.loads((folder / "measured.json").read_text())
    rows = [
        {
            "ranks": ranks,
            "layers": layers,
            "model_gib": round(whole / GIB, 3),
            "shard_gib": round(shard / GIB, 3),
            "largest_tensor_gib": round(largest / GIB, 3),
            "peak_gib": round(peak / GIB, 3),
            "limit_gib": round((1.2 * shard + largest) / GIB, 3),
            "peak_over_limit": round(peak / (1.2 * shard + largest), 3),
            "peak_over_shard": round(peak / shard, 3),
            "seconds": round(seconds, 1),
        }
        for peak, shard, largest, whole, seconds in found
    ]
    return max(rows, key=lambda row: row["peak_over_limit"])


def main():
    """Write the model, measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--layers", type=int, default=8, help="text layers (3B has 36)")
    parser.add_argument("--folder", help="where to write the model (default: a temporary folder)")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        start(Path(options.folder), options.layers, options.tiny)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        write_model(folder, options.layers, options.tiny)
        rows = [measure(folder, ranks, options.layers, options.tiny) for ranks in options.ranks]
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if not options.tiny:
        record("mm_startup", rows)


if __name__ == "__main__":
    main()
