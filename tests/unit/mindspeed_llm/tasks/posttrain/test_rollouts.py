"""Prompts with the fields of their records."""

import json

import numpy as np
import pytest
import torch

from mindspeed.config import ConfigError
from mindspeed_llm.tasks.posttrain.rollouts import collate_prompts, split_prompts
from mindspeed_llm.tasks.posttrain.scoring import _check_finite

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
    _check_finite([1.0, -3e38])
    for reward in (1e39, -1e300, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="rewards must be finite"):
            _check_finite([1.0, reward])
