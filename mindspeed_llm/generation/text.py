"""Encode prompts and decode completions with a tokenizer and a chat template."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mindspeed.config import ConfigError, kind_of, parse_json
from mindspeed_llm.data.conversation import MalformedRecord, Message, UnusableRecord
from mindspeed_llm.data.samples import PromptEncoder
from mindspeed_llm.data.tokenizer import TokenizerFacts, load_facts
from mindspeed_llm.generation.options import GenerateOptions

INCOMPLETE = "\ufffd"
"""Replaces bytes that are not a complete character (yet)."""


class TextCodec:
    """Encodes prompts and decodes completions."""

    def __init__(
        self, options: GenerateOptions, config_folder: Path | None, *, interactive: bool
    ) -> None:
        from tokenizers import Tokenizer

        self._facts = load_facts(options.tokenizer_name_or_path or _str(config_folder))
        self._tokenizer = Tokenizer.from_str(self._facts.backend)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._system = options.system
        self._chat = _chat_encoder(options, self._facts, interactive=interactive)
        own = set() if self._chat is None else self._chat.stop_ids
        added = (self._special(token) for token in options.add_eos_token)
        self.stop_ids = frozenset({*own, *eos_ids(config_folder, self._facts.eos_id), *added})

    def encode(self, prompt: str) -> list[int]:
        """Return the ids of a prompt, in the chat template if there is one."""
        if self._chat is not None:
            return self.encode_chat([Message("user", prompt)])
        _check_text(prompt)
        ids: list[int] = self._tokenizer.encode(prompt).ids
        if not ids:
            raise ConfigError("an empty prompt cannot be completed: give some text")
        return ids

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation with the generation prompt."""
        assert self._chat is not None
        _check_text("".join([self._system, *(message.content for message in messages)]))
        try:
            return self._chat.encode(messages, self._system)
        except (MalformedRecord, UnusableRecord) as error:
            raise ConfigError(
                f"the chat template cannot render this conversation: {error}"
            ) from None

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of a completion."""
        text: str = self._tokenizer.decode(
            [token for token in tokens if token not in self.stop_ids]
        )
        return text

    def _special(self, token: str) -> int:
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise ConfigError(f"--add-eos-token {token}: the tokenizer has no such token")
        return int(found)


class TextStream:
    """The text of tokens that arrive one by one; incomplete characters are held back."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._tokens: list[int] = []
        self._shown = 0

    @property
    def text(self) -> str:
        """Return the text so far."""
        return self._codec.decode(self._tokens)

    def push(self, token: int) -> str:
        """Add a token and return the text that can be shown."""
        self._tokens.append(token)
        return "" if self.text.endswith(INCOMPLETE) else self.flush()

    def flush(self) -> str:
        """Return the text that was not shown yet."""
        text = self.text
        piece, self._shown = text[self._shown :], len(text)
        return piece


def _check_text(text: str) -> None:
    """Raise for bytes that a terminal, a pipe or a flag handed on although they are no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError("the prompt is not UTF-8 text: write it again") from None


def _chat_encoder(
    options: GenerateOptions, facts: TokenizerFacts, *, interactive: bool
) -> PromptEncoder | None:
    """Return the encoder of chat prompts; None to continue texts as they are."""
    prompt_type = "tokenizer" if options.hf_chat_template else options.prompt_type
    if prompt_type is None and interactive:
        if facts.chat_template is None:
            raise ConfigError(
                f"the tokenizer in {facts.source} has no chat template: give --prompt-type with "
                "the template the model was trained with"
            )
        prompt_type = "tokenizer"
    if prompt_type is None:
        return None
    return PromptEncoder(
        facts,
        prompt_type,
        prompt_type_path=options.prompt_type_path or "",
        thinking=options.enable_thinking,
    )


def eos_ids(folder: Path | None, *others: int | None) -> set[int]:
    """Return the end-of-sequence tokens of the model, and the others that are given."""
    found: Any = None
    for name in ("generation_config.json", "config.json"):
        if found is None and folder is not None and (folder / name).is_file():
            try:
                content = parse_json((folder / name).read_bytes())
            except (OSError, ValueError) as error:
                raise ConfigError(f"{folder / name} cannot be read: {error}") from None
            found = content.get("eos_token_id") if isinstance(content, dict) else None
    listed = found if isinstance(found, list) else [found]
    return {one for one in (*listed, *others) if isinstance(one, int)}


def _str(folder: Path | None) -> str | None:
    return None if folder is None else os.fspath(folder)


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
