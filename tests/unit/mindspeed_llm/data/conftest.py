"""A tokenizer, in memory and as a folder, and a way to preprocess in this process."""

import json

import pytest

from mindspeed_llm.data.options import PreprocessOptions
from mindspeed_llm.data.preprocess import preprocess
from mindspeed_llm.data.tokenizer import facts_of
from tests.small_tokenizers import byte_level


@pytest.fixture(scope="session")
def facts():
    return facts_of(byte_level(), "small")


@pytest.fixture
def write_lines(tmp_path):
    """Write records to a .jsonl file and return its path."""

    def write(records, name="data.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(path)

    return write


@pytest.fixture
def run(tmp_path, facts):
    """Preprocess in this process; returns the summary and the prefix."""

    def run(source, **options):
        facts_used = options.pop("facts", facts)
        prefix = str(tmp_path / options.pop("name", "out"))
        chosen = PreprocessOptions(input=str(source), output_prefix=prefix, **options)
        return preprocess(chosen, facts_used), prefix

    return run
