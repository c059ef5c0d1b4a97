"""The guide's way from data to a talking model, by mindspeed_llm's example scripts."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from mindspeed_llm.tasks.posttrain import launcher
from tests.small_tokenizers import byte_level
from tests.sockets import free_ports

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "mcore" / "qwen25"
RECORD = {"instruction": "Add.", "input": "1 2", "output": "3"}

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Make a model, data, and a working directory in which the commands are found."""
    folder = tmp_path_factory.mktemp("work")
    for script in ROOT.glob("*.py"):
        shutil.copy(script, folder)
    tokenizer = byte_level()
    tokenizer.save_pretrained(folder / "hf")
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=tokenizer.eos_token_id,
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder / "hf")
    (folder / "data.jsonl").write_text((json.dumps(RECORD) + "\n") * 8)
    return folder


GUIDE = """
from mindspeed_llm import megatron_adaptor
from mindspeed_llm.tasks.posttrain.launcher import AutoTrainer


def launch():
    trainer = AutoTrainer()
    trainer.train()

if __name__ == '__main__':
    launch()
"""


def run(folder, script, stdin="", **settings):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(SCRIPTS / script)],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **settings},
        input=stdin,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_from_data_to_a_talking_model(place):
    said = run(
        place,
        "data_convert_qwen25_instruction.sh",
        INPUT="data.jsonl",
        TOKENIZER_PATH="hf",
        OUTPUT_PREFIX="dataset/data",
        SEQ_LEN="128",
    )
    assert "8 in = 8 written + 0 skipped" in said
    run(place, "ckpt_convert_qwen25_hf2mcore.sh", HF_DIR="hf")
    run(
        place,
        "tune_qwen25_7b_4k_full_ptd.sh",
        NPUS_PER_NODE="2",
        MASTER_PORT=str(free_ports()),
        CKPT_LOAD_DIR="hf/mcore_tp1_pp1/",
        CKPT_SAVE_DIR="hf/mcore_tp1_pp1/ckpt",
        DATA_PATH="dataset/data",
        TOKENIZER_PATH="hf",
        TP="2",  # another layout than the conversion's
        SEQ_LEN="128",
        TRAIN_ITERS="3",
    )
    log = (place / "logs" / "tune_mcore_qwen25_7b_full.log").read_text()
    assert "iteration        3/       3" in log
    run(place, "ckpt_convert_qwen25_mcore2hf.sh", CKPT_DIR="hf/mcore_tp1_pp1/ckpt", HF_DIR="tuned")
    assert transformers.AutoModelForCausalLM.from_pretrained(place / "tuned").num_parameters() > 0
    said = run(
        place,
        "chat_qwen25_7b_ptd.sh",
        stdin="Add. 1 2\nclear\nAdd. 1 2\nq\n",
        CKPT_DIR="tuned",
        MAX_NEW_TOKENS="4",
    )
    assert said.strip()


def test_the_guides_trainers():
    names = (
        "SFTTrainer",
        "DPOTrainer",
        "ORMTrainer",
        "PRMTrainer",
        "SimPOTrainer",
        "TrlPPOTrainer",
    )
    stages = ("sft", "dpo", "orm", "prm", "simpo", "trl_ppo")
    assert [launcher.TRAINERS[stage].__name__ for stage in stages] == list(names)
    assert all(hasattr(launcher, name) for name in names)


def test_the_guides_own_entry_script(place):
    (place / "guide.py").write_text(GUIDE)
    words = "--load hf --data-path data.jsonl --prompt-type qwen --train-iters 2 --lr 1e-3"

    def launch(stage):
        return subprocess.run(
            [sys.executable, "guide.py", "--stage", stage, *words.split(), "--cache-dir", "cache"],
            cwd=place,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )

    done = launch("sft")
    assert done.returncode == 0, done.stderr
    assert "iteration        2/       2" in done.stdout
    assert "no --save was given" in done.stdout
    failed = launch("sfft")
    assert failed.returncode == 2
    assert failed.stderr == "guide.py: error: --stage sfft is not known; did you mean sft?\n"
