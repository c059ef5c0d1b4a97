"""Parts of a template: who speaks, special tokens in texts, and conversations that are none."""

import json
from dataclasses import replace

import pytest

from mindspeed.config import ConfigError
from mindspeed_llm.data.conversation import Conversation, Message, UnusableRecord
from mindspeed_llm.data.template import (
    Slots,
    Template,
    TemplateEntry,
    TemplateFormat,
    load_template,
)
from mindspeed_llm.data.tokenizer import special_matcher, split_special

CALL = '{"name": "clock", "arguments": {}}'


def test_tools_have_slots_of_their_own(facts):
    forms = {
        "format_user": Slots(slots=["<U>{{content}}"]),
        "format_observation": Slots(slots=["<O>{{content}}"]),
        "format_function": Slots(slots=["<F>{{name}}"]),
    }
    chat = TemplateFormat(Template(TemplateEntry(name="forms", **forms), facts))
    messages = [Message("user", "time?"), Message("assistant", "", calls=CALL)]
    messages += [Message("observation", "noon"), Message("assistant", "It is noon.")]
    found = chat.render(Conversation(tuple(messages)))
    texts = ["".join(part for part in p.parts if isinstance(part, str)) for p in found]
    assert texts == ["<U>time?", "<F>clock", "<O>noon", "It is noon."]
    assert [segment.is_completion for segment in found] == [False, True, False, True]


@pytest.mark.parametrize("slot", [{}, {"tokens": "<s>"}, ["pad_token"], 3, {"token": 3}])
def test_a_slot_is_of_one_of_three_kinds(tmp_path, slot):
    file = tmp_path / "templates.json"
    file.write_text(json.dumps([{"name": "mine", "format_user": {"slots": ["{{content}}", slot]}}]))
    with pytest.raises(ConfigError) as error:
        load_template("mine", str(file))
    assert str(error.value) == (
        f"{file}: template mine, format_user.slots.1: a text, "
        '{"token": "..."} or a list of "bos_token" and "eos_token" is needed'
    )


def test_the_longest_special_token_is_found(facts):
    special = {"<s": 1, "<s>": 2, "<s>>": 3}
    some = replace(facts, special=special)
    parts = split_special("a<s>>b<s>c<s d", special_matcher(some), some)
    assert parts == ["a", 3, "b", 2, "c", 1, " d"]


ASK, ANSWER, TOOL = Message("user", "q"), Message("assistant", "a"), Message("observation", "o")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ((), "no messages"),
        ((ASK, ASK), "take turns"),
        ((ASK, ANSWER, ANSWER, ASK), "take turns"),
        ((ANSWER, ASK), "take turns"),
        ((ASK, ANSWER, ASK), "no answer"),
        ((ASK, Message("assistant", "")), "empty"),
    ],
)
def test_invalid_conversations(messages, reason):
    with pytest.raises(UnusableRecord, match=reason):
        Conversation(messages).check()


def test_conversations(facts):
    whole = Conversation((ASK, Message("assistant", "", calls=CALL), TOOL, ANSWER))
    assert whole.check() is whole
    question = Conversation((ASK, ANSWER, ASK))
    assert question.check(answered=False) is question


def test_what_pads_a_row(facts):
    assert replace(facts, pad=None).pad_id == facts.eos_id not in (None, 0)
    assert replace(facts, pad=None, eos=None).pad_id == 0
