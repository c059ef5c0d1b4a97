"""The commands of the page on PPO and GRPO, and the example, with random models."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed.launch import call

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/llm/ppo_grpo.md").read_text()
QUICKSTART = ROOT / "examples/quickstart"
SCRIPTS = {
    "preprocess_data.py": "preprocess",
    "posttrain_gpt.py": "posttrain",
    "convert_ckpt.py": "convert",
}


def run_page(folder: str) -> list[str]:
    """Run the commands in this process, as the first rank; return what they made."""
    from mindspeed_llm.cli.main import main

    os.chdir(folder)
    for block in re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            python, script, *arguments = shlex.split(line)
            assert python == "python"
            cache = [] if script == "convert_ckpt.py" else ["--cache-dir", "cache"]
            assert main([SCRIPTS[script], *arguments, *cache]) == 0, line
    return sorted(path.name for path in Path("saved").iterdir())


def test_every_command_of_the_page_works(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    runpy.run_path(str(QUICKSTART / "get_model.py"))["save_random_model"](tmp_path / "model")
    records = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(4)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    (code,) = re.findall(r"^  ```python\n(.*?)^  ```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "rewards.py").write_text(re.sub("^  ", "", code, flags=re.MULTILINE))
    made = call(run_page, 1, str(tmp_path), timeout=300, preload=["tests.preload"])[0]
    assert made == ["grpo", "ppo"]
    critic = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out/critic")
    assert critic.num_labels == 1


@pytest.mark.timeout(900)
def test_every_command_of_the_example_works(tmp_path: Path) -> None:
    runpy.run_path(str(QUICKSTART / "get_model.py"))["save_random_model"](tmp_path / "model")
    page = [str(ROOT / "examples/grpo/README.md"), "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(QUICKSTART / "run.py"), *page], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(x) for x in (tmp_path / "trained/log.jsonl").read_text().splitlines()]
    assert len(lines) == 20 and all(line["sampling difference"] < 1e-4 for line in lines)
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    for name in ("before", "after"):
        answers = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        assert len(answers) == 4
