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


def write_records(file: Path, records: list[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


class _Tiny:
    def __init__(self, folder: Path) -> None:
        tokenizer = byte_level()
        self.model = make_model(folder / "hf", vocab_size=len(tokenizer))
        tokenizer.save_pretrained(self.model)
        self.file = folder / "sums.jsonl"
        self.cache = folder / "cache"
        write_records(self.file, RECORDS)

    def preprocess(self, prefix: Path, **changes: Any) -> str:
        """Preprocess the records as a run does."""
        options = {
            "input": str(self.file),
            "output_prefix": str(prefix),
            "handler_name": "AlpacaStyleInstructionHandler",
            "tokenizer_name_or_path": self.model,
            "prompt_type": "qwen",
            "seq_length": 64,
            "cache_dir": str(self.cache),
        }
        preprocess(PreprocessOptions(**options | changes))
        return str(prefix)

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
    cache = tmp_path / "cache"
    prefix = tiny.preprocess(tmp_path / "tokens", **packing)
    expected = run_ranks(train, 2, tiny.settings(tmp_path, prefix, **packing))[0]
    values = tiny.settings(tmp_path, str(tiny.file), cache_dir=str(cache), **packing)
    (losses, log), (_, other_log) = run_ranks(logged, 2, values)
    assert losses == expected
    assert f"preprocessing into {cache / 'data/sums-'}" in log and not other_log
    assert "12 records in = 12 written + 0 skipped" in log


def test_the_cache_is_used_again_until_content_or_options_change(
    tiny: _Tiny, tmp_path: Path
) -> None:
    file, cache = tmp_path / "sums.jsonl", tmp_path / "cache"
    values = tiny.settings(tmp_path, str(file), train_iters=1, cache_dir=str(cache))
    words = []
    write_records(file, RECORDS)
    for change in ({}, {}, {"append_eod": True}):
        words.append(run_ranks(logged, 1, values | change)[0][1])
    write_records(file, RECORDS[:8])
    words.append(run_ranks(logged, 1, values)[0][1])
    write_records(file, RECORDS)
    words.append(run_ranks(logged, 1, values)[0][1])
    assert ["before" in text for text in words] == [False, True, False, False, True]
    assert len(list((cache / "data").iterdir())) == 3


def test_documents_are_cut_into_windows(tiny: _Tiny, tmp_path: Path) -> None:
    file = tmp_path / "books.txt"
    file.write_text("The quick brown fox jumps over the lazy dog.\n" * 60)
    values = tiny.settings(tmp_path, str(file), seq_length=16, json_keys=("text",))
    assert len(run_ranks(pretrain, 1, values)[0]) == 3


def pretrain(values: dict[str, Any]) -> list[float]:
    """Pretrain as one rank and return the losses of all steps."""
    from mindspeed_llm.tasks.pretrain import PretrainTrainer
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


def test_names_without_effect_on_token_files_are_checked_and_logged(
    tiny: _Tiny, tmp_path: Path
) -> None:
    prefix = tiny.preprocess(tmp_path / "tokens")
    values = tiny.settings(tmp_path, prefix, train_iters=1)
    for name, given, nearest in (
        ("handler_name", "AlpacaStyleInstructonHandler", "AlpacaStyleInstructionHandler"),
        ("prompt_type", "chatnl", "chatml"),
    ):
        words = f"--{name.replace('_', '-')} {given}.* did you mean {nearest}"
        with pytest.raises(RankFailed, match=words):
            run_ranks(train, 1, values | {name: given})
    _, log = run_ranks(logged, 1, values | {"pack": True})[0]
    assert log == "--prompt-type, --pack: no effect, --data-path names token files"


def test_data_of_a_tokenizer_with_other_ids_is_an_error(tiny: _Tiny, tmp_path: Path) -> None:
    """Two tokens change places: no id is out of range, and every text means something else."""
    folder = tmp_path / "other"
    byte_level().save_pretrained(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    ids = content["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    prefix = tiny.preprocess(tmp_path / "tokens", tokenizer_name_or_path=str(folder))
    values = tiny.settings(tmp_path, prefix, train_iters=1, save=str(tmp_path / "saved"))
    with pytest.raises(RankFailed, match=r"\(.*other\) has other tokens or ids than the model's"):
        run_ranks(train, 2, values)
    assert not (tmp_path / "saved").exists()
    assert len(run_ranks(train, 1, values | {"allow_other_tokenizer": True})[0]) == 1
    resumed = values | {"train_iters": 2}  # compared when the run began
    assert len(run_ranks(train, 1, resumed)[0]) == 2


def test_a_tokenizer_with_another_chat_template_has_the_same_ids(
    tiny: _Tiny, tmp_path: Path
) -> None:
    byte_level(template="{{ messages }}").save_pretrained(tmp_path / "instruct")
    source = {"tokenizer_name_or_path": str(tmp_path / "instruct")}
    prefix = tiny.preprocess(tmp_path / "tokens", **source)
    assert len(run_ranks(train, 1, tiny.settings(tmp_path, prefix, train_iters=1))[0]) == 1
    summary = Path(f"{prefix}.summary.json")
    recorded = json.loads(summary.read_text())
    del recorded["ids_fingerprint"]  # an earlier version recorded the whole tokenizer only
    summary.write_text(json.dumps(recorded))
    with pytest.raises(RankFailed, match="has other tokens or ids"):
        run_ranks(train, 1, tiny.settings(tmp_path, prefix, train_iters=1))
