"""convert_ckpt.py as users run it: the document's command, and a machine that dies."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.llm import tiny

ROOT = Path(__file__).resolve().parents[2]

# The command of document 001; only the paths and the interpreter are this machine's.
DOCUMENT = """
export CUDA_DEVICE_MAX_CONNECTIONS=1

model_path_hf={model}
TP={tp}
PP={pp}

{python} convert_ckpt.py \\
       --use-mcore-models \\
       --model-type GPT \\
       --load-model-type hf \\
       --save-model-type mg \\
       --target-tensor-parallel-size $TP \\
       --target-pipeline-parallel-size $PP \\
       --add-qkv-bias \\
       --load-dir $model_path_hf \\
       --save-dir $model_path_hf/mcore_tp${{TP}}_pp${{PP}}/ \\
       --tokenizer-model $model_path_hf/tokenizer.json \\
       --model-type-hf llama2 \\
       --params-dtype bf16 {rest}# --num-layer-list 11,13,19,21
"""


@pytest.mark.parametrize(
    "tp, pp, rest, files", [(1, 1, "", 1), (2, 2, "--num-layer-list 1,3 ", 4)], ids=str
)
def test_the_document(tmp_path, tp, pp, rest, files):
    """A Qwen2.5 under --model-type-hf llama2, biases included."""
    model = tiny.save("qwen2", tmp_path)
    (model / "tokenizer.json").write_text("{}")
    script = DOCUMENT.format(model=model, tp=tp, pp=pp, rest=rest, python=sys.executable)
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "config.json is of family qwen2: used instead of llama2" in done.stderr
    target = model / f"mcore_tp{tp}_pp{pp}"
    assert (target / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert (target / "hf/tokenizer.json").exists()
    paths = list(target.rglob("model_optim_rng.pt"))
    assert len(paths) == files
    weights = torch.load(paths[0], weights_only=True)["model"]
    assert weights["decoder.layers.0.self_attention.linear_qkv.bias"].any()
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_help_comes_without_loading_what_it_does_not_need():
    command = [sys.executable, "-X", "importtime", "convert_ckpt.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--load-dir" in done.stdout
    for package in ("torch", "transformers", "megatron", "numpy"):
        assert f"| {package}\n" not in done.stderr.replace(" ", "").replace("|", "| ")


@pytest.fixture(scope="module")
def large_model(tmp_path_factory):
    """Return a llama of 130 MB, which takes a while to write."""
    import transformers

    folder = tmp_path_factory.mktemp("large")
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    config = transformers.LlamaConfig(vocab_size=8000, num_attention_heads=8, **sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    tensors = {name: torch.zeros(t.shape) + 0.5 for name, t in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    return folder


def _stop_inside_a_save(command, target, number):
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    # At its beginning: on a fast disk there is not much time between the first file and the last.
    while process.poll() is None and not any(target.glob(".iter_0000001.incomplete-*")):
        time.sleep(0.001)
    process.send_signal(number)
    _, errors = process.communicate(timeout=240)
    return process.returncode, errors


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_death_leaves_nothing_under_a_final_name(large_model, tmp_path, number):
    target = tmp_path / "out"
    command = [sys.executable, str(ROOT / "convert_ckpt.py"), "--load-dir", str(large_model)]
    command += ["--save-dir", str(target), "--target-pipeline-parallel-size", "2"]
    for _ in range(20):  # on a busy machine it may be done before the signal comes
        shutil.rmtree(target, ignore_errors=True)
        code, errors = _stop_inside_a_save(command, target, number)
        if code:
            break
    assert code in (-signal.SIGKILL, 130) and "Traceback" not in errors, errors
    left = [path.name for path in target.iterdir()] if target.exists() else []
    assert all(name.startswith(".iter_0000001.incomplete-") for name in left)
    assert number == signal.SIGKILL or not left
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in target.iterdir())
    assert names == ["hf", "iter_0000001", "latest_checkpointed_iteration.txt"]


@pytest.mark.parametrize("header", ["even", "odd"])
def test_memory_does_not_grow_with_the_model(large_model, tmp_path, header):
    """Anonymous memory, beyond that of importing torch, is a few buffers for 130 MB of weights."""
    model = shutil.copytree(large_model, tmp_path / "model")
    if header == "odd":
        lengthen_header(model / "model.safetensors")
    script = tmp_path / "measure.py"
    script.write_text(MEASURE)
    command = [sys.executable, str(script), str(model), str(tmp_path / "out")]
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 64 << 20, f"{int(done.stdout) >> 20} MiB"


def lengthen_header(path):
    """Put a space behind the header, so that no number lies where a processor wants it."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, numbers = content[8 : 8 + length], content[8 + length :]
    path.write_bytes((length + 1).to_bytes(8, "little") + header + b" " + numbers)


MEASURE = """
import sys
from pathlib import Path

from mindspeed_llm.checkpoint import ConvertOptions
from mindspeed_llm.checkpoint.conversion import convert


def anonymous():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10


peak = before = anonymous()


def look(size, total):
    global peak
    peak = max(peak, anonymous())


sizes = {"target_tensor_parallel_size": 2, "target_pipeline_parallel_size": 2}
convert(ConvertOptions(load_dir=sys.argv[1], save_dir=sys.argv[2], **sizes), look)
print(peak - before)
"""
