"""Prompts for a model that talks: the same tokens in front of an answer as in training."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_llm.data.chat import ChatFormat, TemplateFormat, Thinking
from mindspeed_llm.data.chat_jinja import JinjaFormat
from mindspeed_llm.data.conversation import Conversation, Message
from mindspeed_llm.data.encoder import TextEncoder
from mindspeed_llm.data.samples import Assembler, build
from mindspeed_llm.data.template import Template, load_template
from mindspeed_llm.data.tokenizer import TokenizerFacts


class PromptEncoder:
    """Encodes a conversation that waits for an answer.

    `prompt_type` is what preprocessing was given: a template's name or `tokenizer`. Special tokens
    in what people type are text, except with `empty`, where they are the template.
    """

    def __init__(
        self,
        facts: TokenizerFacts,
        prompt_type: str,
        *,
        prompt_type_path: str = "",
        thinking: Thinking = "none",
    ) -> None:
        parse = prompt_type == "empty"
        self._chat: ChatFormat
        if prompt_type == "tokenizer":
            self._chat = JinjaFormat(facts, parse, thinking)
        else:
            template = Template(load_template(prompt_type, prompt_type_path), facts)
            self._chat = TemplateFormat(template, thinking)
        # One prompt at a time needs no accelerator, and it takes a moment to load.
        self._assembler = Assembler(TextEncoder(facts, parse_special=parse, accelerate=False))
        self.stop_ids = self._chat.stop_ids

    def encode(self, messages: Sequence[Message], system: str = "") -> list[int]:
        """Return the ids of everything up to where the model is to answer."""
        conversation = Conversation(tuple(messages), system).check(answered=False)
        sample = build(self._assembler.encode([self._chat.render(conversation)])[0])
        ids: list[int] = sample.ids.tolist()
        return ids
