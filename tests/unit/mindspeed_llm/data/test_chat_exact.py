"""Templates against `apply_chat_template`: the same tokens, for every template there is a text of.

The Jinja texts state, independently of templates.json, how each model family writes a conversation.
"""

import pytest

from mindspeed_llm.data.chat_jinja import JinjaFormat
from mindspeed_llm.data.conversation import Conversation, Message
from mindspeed_llm.data.encoder import TextEncoder
from mindspeed_llm.data.indexed import IGNORE_INDEX
from mindspeed_llm.data.samples import SampleEncoder, build
from mindspeed_llm.data.template import Template, TemplateFormat, load_template
from mindspeed_llm.data.tokenizer import facts_of
from tests.small_tokenizers import byte_level, metaspace


def turns(user, assistant, system="", start=""):
    """Build a chat template from how each role is written ($ is the content)."""
    branches = {"user": user, "assistant": assistant, "system": system}
    text = "".join(
        f"{{% {'if' if role == 'user' else 'elif'} message.role == '{role}' %}}"
        + written.replace("$", "{{ message.content }}").replace("\n", "{{ '\\n' }}")
        for role, written in branches.items()
        if written
    )
    return f"{start}{{% for message in messages %}}{text}{{% endif %}}{{% endfor %}}"


CHATML = turns(
    "<|im_start|>user\n$<|im_end|>\n",
    "<|im_start|>assistant\n$<|im_end|>\n",
    "<|im_start|>system\n$<|im_end|>\n",
)
HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n$<|eot_id|>"
BOS = "{{ bos_token }}"
FORMATS = {
    "chatml": (CHATML, None, "<|im_end|>", "\n"),
    "qwen": (CHATML, None, "<|im_end|>", "\n"),
    "intern2": (BOS + CHATML, "<s>", "</s>", "\n"),
    "llama2": (
        turns("{{ bos_token }}[INST] $ [/INST]", " $ {{ eos_token }}"),
        "<s>",
        "</s>",
        "",
    ),
    "llama3": (
        turns(*(HEADER.format(r) for r in ("user", "assistant", "system")), start=BOS),
        "<|begin_of_text|>",
        "<|eot_id|>",
        "",
    ),
    "mistral": (turns("[INST] $ [/INST]", "${{ eos_token }}", start=BOS), "<s>", "</s>", ""),
    "mixtral": (turns(" [INST] $ [/INST]", " ${{ eos_token }}", start=BOS), "<s>", "</s>", ""),
    "gemma": (
        turns(
            "<start_of_turn>user\n$<end_of_turn>\n",
            "<start_of_turn>model\n$<end_of_turn>\n",
            start=BOS,
        ),
        "<bos>",
        "<eos>",
        "\n",
    ),
    "deepseek2": (
        turns("User: $\n\n", "Assistant: ${{ eos_token }}", "$\n\n", start=BOS),
        "<s>",
        "</s>",
        "",
    ),
    "deepseek3": (
        turns("<\uff5cUser\uff5c>$", "<\uff5cAssistant\uff5c>${{ eos_token }}", "$", start=BOS),
        "<s>",
        "</s>",
        "",
    ),
    "phi3": (
        turns("<|user|>\n$<|end|>\n", "<|assistant|>\n$<|end|>\n", "<|system|>\n$<|end|>\n"),
        None,
        "<|end|>",
        "\n",
    ),
    # The token behind the last answer, which the model stops at, is not part of the next turn.
    "glm4": (
        turns("<|user|>\n$", "<|assistant|>\n$", "<|system|>\n$", start="[gMASK]<sop>"),
        None,
        "<|endoftext|>",
        None,
    ),
    "baichuan2": (turns("<reserved_106>$", "<reserved_107>$", "$"), None, "</s>", None),
    "alpaca": (
        turns("### Instruction:\n$\n\n### Response:\n", "${{ eos_token }}\n\n", "$\n\n"),
        None,
        "</s>",
        "\n\n",
    ),
    "default": (turns("Human: $\nAssistant:", "${{ eos_token }}\n", "$\n"), None, "</s>", "\n"),
}
NO_SYSTEM = ("llama2", "mistral", "mixtral", "gemma")
CONVERSATIONS = {
    "one turn": [("user", "Who are you?"), ("assistant", "I am a small model.")],
    "two turns": [
        ("user", "How much is 12 + 30?"),
        ("assistant", "It is 42."),
        ("user", "And\n\n  in hex?\n"),
        ("assistant", "0x2A, na\u00efve \u4f60\u597d"),
    ],
}


def encode(chat, facts, conversation, parse_special=False):
    encoder = TextEncoder(facts, parse_special=parse_special)
    return build(SampleEncoder(encoder).encode([chat.render(conversation)])[0])


def conversation_of(messages, system):
    return Conversation(tuple(Message(*message) for message in messages), system=system)


def expected(tokenizer, messages, system):
    head = [{"role": "system", "content": system}] if system else []
    body = [{"role": role, "content": content} for role, content in messages]
    return tokenizer.apply_chat_template(head + body, tokenize=True, return_dict=False)


def tokenizers(bos, eos, template):
    yield "bytes", byte_level(eos, bos, template)
    for scheme in ("first", "always", "prepend"):
        yield scheme, metaspace(scheme, eos, bos, template)


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("name", FORMATS)
def test_template_gives_the_tokens_of_the_chat_template(name, messages):
    template, bos, eos, behind = FORMATS[name]
    system = "" if name in NO_SYSTEM else "Be brief."
    for kind, tokenizer in tokenizers(bos, eos, template):
        facts = facts_of(tokenizer, kind)
        chat = TemplateFormat(Template(load_template(name), facts))
        sample = encode(chat, facts, conversation_of(messages, system))
        right = expected(tokenizer, messages, system)
        ids = sample.ids.tolist()
        if behind is None:
            assert ids[-1] == facts.eos_id
            ids = ids[:-1]
        assert ids == right[: len(ids)], (kind, tokenizer.decode(ids), tokenizer.decode(right))
        assert tokenizer.decode(right[len(ids) :]).strip(" ") == (behind or "").strip(" ")


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("name", FORMATS)
def test_prompt_type_tokenizer_gives_the_tokens_of_the_chat_template(name, messages):
    template, bos, eos, _ = FORMATS[name]
    system = "" if name in NO_SYSTEM else "Be brief."
    generating = template + GENERATE.get(name, "")
    for kind, tokenizer in tokenizers(bos, eos, generating):
        facts = facts_of(tokenizer, kind)
        sample = encode(JinjaFormat(facts), facts, conversation_of(messages, system))
        assert sample.ids.tolist() == expected(tokenizer, messages, system), kind
        trained = tokenizer.decode(sample.ids[sample.labels != IGNORE_INDEX])
        for role, content in messages:
            assert (content.strip() in trained) == (role == "assistant"), (kind, trained)


IM_GENERATE = "{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"
GENERATE = {
    "chatml": IM_GENERATE,
    "qwen": IM_GENERATE,
    "intern2": IM_GENERATE,
    "llama3": "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>"
    "{{ '\\n\\n' }}{% endif %}",
    "gemma": "{% if add_generation_prompt %}<start_of_turn>model{{ '\\n' }}{% endif %}",
    "deepseek2": "{% if add_generation_prompt %}Assistant:{% endif %}",
    "deepseek3": "{% if add_generation_prompt %}<\uff5cAssistant\uff5c>{% endif %}",
    "phi3": "{% if add_generation_prompt %}<|assistant|>{{ '\\n' }}{% endif %}",
    "glm4": "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "baichuan2": "{% if add_generation_prompt %}<reserved_107>{% endif %}",
}
