"""Training on data files: preprocessed once into a cache, with the losses of token files."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from mindspeed_llm.data.options import PreprocessOptions
from mindspeed_llm.data.preprocess import preprocess
from tests.ranks import RankFailed, run_ranks
from tests.small_tokenizers import byte_level
from tests.unit.mindspeed_llm.training.tiny_run import make_model, settings, train

RECORDS = [
    {"instruction": f"How much is {n} + {n}?", "input": "", "output": f"It is {2 * n}."}
    for n in range(12)
]


class _Tiny:
    def __init__(self, folder: Path) -> None:
        tokenizer = byte_level()
        self.model = make_model(folder / "hf", vocab_size=len(tokenizer))
        tokenizer.save_pretrained(self.model)
        self.file = folder / "sums.jsonl"
        self.cache = folder / "cache"
        self.write(RECORDS)

    def write(self, records: list[dict[str, str]]) -> None:
        self.file.write_text("".join(json.dumps(record) + "\n" for record in records))

    def settings(self, folder: Path, data: str, **changes: Any) -> dict[str, Any]:
        values = settings(self.model, data, folder, train_iters=3, prompt_type="qwen")
        return values | {"cache_dir": str(self.cache), "seq_length": 64} | changes


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> _Tiny:
    return _Tiny(tmp_path_factory.mktemp("raw"))


def logged(values: dict[str, Any]) -> tuple[list[float], str]:
    """Train, and return the losses and what was said."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mindspeed_llm.training.data")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return train(values), "\n".join(lines)


@pytest.mark.parametrize("packing", [{}, {"pack": True, "neat_pack": True}], ids=["plain", "neat"])
def test_losses_are_those_of_preprocessed_data(
    tiny: _Tiny, tmp_path: Path, packing: dict[str, Any]
) -> None:
    prefix = str(tmp_path / "tokens")
    preprocess(
        PreprocessOptions(
            input=str(tiny.file),
            output_prefix=prefix,
            handler_name="AlpacaStyleInstructionHandler",
            tokenizer_name_or_path=tiny.model,
            prompt_type="qwen",
            seq_length=64,
            cache_dir=str(tiny.cache),
            **packing,
        )
    )
    expected = run_ranks(train, 2, tiny.settings(tmp_path, prefix, **packing))[0]
    values = tiny.settings(tmp_path, str(tiny.file), **packing)
    (losses, log), (_, other_log) = run_ranks(logged, 2, values)
    assert losses == expected
    assert f"preprocessing into {tiny.cache / 'data/sums-'}" in log and not other_log
    assert "12 records in = 12 written + 0 skipped" in log


def test_the_cache_is_used_again_until_content_or_options_change(
    tiny: _Tiny, tmp_path: Path
) -> None:
    values = tiny.settings(tmp_path, str(tiny.file), seq_length=60, train_iters=1)
    words = []
    folders = set((tiny.cache / "data").iterdir())
    for change in ({}, {}, {"append_eod": True}):
        words.append(run_ranks(logged, 1, values | change)[0][1])
    tiny.write(RECORDS[:8])
    words.append(run_ranks(logged, 1, values)[0][1])
    tiny.write(RECORDS)
    words.append(run_ranks(logged, 1, values)[0][1])
    assert ["before" in text for text in words] == [False, True, False, False, True]
    assert len(set((tiny.cache / "data").iterdir()) - folders) == 3


def test_documents_are_cut_into_windows(tiny: _Tiny, tmp_path: Path) -> None:
    file = tmp_path / "books.txt"
    file.write_text("The quick brown fox jumps over the lazy dog.\n" * 60)
    values = tiny.settings(tmp_path, str(file), seq_length=16, json_keys=("text",))
    assert len(run_ranks(pretrain, 1, values)[0]) == 3


def pretrain(values: dict[str, Any]) -> list[float]:
    """Pretrain as one rank and return the losses of all steps."""
    from mindspeed_llm.tasks.pretrain.gpt import PretrainTrainer
    from mindspeed_llm.training.options import TrainOptions
    from tests.unit.mindspeed_llm.training.tiny_run import read_losses

    PretrainTrainer(TrainOptions(**values)).train()
    return read_losses(values["log_file"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data_path": ("/nowhere/x.jsonl",)}, "--data-path /nowhere/x.jsonl does not exist"),
        ({"prompt_type": None}, "--prompt-type is missing"),
        ({"handler_name": "AlpacaStyleInstructonHandler"}, "AlpacaStyleInstructionHandler"),
    ],
    ids=["file", "template", "handler"],
)
def test_errors_name_the_flags_of_training(
    tiny: _Tiny, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    values = tiny.settings(tmp_path, str(tiny.file)) | changes
    with pytest.raises(RankFailed, match=words):
        run_ranks(train, 1, values)
