"""Files of prompts."""

from pathlib import Path
from typing import Any

from mindspeed.config import ConfigError, kind_of, parse_json


def read_prompts(path: str) -> list[str]:
    """Read one prompt a line: plain text, or in a .jsonl file objects with "prompt"."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--prompts {path} cannot be read: {reason}") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(f"--prompts {path} is empty: give one prompt a line")
    if not path.endswith(".jsonl"):
        return [line for _, line in numbered]
    return [_prompt(line, f"{path}, line {number}") for number, line in numbered]


def _prompt(line: str, where: str) -> str:
    try:
        record: Any = parse_json(line)
    except ValueError as error:
        raise ConfigError(f"{where}: is not valid JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f'{where}: holds {kind_of(record)}, not an object with the text "prompt"')
    if "prompt" not in record:
        raise ConfigError(f"{where}: has no prompt; it has {', '.join(record) or 'nothing'}")
    if not isinstance(record["prompt"], str):
        raise ConfigError(f"{where}: prompt is {kind_of(record['prompt'])}: it must be text")
    return str(record["prompt"])
