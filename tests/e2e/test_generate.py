"""inference.py as a command: prompts from a file, a conversation through a pipe, Ctrl-C, misuse."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mindspeed_llm.cli.main import main
from tests.commands import run_command
from tests.small_tokenizers import byte_level
from tests.unit.mindspeed_llm.training.tiny_run import make_model, make_samples, write_samples

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 300
QUESTIONS = ("Who are you?", "How much is 12 + 30?", "naïve 你好")

pytestmark = pytest.mark.timeout(4 * PATIENCE)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """Save a random model with a tokenizer whose end is never the best token."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_level()
    make_model(folder, vocab_size=len(tokenizer) + 3, max_position_embeddings=512)
    tokenizer.save_pretrained(folder)
    return str(folder)


def start(*flags: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(ROOT / "inference.py"), *flags],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*flags: str, said: str = "") -> tuple[int, str, str]:
    process = start(*flags)
    output, errors = process.communicate(said, timeout=PATIENCE)
    return process.returncode, output, errors


def expected(model: str, *texts: str, count: int) -> str:
    """Return what transformers says to texts, of which each is encoded by itself."""
    from transformers import AutoModelForCausalLM

    tokenizer = byte_level()
    ids = torch.tensor([[one for text in texts for one in tokenizer(text)["input_ids"]]])
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ended = tokenizer.eos_token_id
    output = reference.generate(
        ids, do_sample=False, max_new_tokens=count, eos_token_id=ended, pad_token_id=ended
    )
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def asks(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def test_a_file_of_prompts_on_two_ranks(model, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in QUESTIONS))
    output = tmp_path / "answers.jsonl"
    flags = f"inference.py --load {model} --prompts {prompts} --output {output}"
    flags += " --task greedy beam_search --num-beams 1 --max-new-tokens 9 --batch-size 2"
    flags += " --tensor-model-parallel-size 2"
    code, printed = run_command("python", *flags.split(), nproc=2)
    assert code == 0 and re.search(r"^54 tokens in .* tokens/s$", printed, re.MULTILINE), printed
    assert not any(text in printed for text in QUESTIONS)
    records = [json.loads(line) for line in output.read_text().splitlines()]
    wanted = [(text, expected(model, text, count=9)) for text in QUESTIONS]
    assert [(one["prompt"], one["text"]) for one in records] == wanted * 2
    assert [one["task"] for one in records] == ["greedy"] * 3 + ["beam_search"] * 3
    assert all(one["end"] == "length" and one["tokens"] == 9 for one in records)


def test_a_conversation_through_a_pipe(model):
    flags = f"--task chat --load {model} --prompt-type chatml --temperature 0 --max-new-tokens 8"
    said = "Who are you?\nAnd why?\nclear\nWho are you?\nq\nnever read\n"
    code, output, errors = run(*flags.split(), "--system", "Be brief.", said=said)
    assert code == 0, errors
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n" + asks("Who are you?")
    first = expected(model, prompt, count=8)
    second = expected(model, prompt, f"{first}<|im_end|>\n{asks('And why?')}", count=8)
    parts = output.split("You >> ")[1:]
    assert parts == [
        f"Who are you?\nModel >> {first}\n",
        f"And why?\nModel >> {second}\n",
        "clear\n(forgotten)\n",
        f"Who are you?\nModel >> {first}\n",
        "q\n",
    ]


def test_old_turns_make_way_and_questions_can_be_too_long(model):
    flags = f"chat --load {model} --prompt-type chatml --temperature 0 --max-new-tokens 8"
    said = f"a\nb\n{'x ' * 60}\n"
    code, output = run_command("mindspeed-llm", *flags.split(), "--max-length", "36", said=said)
    assert code == 0, output
    assert "(too long: the 1 oldest turn(s) were dropped)" in output
    assert "there may be 36: shorten it" in output


def test_ctrl_c_stops_the_answer_only(model):
    flags = f"--task chat --load {model} --prompt-type chatml --max-new-tokens 400"
    process = start(*flags.split())
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("Who are you?\n")
    process.stdin.flush()
    printed = ""
    while "Model >> " not in printed or printed.endswith(">> "):
        piece = process.stdout.read(1)
        assert piece, process.communicate()[1]
        printed += piece
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate("Still there?\nq\n", timeout=PATIENCE)
    assert process.returncode == 0, errors
    answered, _, rest = output.partition(" (stopped)\n")
    assert rest.startswith("You >> Still there?\nModel >> ") and rest.endswith("You >> q\n")


