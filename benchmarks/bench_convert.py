"""How long does converting a 3.1 GB bf16 checkpoint take, next to writing its output with dd?

    python benchmarks/bench_convert.py [--folder DIR] [--rounds 3] [--gigabytes 3.1]

HF to TP2 PP2, durably, and a dd of as many bytes with fsync, alternately on the same disk. Prints
the ratio of the medians and the peak of anonymous memory; the source is in the page cache.
"""

import argparse
import json
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy
from record import record

ROOT = Path(__file__).resolve().parents[1]
LAYERS, HIDDEN, FFN, HEADS, GROUPS, VOCABULARY = 28, 1536, 8960, 12, 2, 151936
SHARDS = 4


def tensors(layers):
    """Yield the names and shapes of a Qwen2.5-1.5B, whose embedding is also its output layer."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    head = HIDDEN // HEADS
    for layer in range(layers):
        p = f"model.layers.{layer}."
        for name, rows in (("q", HIDDEN), ("k", GROUPS * head), ("v", GROUPS * head)):
            yield f"{p}self_attn.{name}_proj.weight", (rows, HIDDEN)
            yield f"{p}self_attn.{name}_proj.bias", (rows,)
        yield f"{p}self_attn.o_proj.weight", (HIDDEN, HIDDEN)
        yield f"{p}mlp.gate_proj.weight", (FFN, HIDDEN)
        yield f"{p}mlp.up_proj.weight", (FFN, HIDDEN)
        yield f"{p}mlp.down_proj.weight", (HIDDEN, FFN)
        yield f"{p}input_layernorm.weight", (HIDDEN,)
        yield f"{p}post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)


def write_model(folder, layers):
    """Write random bf16 weights as an HF model of several files."""
    folder.mkdir(parents=True)
    named = list(tensors(layers))
    per_file = -(-len(named) // SHARDS)
    weight_map = {}
    noise = numpy.random.default_rng(1).integers(0, 1 << 14, 1 << 24, dtype=numpy.uint16).tobytes()
    for number in range(SHARDS):
        part, header, position = named[number * per_file : (number + 1) * per_file], {}, 0
        for name, shape in part:
            size = 2 * int(numpy.prod(shape))
            span = [position, position + size]
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": span}
            position += size
        file = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        weight_map |= {name: file for name, _ in part}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # as the format's own library has it
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for start in range(0, position, len(noise)):
                out.write(noise[: position - start])
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "model_type": "qwen2",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
    }
    (folder / "config.json").write_text(json.dumps(config))


def convert(model, target):
    """Run the command; return its seconds, from start to exit, and its peak anonymous memory."""
    command = [sys.executable, str(ROOT / "convert_ckpt.py"), "--load-dir", str(model)]
    command += ["--save-dir", str(target), "--target-tensor-parallel-size", "2"]
    command += ["--target-pipeline-parallel-size", "2"]
    start, peak = time.perf_counter(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, anonymous(process.pid))
        time.sleep(0.02)
    assert process.returncode == 0, "the conversion failed"
    return time.perf_counter() - start, peak


def anonymous(pid):
    """Return the anonymous memory of a process, 0 when it has just ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) << 10
    except (OSError, IndexError):
        return 0


def dd(path, size):
    """Write as many bytes durably and return the seconds."""
    block = 16 << 20
    command = ["dd", "if=/dev/zero", f"of={path}", f"bs={block}", f"count={-(-size // block)}"]
    start = time.perf_counter()
    subprocess.run([*command, "conv=fsync"], check=True, capture_output=True)
    return time.perf_counter() - start


def measure(folder, rounds, gigabytes):
    """Measure alternately; print and record the medians."""
    embedding = 2 * VOCABULARY * HIDDEN
    layer = 2 * (2 * HIDDEN**2 + 2 * HIDDEN * GROUPS * HIDDEN // HEADS + 3 * FFN * HIDDEN)
    # An even number, for two stages.
    layers = max(2, round((gigabytes * 1e9 - embedding) / layer / 2) * 2)
    model, target = folder / "model", folder / "mcore"
    write_model(model, layers)
    source = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    times, baselines, peaks = [], [], []
    output = 0
    for _ in range(rounds):
        seconds, peak = convert(model, target)
        output = sum(path.stat().st_size for path in target.rglob("*.pt"))
        shutil.rmtree(target)
        baselines.append(dd(folder / "dd", output))
        (folder / "dd").unlink()
        times.append(seconds)
        peaks.append(peak)
    seconds, baseline = statistics.median(times), statistics.median(baselines)
    print(
        f"{source / 1e9:.2f} GB in, {output / 1e9:.2f} GB out: convert {seconds:.1f} s, "
        f"dd {baseline:.1f} s, ratio {seconds / baseline:.2f}, "
        f"anonymous memory {max(peaks) / 2**20:.0f} MiB"
    )
    row = {"in_gb": f"{source / 1e9:.2f}", "out_gb": f"{output / 1e9:.2f}"}
    row |= {"convert_s": f"{seconds:.2f}", "dd_s": f"{baseline:.2f}"}
    record("convert", [row | {"ratio": f"{seconds / baseline:.3f}", "anon_mib": max(peaks) >> 20}])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", help="a folder on the disk to measure, with 11 GB free")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gigabytes", type=float, default=3.1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        measure(Path(name), options.rounds, options.gigabytes)
