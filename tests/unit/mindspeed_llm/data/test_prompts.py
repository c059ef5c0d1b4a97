"""What a model is asked with is what it was trained behind, token by token."""

import json

import pytest

from mindspeed_llm.data.chat import TemplateFormat
from mindspeed_llm.data.chat_jinja import JinjaFormat
from mindspeed_llm.data.conversation import Conversation, Message
from mindspeed_llm.data.encoder import TextEncoder
from mindspeed_llm.data.prompts import PromptEncoder
from mindspeed_llm.data.samples import IGNORED, Assembler, build
from mindspeed_llm.data.template import SHIPPED_PATH, Template, load_template
from mindspeed_llm.data.tokenizer import facts_of
from tests.small_tokenizers import byte_level, metaspace

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\\n' }}{{ m.content }}<|im_end|>{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"
)
NAMES = [*(entry["name"] for entry in json.loads(SHIPPED_PATH.read_text())), "tokenizer"]
TALK = [Message("user", "Who are you?"), Message("assistant", "I am."), Message("user", "No <s>!")]


@pytest.mark.parametrize(
    "tokenizer", [byte_level("</s>", "<s>", CHAT), metaspace("first", template=CHAT)]
)
@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_is_the_beginning_of_the_sample(name, tokenizer):
    facts = facts_of(tokenizer)
    whole = Conversation((*TALK, Message("assistant", "Yes.")), "Be.")
    if name == "tokenizer":
        chat = JinjaFormat(facts)
    else:
        # An empty thought in the prompt is for answers without one; asking leaves it to the model.
        chat = TemplateFormat(
            Template(load_template(name), facts), "false" if name == "qwen3" else "none"
        )
    encoder = TextEncoder(facts, parse_special=name == "empty")
    sample = build(Assembler(encoder).encode([chat.render(whole)])[0])
    prompts = PromptEncoder(facts, name, thinking="false" if name == "qwen3" else "none")
    asked = prompts.encode(TALK, "Be.")
    assert sample.ids[: len(asked)].tolist() == asked
    assert sample.labels[len(asked)] != IGNORED and sample.labels[len(asked) - 1] == IGNORED
    assert name == "empty" or prompts.stop_ids
