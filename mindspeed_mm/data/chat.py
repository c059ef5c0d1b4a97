"""Conversations to stretches of prompt and answer, with tokens in the places of media."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed.config import ConfigError
from mindspeed_llm.data.chat import CheckedFormat, Part, Piece, Thinking
from mindspeed_llm.data.chat_jinja import JinjaFormat
from mindspeed_llm.data.conversation import Conversation, MalformedRecord, Message
from mindspeed_llm.data.template import Template, TemplateFormat, load_template
from mindspeed_llm.data.tokenizer import TokenizerFacts, special_matcher, split_special
from mindspeed_mm.data.conversations import SIGN, SIGN_OF, SIGNS
from mindspeed_mm.data.media import Kind
from mindspeed_mm.data.options import OWN_TEMPLATES, BasicOptions


class MediaFormat:
    """Writes conversations with the token of its processor in the place of each medium."""

    def __init__(self, facts: TokenizerFacts, tokens: Mapping[Kind, int], basic: BasicOptions):
        self._facts, self._special = facts, special_matcher(facts)
        self.tokens = dict(tokens)
        thinking: Thinking = "none"
        if basic.enable_thinking is not None:
            thinking = "true" if basic.enable_thinking else "false"
        own = StructuredJinja(facts, thinking) if facts.chat_template else None
        chat: StructuredJinja | TemplateFormat
        if basic.template not in OWN_TEMPLATES:
            chat = _named(basic.template, facts, thinking)
        elif own is not None:
            chat = own
        else:
            raise ConfigError(
                f"template {basic.template}: {facts.source} has no chat template; "
                "name one of configs/finetune/templates.json"
            )
        self._chat = CheckedFormat(chat, facts, option="template")
        self._around = {kind: self._written_by(own, kind) for kind in tokens}

    def render(self, conversation: Conversation) -> list[Piece]:
        """Write prompts and answers in turn."""
        pieces = self._chat.render(conversation)
        return [piece._replace(parts=self._place(piece.parts)) for piece in pieces]

    def _place(self, parts: Sequence[Part]) -> list[Part]:
        placed: list[Part] = []
        for part in parts:
            for text in SIGN.split(part) if isinstance(part, str) else [part]:
                placed += self._around[SIGNS[text]] if text in SIGNS else [text]
        return [part for part in placed if part != ""]

    def _written_by(self, own: StructuredJinja | None, kind: Kind) -> list[Part]:
        """Return what stands for a medium where the template only knows text."""
        text = own.between(kind) if own is not None else None
        parts = split_special(text, self._special, self._facts) if text else []
        return parts if self.tokens[kind] in parts else [self.tokens[kind]]


class StructuredJinja(JinjaFormat):
    """The model's own chat template; contents are lists of parts where it understands them."""

    def __init__(self, facts: TokenizerFacts, thinking: Thinking) -> None:
        self._structured = True
        super().__init__(facts, thinking=thinking)
        self._structured = "'type'" not in (probe := self._probe("image")) and "(A" in probe

    def between(self, kind: Kind) -> str | None:
        """Return what the template writes for a medium between two texts, if it stands there."""
        if not self._structured:
            return None
        _, found, rest = self._probe(kind).partition("(A")
        text, end, _ = rest.partition("B)")
        return text if found and end else None

    def _probe(self, kind: Kind) -> str:
        message = Message("user", f"(A{SIGN_OF[kind]}B)")
        try:
            return self._run(self._messages(Conversation((message,))), None, generate=False)
        except MalformedRecord:
            return ""

    def _messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        messages = super()._messages(conversation)
        if self._structured:
            for message in messages:
                message["content"] = _parts(message["content"])
        return messages


def _parts(text: str) -> list[dict[str, str]]:
    pieces = [piece for piece in SIGN.split(text) if piece]
    return [
        {"type": SIGNS[piece]} if piece in SIGNS else {"type": "text", "text": piece}
        for piece in pieces
    ]


def _named(name: str, facts: TokenizerFacts, thinking: Thinking) -> TemplateFormat:
    try:
        return TemplateFormat(Template(load_template(name), facts), thinking)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--prompt-type", "template", 1)) from None
