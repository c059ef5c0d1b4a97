"""Prompts keep what their records have beside them."""

import json
from pathlib import Path
from typing import Any

import pytest

from mindspeed_llm.data.instruction import InstructionData
from mindspeed_llm.data.options import PreprocessOptions
from mindspeed_llm.data.preprocess import preprocess
from mindspeed_llm.data.tokenizer import facts_of
from tests.small_tokenizers import byte_level

TURNS = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "A fox."}]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "PPOAlpacaStyleInstructionHandler": (
        {"instruction": "Who?", "output": "A fox.", "level": 3},
        {"output": "A fox.", "level": 3},
    ),
    "OpenAIPromptHandler": ({"prompt": "Who?", "answer": ["\u00e9", None]},) * 2,
    "R1SharegptStyleInstructionHandler": (
        {"conversations": TURNS, "id": 7},
        {"id": 7, "reference": "A fox."},
    ),
}
CASES["OpenAIPromptHandler"] = (CASES["OpenAIPromptHandler"][0], {"answer": ["\u00e9", None]})


@pytest.mark.parametrize("handler", CASES)
def test_fields_are_stored_beside_the_prompt(tmp_path: Path, handler: str) -> None:
    record, fields = CASES[handler]
    file = tmp_path / "data.jsonl"
    long = {key: "fox " * 200 if value == "Who?" else value for key, value in record.items()}
    file.write_text("".join(json.dumps(one) + "\n" for one in (record, long, record)))
    options = PreprocessOptions(
        input=str(file),
        output_prefix=str(tmp_path / "out"),
        handler_name=handler,
        prompt_type="chatml",
        seq_length=100,
    )
    facts = facts_of(byte_level(), "small")
    summary = preprocess(options, facts)
    data = InstructionData(tmp_path / "out")
    is_cut = "conversations" not in record
    assert data.kind == "prompts" and len(data) == summary.written == (2 if is_cut else 3)
    for sample in data:
        assert json.loads(bytes(sample["fields"].tolist())) == fields
        text = byte_level().decode(sample["input_ids"].tolist())
        assert "Who?" in text and "A fox." not in text and text.endswith("assistant\n")
    assert data.longest == max(len(sample["input_ids"]) for sample in data)
