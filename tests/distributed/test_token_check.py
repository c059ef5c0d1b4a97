"""Wrong tokens in token files end a run before its first step, in one line, on every rank."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_llm.data.indexed import TokenFile, TokenWriter
from mindspeed_llm.training.data import check_tokens
from tests.distributed.test_raw_data import pretrain
from tests.ranks import RankFailed, run_ranks
from tests.unit.mindspeed_llm.training.tiny_run import (
    VOCABULARY,
    make_model,
    make_samples,
    settings,
    train,
    write_samples,
)


def check(path: Path, cache: str) -> str:
    """Check one file and return what is wrong with it."""
    try:
        check_tokens([TokenFile(path, np.dtype("<i4"))], VOCABULARY, cache)
    except ValueError as error:
        return str(error)
    finally:
        torch.distributed.barrier()
    return ""


def test_every_rank_raises_and_no_damaged_file_is_marked(tmp_path: Path) -> None:
    path, cache = tmp_path / "x.bin", str(tmp_path / "cache")
    tokens = np.zeros(1000, np.int32)
    tokens[900] = VOCABULARY
    tokens.tofile(path)
    line = f"{path}: token {VOCABULARY} (number 900) is not one of the model's, which are 0 to 98"
    for _ in range(2):
        assert all(said.startswith(line) for said in run_ranks(check, 2, path, cache))
    tokens[900] = 1
    tokens.tofile(path)
    assert run_ranks(check, 2, path, cache) == ["", ""]
    (note,) = (tmp_path / "cache/checked").iterdir()
    assert note.read_bytes() == b""
    tokens[1] = -5
    tokens.tofile(path)
    assert "token -5 (number 1)" in run_ranks(check, 2, path, cache)[0], "another time, no memory"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("key", ["input_ids", "labels"])
def test_wrong_tokens_in_samples(model: str, tmp_path: Path, key: str) -> None:
    data = write_samples(tmp_path / "data", make_samples(8))
    path = Path(f"{data}_packed_{key}_document.bin")
    tokens = np.fromfile(path, "<i4")
    tokens[-1] = VOCABULARY + 7
    tokens.tofile(path)
    values: dict[str, Any] = settings(model, data, tmp_path, cache_dir=str(tmp_path / "cache"))
    with pytest.raises(RankFailed, match=rf"{key}_document.bin: token 106 \(number \d+\) is not"):
        run_ranks(train, 1, values)


def test_wrong_tokens_in_documents(model: str, tmp_path: Path) -> None:
    writer = TokenWriter(tmp_path, "ours", np.dtype("<u2"))
    writer.append(np.arange(200) % 50 + 60, np.array([200]))
    writer.build_index(tmp_path / "ours.idx")
    data, cache = str(tmp_path / "ours"), str(tmp_path / "cache")
    values: dict[str, Any] = settings(model, data, tmp_path, cache_dir=cache, seq_length=16)
    with pytest.raises(RankFailed, match=r"ours.bin: token 99 \(number 39\) is not one of"):
        run_ranks(pretrain, 1, values)
