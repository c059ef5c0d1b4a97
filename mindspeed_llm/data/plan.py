"""What is to be done with every record: the options, once they are checked and looked up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mindspeed_llm.data.chat import ChatFormat, TemplateFormat, Thinking
from mindspeed_llm.data.chat_jinja import JinjaFormat
from mindspeed_llm.data.handlers import HANDLERS, PRETRAIN, Columns
from mindspeed_llm.data.handlers.base import Output
from mindspeed_llm.data.template import Template, TemplateEntry
from mindspeed_llm.data.tokenizer import TokenizerFacts
from mindspeed_llm.data.written import CheckedFormat


@dataclass(frozen=True)
class Plan:
    """What every worker needs to know; it travels to other processes."""

    handler: str
    facts: TokenizerFacts
    columns: Columns
    keys: tuple[str, ...] = ()
    """Columns with plain documents."""
    template: TemplateEntry | None = None
    """None for the tokenizer's own chat template."""
    thinking: Thinking = "none"
    parse_special: bool = False
    accelerate: bool = True
    limit: int | None = None
    too_long: Literal["drop", "cut", "error"] = "drop"
    append_eod: bool = False
    skip_malformed: bool = False
    placeholder_token: str = ""
    reward_tokens: tuple[str, ...] = ()


def outputs(plan: Plan) -> tuple[Output, ...]:
    """Return the files that a plan writes: of documents, one a column."""
    if plan.handler == PRETRAIN:
        return tuple(Output(key, track, "ids") for track, key in enumerate(plan.keys))
    return HANDLERS[plan.handler].outputs


def make_chat(plan: Plan) -> ChatFormat:
    """Build the format in which the plan writes conversations."""
    chat: ChatFormat
    if plan.template is None:
        chat = JinjaFormat(plan.facts, plan.parse_special, plan.thinking)
    else:
        chat = TemplateFormat(Template(plan.template, plan.facts), plan.thinking)
    return CheckedFormat(chat, plan.facts, parse_special=plan.parse_special)
