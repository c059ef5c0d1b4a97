"""The real tokenizer of SmolLM2, out of its GGUF file: our tokens and its chat template's."""

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from mindspeed_llm.data.chat_jinja import JinjaFormat
from mindspeed_llm.data.conversation import Conversation, Message
from mindspeed_llm.data.encoder import TextEncoder
from mindspeed_llm.data.indexed import IGNORE_INDEX
from mindspeed_llm.data.samples import SampleEncoder, build
from mindspeed_llm.data.template import Template, TemplateFormat, load_template
from mindspeed_llm.data.tokenizer import load_facts
from tests.llm.smollm2 import smollm2_file

TALK = (
    Message("user", "Who are you?\n\n  Say it in 12 words, <filename> included."),
    Message("assistant", "I am SmolLM, a small model.\n```python\nprint('naïve 你好')\n```"),
    Message("user", "Thanks!"),
    Message("assistant", "You are welcome."),
)


@pytest.fixture(scope="module")
def facts():
    return load_facts(str(smollm2_file()))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_tokens_of_the_chat_template(facts, system):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(facts.backend),
        chat_template=facts.chat_template,
        eos_token=facts.eos,
        bos_token=facts.bos,
    )
    head = [{"role": "system", "content": system}] if system else []
    messages = head + [{"role": m.role, "content": m.content} for m in TALK]
    expected = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    # <filename> is a special token of this tokenizer: transformers takes it for one, and so do we
    # when parse_special is set; otherwise it stays what the user typed.
    encoder = TextEncoder(facts, parse_special=True)
    conversation = Conversation(TALK, system)
    chat = JinjaFormat(facts, parse_special=True)
    assert chat.trains_eos
    sample = build(SampleEncoder(encoder).encode([chat.render(conversation)])[0])
    assert sample.ids.tolist() == expected
    trained = tokenizer.decode(sample.ids[sample.labels != IGNORE_INDEX])
    assert trained == "".join(f"{m.content}{facts.eos}" for m in TALK[1::2])

    if system:
        by_template = TemplateFormat(Template(load_template("chatml"), facts))
        ours = build(SampleEncoder(encoder).encode([by_template.render(conversation)])[0])
        assert ours.ids.tolist() == expected[: len(ours.ids)]
        assert tokenizer.decode(expected[len(ours.ids) :]) == "\n"
        assert ours.labels.tolist() == sample.labels[: len(ours.ids)].tolist()

    plain = JinjaFormat(facts)
    text = TextEncoder(facts, parse_special=False)
    safe = build(SampleEncoder(text).encode([plain.render(conversation)])[0])
    assert facts.special["<filename>"] in sample.ids
    assert facts.special["<filename>"] not in safe.ids
    assert tokenizer.decode(safe.ids) == tokenizer.decode(sample.ids)