def test_a_training_checkpoint_answers_like_its_model(model, tmp_path):
    data = write_samples(tmp_path / "data", make_samples(4))
    trained = f"posttrain --load {model} --data-path {data} --save {tmp_path}/saved --lr 1e-30"
    code, output = run_command("mindspeed-llm", *trained.split(), "--train-iters", "1")
    assert code == 0, output
    flags = f"--load {tmp_path}/saved --tokenizer-name-or-path {model} --max-new-tokens 6"
    code, output, errors = run(*flags.split(), "--prompt", QUESTIONS[0])
    assert code == 0, errors
    assert output == f"[greedy] {QUESTIONS[0]}\n{expected(model, QUESTIONS[0], count=6)}\n\n"


def test_a_checkpoint_with_adapters_answers_like_the_merged_model(model, tmp_path):
    data = write_samples(tmp_path / "data", make_samples(4))
    trained = f"posttrain --load {model} --data-path {data} --save {tmp_path}/saved --lr 0.05"
    code, output = run_command(
        "mindspeed-llm", *trained.split(), "--train-iters", "2", "--lora-r", "2"
    )
    assert code == 0, output
    assert main(["export-lora", f"{tmp_path}/saved", f"{tmp_path}/merged", "--merge"]) == 0
    flags = f"--load {tmp_path}/saved --tokenizer-name-or-path {model} --max-new-tokens 6"
    code, output, errors = run(*flags.split(), "--prompt", QUESTIONS[0])
    assert code == 0, errors
    answer = expected(f"{tmp_path}/merged", QUESTIONS[0], count=6)
    assert output == f"[greedy] {QUESTIONS[0]}\n{answer}\n\n"
    assert answer != expected(model, QUESTIONS[0], count=6), "the adapters change nothing"


WRONG = [
    ("", "--load is missing"),
    ("--load /nowhere", "/nowhere: does not exist"),
    ("--load {empty} --prompt a", "holds no weights"),
    ("--load {bare} --prompt a", "--tokenizer-name-or-path {bare}"),
    ("--load {model} --prompt a --prompt-type chatm", "did you mean chatml"),
    ("--load {model} --task chat", "has no chat template: give --prompt-type"),
    ("--load {model} --task greedy", "give --prompt or --prompts"),
    ("--load {model} --prompts /nowhere.txt", "--prompts /nowhere.txt cannot be read"),
    ("--load {model} --prompt a --top-p 0", "--top-p 0: give a probability"),
    ("--load {model} --prompt a --temperature nan", "--temperature"),
    ("--load {model} --prompt a --max-new-tokens 0", "--max-new-tokens 0 is too small"),
    ("--load {model} --prompt a --prompt-type qwen --hf-chat-template", "exclude each other"),
    ("--load {model} --prompt a --add-eos-token <|nix|>", "the tokenizer has no such token"),
    ("--load {model} --prompt a --tensor-model-parallel-size 2", "start 2"),
    ("--load {model} --prompt a --task gredy", "gredy"),
    ("--load {model} --prompt a --output /nowhere/a.jsonl", "a folder that can be written"),
    ("--load {model} --prompt a --maxnewtokens 3", "--max-new-tokens"),
]


@pytest.mark.parametrize("flags, words", WRONG, ids=[words for _, words in WRONG])
def test_misuse_is_one_line(model, tmp_path, capsys, flags, words):
    places = {"model": model, "empty": str(tmp_path), "bare": str(tmp_path / "bare")}
    if "{bare}" in flags:
        make_model(tmp_path / "bare")
    try:
        code = main(["generate", *flags.format(**places).split()])
    except SystemExit as error:
        code = error.code
    printed = capsys.readouterr().err
    assert code == 2
    assert words.format(**places) in printed
    assert "Traceback" not in printed and printed.rstrip().splitlines()[-1].count("error:") == 1


def test_errors_that_need_the_loaded_model(model):
    command = ["python", "inference.py", "--load", model, "--prompt"]
    code, output = run_command(*command, "x " * 600)
    assert code == 2 and "tokens, and with its completion there may be 512: shorten it" in output
    code, output = run_command(*command, "a", "--tensor-model-parallel-size", "4", nproc=4)
    assert code == 2 and "4" in output and "Traceback" not in output
