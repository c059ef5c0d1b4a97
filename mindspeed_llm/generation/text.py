"""Text to prompts and tokens to text, with one tokenizer and one way to put questions."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mindspeed.config import ConfigError, parse_json
from mindspeed_llm.data.conversation import MalformedRecord, Message, UnusableRecord
from mindspeed_llm.data.samples import PromptEncoder
from mindspeed_llm.data.tokenizer import TokenizerFacts, load_facts
from mindspeed_llm.generation.options import GenerateOptions

HALF = "\ufffd"
"""What stands for bytes that are no character (yet)."""


class Text:
    """Encodes what people type and decodes what the model says."""

    def __init__(
        self, options: GenerateOptions, config_folder: Path | None, *, talks: bool
    ) -> None:
        from tokenizers import Tokenizer

        self._facts = load_facts(options.tokenizer_name_or_path or _str(config_folder))
        self._tokenizer = Tokenizer.from_str(self._facts.backend)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._system = options.system
        self._chat = _chat_encoder(options, self._facts, talks=talks)
        own = set() if self._chat is None else self._chat.stop_ids
        added = (self._special(token) for token in options.add_eos_token)
        self.stops = frozenset({*own, *_ends(config_folder, self._facts), *added})

    def encode(self, prompt: str) -> list[int]:
        """Return the ids of a text to continue or, with a template, of a question to answer."""
        if self._chat is not None:
            return self.encode_chat([Message("user", prompt)])
        ids: list[int] = self._tokenizer.encode(prompt).ids
        if not ids:
            raise ConfigError("an empty prompt has nothing to continue: give some text")
        return ids

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation up to where the model is to answer."""
        assert self._chat is not None
        try:
            return self._chat.encode(messages, self._system)
        except (MalformedRecord, UnusableRecord) as error:
            raise ConfigError(f"the template cannot write this conversation: {error}") from None

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of an answer."""
        text: str = self._tokenizer.decode([token for token in tokens if token not in self.stops])
        return text

    def _special(self, token: str) -> int:
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise ConfigError(f"--add-eos-token {token}: the tokenizer has no such token")
        return int(found)


class Stream:
    """The text of tokens that come one by one; half a character waits for its other half."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._tokens: list[int] = []
        self._shown = 0

    @property
    def whole(self) -> str:
        """The text so far."""
        return self._text.decode(self._tokens)

    def feed(self, token: int) -> str:
        """Take the next token and return what can be shown of it."""
        self._tokens.append(token)
        return "" if self.whole.endswith(HALF) else self.rest()

    def rest(self) -> str:
        """Return what was not shown yet."""
        text = self.whole
        piece, self._shown = text[self._shown :], len(text)
        return piece


def _chat_encoder(
    options: GenerateOptions, facts: TokenizerFacts, *, talks: bool
) -> PromptEncoder | None:
    """Return what writes questions; without a template, texts are continued as they are."""
    prompt_type = "tokenizer" if options.hf_chat_template else options.prompt_type
    if prompt_type is None and talks:
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


def _ends(folder: Path | None, facts: TokenizerFacts) -> set[int]:
    """Return the tokens at which the model was made to end: its own list, or the tokenizer's."""
    found: Any = None
    for name in ("generation_config.json", "config.json"):
        if found is None and folder is not None and (folder / name).is_file():
            try:
                content = parse_json((folder / name).read_bytes())
            except (OSError, ValueError) as error:
                raise ConfigError(f"{folder / name} cannot be read: {error}") from None
            found = content.get("eos_token_id") if isinstance(content, dict) else None
    listed = found if isinstance(found, list) else [found]
    return {one for one in (*listed, facts.eos_id) if isinstance(one, int)}


def _str(folder: Path | None) -> str | None:
    return None if folder is None else os.fspath(folder)
