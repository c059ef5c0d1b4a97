"""The commands of the page on PPO and GRPO, and the example, with random models."""

import json
import re
import runpy
from pathlib import Path

import pytest

from tests.commands import ROOT, run_page

PAGE, EXAMPLE = ROOT / "docs/llm/ppo_grpo.md", ROOT / "examples/grpo/README.md"
save_random_model = runpy.run_path(str(ROOT / "examples/quickstart/get_model.py"))[
    "save_random_model"
]


def test_every_command_of_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForSequenceClassification

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_random_model(tmp_path / "model")
    records = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(4)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    (code,) = re.findall(r"^  ```python\n(.*?)^  ```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "rewards.py").write_text(re.sub("^  ", "", code, flags=re.MULTILINE))
    run_page(PAGE, tmp_path)
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"grpo", "ppo"}
    critic = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out/critic")
    assert critic.num_labels == 1


def test_every_command_of_the_example_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = tmp_path / "out/grpo"
    save_random_model(out / "model")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    run_page(EXAMPLE, tmp_path)
    lines = [json.loads(x) for x in (out / "trained/log.jsonl").read_text().splitlines()]
    assert len(lines) == 20 and all(line["sampling difference"] < 1e-4 for line in lines)
    assert (out / "reward.png").read_bytes().startswith(b"\x89PNG")
    for name in ("before", "after"):
        answers = (out / f"{name}.jsonl").read_text().splitlines()
        assert len(answers) == 4
