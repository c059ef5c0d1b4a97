"""A file of prompts: what is wrong in a line is one clear error."""

import pytest

from mindspeed.config import ConfigError
from mindspeed_llm.generation.prompt_file import read_prompts


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"prompt": 5}', "line 2: prompt is a number: it must be text"),
        ('{"text": "x"}', "line 2: has no prompt; it has text"),
        ("{}", "line 2: has no prompt; it has nothing"),
        ("[]", "line 2: holds a list, not an object with the text"),
        ("{", "line 2: is not valid JSON"),
        ("[" * 100_000, "line 2: is not valid JSON"),
    ],
    ids=lambda text: text[:20],
)
def test_wrong_lines(tmp_path, line, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "good"}}\n{line}\n')
    with pytest.raises(ConfigError, match=message):
        read_prompts(str(path))
