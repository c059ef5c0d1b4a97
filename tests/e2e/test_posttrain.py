"""posttrain_gpt.py and pretrain_gpt.py as commands: killed, stopped, resumed, misused."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from mindspeed_llm.data.indexed import TokenWriter
from mindspeed_llm.data.options import PreprocessOptions
from mindspeed_llm.data.preprocess import preprocess
from tests.commands import run_command
from tests.small_tokenizers import byte_level
from tests.sockets import descendants
from tests.unit.mindspeed_llm.training.tiny_run import (
    VOCABULARY,
    make_model,
    make_samples,
    read_checkpoint,
    read_losses,
    write_samples,
)

ROOT = Path(__file__).resolve().parents[2]
STEPS = 24  # most of them after the last kill, which may come late on a busy machine
PATIENCE = 500
"""Seconds; a busy machine takes a minute to import torch in two ranks."""

pytestmark = pytest.mark.timeout(4 * PATIENCE)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    model = make_model(folder / "hf")
    data = write_samples(folder / "data", make_samples(30))
    return f"--load {model} --data-path {data} --lr 1e-3 --lr-decay-style cosine".split()


def _start(script: str, *flags: str, nproc: int = 1, dies: bool = False) -> subprocess.Popen[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    # Under torchrun ranks outlive a launcher that is killed until their next step; these do not.
    ranks = ["-m", "mindspeed", "run", "--nproc", str(nproc)] if dies else torchrun
    return subprocess.Popen(
        [sys.executable, *(ranks if nproc > 1 else []), str(ROOT / script), *flags],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _run(script: str, *flags: str, nproc: int = 1) -> tuple[int, str]:
    """Run a command to its end, in processes that have imported what it needs."""
    return run_command("python", script, *flags, nproc=nproc, timeout=PATIENCE)


def _run_apart(script: str, *flags: str) -> tuple[int, str]:
    process = _start(script, *flags)
    output, _ = process.communicate(timeout=PATIENCE)
    return process.returncode, output


def _wait_for(log: Path, lines: int, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + PATIENCE
    while not (log.is_file() and log.read_text().count("\n") >= lines):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_killed_run_goes_on_to_the_same_bits(inputs: list[str], tmp_path: Path) -> None:
    """Two ranks, killed at a moment that may lie inside a save; the drill does it repeatedly."""
    flags = [*inputs, "--train-iters", str(STEPS), "--global-batch-size", "4"]
    flags += "--save-interval 2 --keep-last 2 --use-distributed-optimizer".split()
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    traces = f"--profile --profile-step-start 2 --profile-step-end 4 --profile-save-path {tmp_path}"
    code, output = _run("posttrain_gpt.py", *flags, *traces.split(), "--save", str(whole), nproc=2)
    assert {f"trace_rank{rank}_step4.json" for rank in (0, 1)} <= set(os.listdir(tmp_path))
    assert code == 0, output
    process = _start("posttrain_gpt.py", *flags, "--save", str(broken), nproc=2, dies=True)
    _wait_for(broken / "log.jsonl", 5, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert len(read_losses(str(broken / "log.jsonl"))) < STEPS, "killed too late"
    code, output = _run("posttrain_gpt.py", *flags, "--save", str(broken), nproc=2)
    assert code == 0 and "resuming after iteration" in output, output
    assert read_losses(str(broken / "log.jsonl")) == read_losses(str(whole / "log.jsonl"))
    expected, found = read_checkpoint(whole), read_checkpoint(broken)
    assert expected.keys() == found.keys() and any("exp_avg" in name for name in found)
    for name, values in expected.items():
        assert torch.equal(values, found[name]), name
    assert sorted(p.name for p in broken.glob("iter_*")) == ["iter_0000022", "iter_0000024"]


def test_sigterm_saves_and_another_layout_goes_on(inputs: list[str], tmp_path: Path) -> None:
    flags = [*inputs, "--train-iters", "30", "--global-batch-size", "4"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    code, output = _run("posttrain_gpt.py", *flags, "--save", str(whole))
    assert code == 0, output
    process = _start("posttrain_gpt.py", *flags, "--save", str(stopped))
    _wait_for(stopped / "log.jsonl", 3, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert re.search(r"asked to stop after iteration \d+ of 30; saved in", output), output
    done = len(read_losses(str(stopped / "log.jsonl")))
    assert 3 <= done < 30
    layout = "--tensor-model-parallel-size 2 --sequence-parallel".split()
    code, output = _run("posttrain_gpt.py", *flags, *layout, "--save", str(stopped), nproc=2)
    assert code == 0 and f"resuming after iteration {done}" in output, output
    expected = read_losses(str(whole / "log.jsonl"))
    assert read_losses(str(stopped / "log.jsonl")) == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize(("launcher", "how"), [("mindspeed", "async"), ("torchrun", "sync")])
def test_a_signal_for_all_processes_saves_the_last_step(
    inputs: list[str], tmp_path: Path, launcher: str, how: str
) -> None:
    """As schedulers stop a job: the launcher, the store, ranks and writers get the signal."""
    flags = [*inputs, "--train-iters", "4000", "--save", str(tmp_path), "--save-interval", "2"]
    flags += ["--async-save"] if how == "async" else []
    process = _start("posttrain_gpt.py", *flags, nproc=2, dies=launcher == "mindspeed")
    _wait_for(tmp_path / "latest_checkpointed_iteration.txt", 1, process)
    for pid in descendants(process.pid):
        with suppress(ProcessLookupError):  # a writer that is done
            os.kill(pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE)
    expected = 128 + signal.SIGTERM if launcher == "mindspeed" else 1  # torchrun's own
    assert process.returncode == expected and "asked to stop after iteration" in output, output
    done = len(read_losses(str(tmp_path / "log.jsonl")))
    assert int((tmp_path / "latest_checkpointed_iteration.txt").read_text()) == done


def test_nothing_is_left_of_a_killed_rank(inputs: list[str], tmp_path: Path) -> None:
    flags = [*inputs, "--train-iters", "4000", "--save", str(tmp_path), "--save-interval", "2"]
    process = _start("posttrain_gpt.py", *flags)
    _wait_for(tmp_path / "latest_checkpointed_iteration.txt", 1, process)
    process.kill()
    process.communicate(timeout=60)  # whatever is left would hold the other end of the pipe


def _lm_losses(output: str) -> list[float]:
    return [
        float(line.split("lm loss: ")[1].split()[0])
        for line in output.splitlines()
        if " iteration " in line and "| lm loss: " in line
    ]


FUSED = """
--use-flash-attn --use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb
--linear-cross-entropy --optimizer-selection fused_ema_adamw --ema-decay 0.9 --op-cal-tflops
"""


def test_pretraining_learns_a_repeated_text_with_every_fused_operator(tmp_path: Path) -> None:
    writer = TokenWriter(tmp_path, "text", np.dtype("<u2"))
    text = np.random.default_rng(0).integers(0, VOCABULARY, 32)
    writer.append(np.tile(text, 40), np.full(40, 32))
    writer.build_index(tmp_path / "books_text_document.idx")
    (tmp_path / "text.bin").rename(tmp_path / "books_text_document.bin")
    flags = f"--data-path {tmp_path}/books --save {tmp_path}/saved --seq-length 32 --from-scratch"
    flags += " --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4"
    flags += f" --vocab-size {VOCABULARY} --lr 1e-2 --train-iters 30 --global-batch-size 4"
    flags += " --split 90,10,0 --eval-interval 30 --eval-iters 1 --log-interval 10"
    code, output = _run_apart("pretrain_gpt.py", *flags.split(), *FUSED.split())
    assert code == 0, output
    assert "model throughput per GPU (TFLOP/s/GPU): " in output
    assert "lm loss is the mean over micro-batches" in output
    assert "| validation lm loss: " in output
    losses = _lm_losses(output)
    assert len(losses) == 3 and losses[-1] < 0.3 * losses[0]


def test_pretraining_on_separate_documents_with_split_sequences(tmp_path: Path) -> None:
    """The losses of two ranks a sequence are those of one rank; rows do not divide by them."""
    texts = [f"{'abcdefgh'[n % 8] * (5 + 7 * n % 23)} {n}" for n in range(40)]
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    byte_level().save_pretrained(tmp_path / "tokenizer")
    options = PreprocessOptions(
        input=f"{tmp_path}/texts.jsonl",
        output_prefix=f"{tmp_path}/books",
        tokenizer_name_or_path=f"{tmp_path}/tokenizer",
        cache_dir=f"{tmp_path}/cache",
        append_eod=True,
    )
    preprocess(options)
    flags = f"--data-path {tmp_path}/books --seq-length 51 --from-scratch --train-iters 3"
    flags += " --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4"
    flags += " --vocab-size 512 --lr 1e-3 --global-batch-size 2 --reset-attention-mask"
    flags += " --reset-position-ids --balance-packs"
    losses = []
    for cp in (1, 2):
        layout = ["--context-parallel-size", str(cp), "--log-file", f"{tmp_path}/{cp}.jsonl"]
        code, output = _run("pretrain_gpt.py", *flags.split(), *layout, nproc=cp)
        assert code == 0 and "preprocess with --append-eod" not in output, output
        losses.append(read_losses(f"{tmp_path}/{cp}.jsonl"))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6) and len(losses[0]) == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("--load /nowhere", "/nowhere: does not exist"),
        ("--num-layers 5 --hidden-size 32", "--num-layers 5 (the model has 4)"),
        ("--stage sfd", "did you mean sft"),
        ("--seq-length 8", "samples are longer than --seq-length 8"),
        ("--tensor-model-parallel-size 2", "1 rank(s) cannot hold"),
        ("--global-batch-size 3 --micro-batch-size 2", "is not a multiple of 2"),
        ("--context-parallel-algo ring", "megatron_cp_algo"),
        ("--balance-packs", "rows of one length all have the same attention"),
    ],
)
def test_misuse_is_one_line_and_leaves_nothing(
    inputs: list[str], tmp_path: Path, changes: str, words: str
) -> None:
    flags = [*inputs, "--train-iters", "1", "--save", str(tmp_path / "saved")]
    code, output = _run("posttrain_gpt.py", *flags, *changes.split())
    assert code == 2, output
    assert words in output and "Traceback" not in output
    assert not list(tmp_path.iterdir())


def test_misuse_of_the_script_itself(tmp_path: Path) -> None:
    code, output = _run_apart("posttrain_gpt.py", "--load", str(tmp_path / "none"))
    assert code == 2 and output.count("\n") == 1 and "Traceback" not in output


def test_the_python_of_the_page_logs_as_the_command_does(tmp_path: Path) -> None:
    page = (ROOT / "docs/llm/train.md").read_text()
    (script,) = re.findall(r"^```python\n(from .*?)^```", page, re.MULTILINE | re.DOTALL)
    assert "train_iters=100" in script
    (tmp_path / "train.py").write_text(script.replace("train_iters=100", "train_iters=2"))
    make_model(tmp_path / "model")
    write_samples(tmp_path / "out/identity", make_samples(4))
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert "weights from model" in done.stdout
    assert re.search(r"iteration +2/ +2 .* lm loss: ", done.stdout)
