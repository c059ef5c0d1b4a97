"""Prompts with the fields of their records."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mindspeed.config import ConfigError
from mindspeed_llm.data.indexed import IGNORE_INDEX
from mindspeed_llm.data.instruction import InstructionData
from mindspeed_llm.generation.rollout import Completion
from mindspeed_llm.tasks.posttrain.rollouts import (
    Prompt,
    Rollout,
    collate_prompts,
    split_prompts,
)
from mindspeed_llm.tasks.posttrain.sampling import find_answer_end
from mindspeed_llm.tasks.posttrain.scoring import _check_finite
from tests.llm import letters

FIELDS = {"answer": "é", "level": 3}


def sample(record: bytes) -> dict[str, np.ndarray]:
    return {"input_ids": np.array([3, 4]), "fields": np.frombuffer(record, np.uint8)}


def test_fields_come_back_as_they_were() -> None:
    record = json.dumps(FIELDS, ensure_ascii=False).encode()
    first, second = split_prompts(collate_prompts([sample(record), sample(b"{}")]), 7)
    assert (first.number, first.tokens, first.fields) == (7, (3, 4), FIELDS)
    assert (second.number, second.fields) == (8, {})


@pytest.mark.parametrize("damage", [ord("}") + 256, -1, 0, ord("[")])
def test_damaged_fields_are_named(damage: int) -> None:
    """Numbers that are no bytes, and bytes that are no JSON."""
    batch = collate_prompts([sample(b"{}"), sample(b'{"a": 1}')])
    batch["records"] = torch.cat([batch["records"][:-1], torch.tensor([damage])])
    good, bad = split_prompts(batch, 0)
    assert good.fields == {}
    with pytest.raises(ConfigError, match="fields of prompt 1 are damaged .* preprocess again"):
        _ = bad.fields


def test_rewards_are_finite_as_they_are_shared() -> None:
    """Ranks share them as float32, in which 1e39 is infinite."""
    _check_finite({"": [1.0, -3e38], "other": [2.0, 1.0]})
    _check_finite(None)
    for reward in (1e39, -1e300, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="rewards must be finite"):
            _check_finite({"": [1.0], "other": [reward]})
    with pytest.raises(ConfigError, match=r"a reward is 3e\+38 \+ 2e\+38: rewards must be finite"):
        _check_finite({"one": [1.0, 3e38], "other": [1.0, 2e38]})


def _prompts(folder: Path, end: list[int] | None) -> InstructionData:
    prefix = letters.write_prompts(folder / f"data_{end}")
    if end is not None:
        Path(f"{prefix}.summary.json").write_text(json.dumps({"answer_end_ids": end}))
    return InstructionData(prefix)


def test_prompts_that_do_not_note_how_answers_end_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of an earlier version are scored like the others, where there are any."""
    old, new, other = (_prompts(tmp_path, end) for end in (None, [3, 6], []))
    assert find_answer_end([new, new]) == (3, 6) and find_answer_end([other]) == ()
    assert not caplog.records
    assert find_answer_end([old]) == () and find_answer_end([old, new]) == (3, 6)
    assert all("preprocess them again" in record.message for record in caplog.records)
    assert len(caplog.records) == 2
    with pytest.raises(ConfigError, match="end answers differently"):
        find_answer_end([new, other])


@pytest.mark.parametrize(
    ("answer", "end", "seen"),
    [
        ((5, 1), [], (5, 1)),
        ((5, 1), [1], (5, 1)),
        ((5, 1), [1, 8], (5, 1, 8)),  # ChatML: a line break behind <|im_end|>
        ((5, 1), [1, 8, 2], (5, 1, 8, 2)),  # Phi: <|end|>, a line break, <|endoftext|>
        ((5, 1, 8, 2), [1, 8, 2], (5, 1, 8, 2)),
        ((5, 2), [1, 8, 2], (5, 1, 8, 2)),  # the other stop token, right behind the text
        ((5, 2), [1], (5, 1)),
        ((2,), [1, 8], (1, 8)),
    ],
)
def test_a_reward_model_reads_the_end_of_its_template(
    answer: tuple[int, ...], end: list[int], seen: tuple[int, ...]
) -> None:
    """Whichever of the stop tokens ended the answer; one that was cut stays as it is."""
    completion = Completion(answer, (0.0,) * len(answer))
    ended, cut = (Rollout(Prompt(0, (3, 4)), completion, is_ended) for is_ended in (True, False))
    assert ended.sample(end)["input_ids"].tolist() == [3, 4, *seen]
    assert cut.sample(end)["input_ids"].tolist() == [3, 4, *answer]
    trained = ended.sample()
    assert trained["input_ids"].tolist() == [3, 4, *answer]
    assert trained["labels"].tolist() == [IGNORE_INDEX, IGNORE_INDEX, *answer]
