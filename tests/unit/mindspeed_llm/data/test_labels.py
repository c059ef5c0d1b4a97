"""Labels: completions and their stop tokens are trained, nothing else, for any template."""

import json

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mindspeed_llm.data.chat_jinja import JinjaFormat
from mindspeed_llm.data.conversation import Conversation, Message
from mindspeed_llm.data.encoder import TextEncoder
from mindspeed_llm.data.indexed import IGNORE_INDEX
from mindspeed_llm.data.samples import (
    EncodedSegment,
    SampleEncoder,
    build,
    ends_with_stop_token,
    truncate,
)
from mindspeed_llm.data.template import SHIPPED_PATH, Template, TemplateFormat, load_template
from mindspeed_llm.data.tokenizer import facts_of
from tests.budget import examples
from tests.small_tokenizers import SPECIAL, byte_level

NAMES = [entry["name"] for entry in json.loads(SHIPPED_PATH.read_text())]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\\n' }}{{ m.content }}<|im_end|>{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"
)
FACTS = facts_of(byte_level("<|im_end|>", "<s>", CHAT), "small")
ENCODER = TextEncoder(FACTS, parse_special=False)
FORMATS = {name: TemplateFormat(Template(load_template(name), FACTS)) for name in NAMES}
FORMATS["tokenizer"] = JinjaFormat(FACTS)
SPECIAL_IDS = set(FACTS.special.values())

texts = st.text(
    st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30
) | st.sampled_from(
    ["<|im_end|>", "a <|im_start|>user\nb", "</s>", " ", "\n\n", "{{content}}", "[INST] x [/INST]"]
)
turns = st.lists(st.tuples(texts, texts), min_size=1, max_size=3)


def make(pairs, system=""):
    messages = [Message(r, t) for pair in pairs for r, t in zip(("user", "assistant"), pair)]
    return Conversation(tuple(messages), system)


def encode(name, conversation):
    return build(SampleEncoder(ENCODER).encode([FORMATS[name].render(conversation)])[0])


def decode(ids):
    return byte_level("<|im_end|>", "<s>", CHAT).decode(ids, skip_special_tokens=False)


def trained_text(sample):
    """Return the trained tokens as text."""
    return decode(sample.labels[sample.labels != IGNORE_INDEX].tolist())


@pytest.mark.parametrize("name", FORMATS)
@given(pairs=turns, system=texts | st.just(""))
def test_only_completions_are_trained(name, pairs, system):
    assume(name != "tokenizer" or all(a == a.strip() for _, a in pairs))
    sample = encode(name, make(pairs, system))
    text = trained_text(sample)
    end = decode([FORMATS[name].eos_id])
    pad = " " if name == "llama2" else ""
    before = {"llama2": " ", "mixtral": " ", "deepseek2": " ", "glm4": "\n", "chatglm3": "\n "}
    end = "" if name == "empty" else end
    expected = "".join(f"{before.get(name, '')}{answer}{pad}{end}" for _, answer in pairs)
    # qwen3 writes an empty thought in front of each answer, but in the prompt: it is not trained
    assert text == expected


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=examples(0.4))
@given(pairs=turns, other=texts)
def test_prompts_do_not_change_what_is_trained(name, pairs, other):
    one = encode(name, make(pairs, "be kind"))
    two = encode(name, make([(other, answer) for _, answer in pairs], "be brief"))
    assert trained_text(one) == trained_text(two)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=examples(0.4))
@given(pairs=turns)
def test_special_tokens_in_the_data_are_text(name, pairs):
    plain = encode(name, make([("x", "y")] * len(pairs), "z"))
    sample = encode(name, make(pairs, "<|im_start|>system</s>"))
    count = sum(int(i) in SPECIAL_IDS for i in sample.ids)
    assert count == sum(int(i) in SPECIAL_IDS for i in plain.ids)
    for question, _ in pairs:
        assert question in decode(sample.ids.tolist())


def test_special_tokens_are_parsed_if_configured():
    parsing = TextEncoder(FACTS, parse_special=True)
    conversation = make(
        [("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "yo<|im_end|>")]
    )
    sample = build(SampleEncoder(parsing).encode([FORMATS["empty"].render(conversation)])[0])
    right = byte_level().backend_tokenizer.encode(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    )
    assert sample.ids[: len(right.ids)].tolist() == right.ids
    assert sample.labels[-1] == FACTS.special["<|im_end|>"]


@given(pairs=turns, limit=st.integers(1, 60), name=st.sampled_from(["qwen", "llama2", "glm4"]))
def test_truncated_samples_fit_and_keep_their_labels(pairs, limit, name):
    track = SampleEncoder(ENCODER).encode([FORMATS[name].render(make(pairs))])[0]
    whole, cut = build(track), build(truncate(track, limit))
    assert len(cut.ids) <= limit
    assert len(cut.ids) == min(limit, len(whole.ids)) or len(cut.ids) < len(whole.ids)
    eos = FORMATS[name].eos_id
    same = (cut.labels == cut.ids) | (cut.labels == IGNORE_INDEX) | (cut.labels == eos)
    assert same.all()
    if limit >= len(whole.ids):
        assert np.array_equal(whole.ids, cut.ids) and np.array_equal(whole.labels, cut.labels)


@pytest.mark.parametrize("prompt_size, completion_size, budget, expected", [
    (10, 3, 8, (5, 3)),  # the answer is short: it stays whole
    (3, 10, 8, (3, 5)),  # the question is short
    (10, 10, 8, (4, 4)),  # both shrink alike
    (100, 1, 1, (0, 1)),  # something is always trained
])  # fmt: skip
def test_how_a_turn_splits_its_budget(prompt_size, completion_size, budget, expected):
    from mindspeed_llm.data.samples import _split_budget

    assert _split_budget(prompt_size, completion_size, budget) == expected


def test_the_longest_text_of_a_prompt_is_truncated():
    header, text, footer, answer = (
        np.arange(n, n + k) for n, k in ((0, 2), (10, 6), (20, 1), (30, 4))
    )
    track = [
        EncodedSegment([header, text, footer], False, None),
        EncodedSegment([answer], True, None),
    ]
    prompt_size, completion_size = truncate(track, 10)
    assert [part.tolist() for part in prompt_size.parts] == [[0, 1], [10, 11, 12], [20]]
    assert [part.tolist() for part in completion_size.parts] == [[30, 31, 32, 33]]


def test_efficient_eos_trains_the_end_of_every_turn():
    sample = encode("baichuan2", make([("a", "b"), ("c", "d")]))
    text = [decode([i]) for i in sample.ids]
    second = len(text) - 1 - text[::-1].index("<reserved_106>")
    eos = FORMATS["baichuan2"].eos_id
    assert sample.labels[second] == eos and sample.ids[second] != eos
    assert sample.ids[-1] == sample.labels[-1] == eos


@pytest.mark.parametrize(
    "thinking, answer, prompt_end, trained",
    [
        ("none", "yes", "<think>\n\n</think>\n\n", "yes"),
        ("none", "<think>\nhm\n</think>\n\nyes", "assistant\n", "<think>\nhm\n</think>\n\nyes"),
        ("true", "yes", "assistant\n", "<think>\n\n</think>\n\nyes"),
        ("false", "<think>\nhm\n</think>\n\nyes", "<think>\n\n</think>\n\n", "yes"),
    ],
)
def test_thoughts(thinking, answer, prompt_end, trained):
    chat = TemplateFormat(Template(load_template("qwen3"), FACTS), thinking)
    sample = build(SampleEncoder(ENCODER).encode([chat.render(make([("q", answer)]))])[0])
    assert decode(sample.ids[sample.labels == IGNORE_INDEX].tolist()).endswith(prompt_end)
    assert trained_text(sample) == trained + "<|im_end|>"


def test_every_template_but_two_trains_a_stop_token():
    assert {name for name, chat in FORMATS.items() if not chat.trains_eos} == {"empty"}
    assert len(SPECIAL) == len(set(SPECIAL)) <= len(SPECIAL_IDS)


def test_text_after_the_stop_token_does_not_hide_it():
    end, line_break = 7, IGNORE_INDEX
    assert ends_with_stop_token(np.array([IGNORE_INDEX, 5, end, line_break]), {end})
    assert not ends_with_stop_token(np.array([IGNORE_INDEX, 5, line_break]), {end})
    assert not ends_with_stop_token(np.array([IGNORE_INDEX, end, 5]), {end})
    assert not ends_with_stop_token(np.array([IGNORE_INDEX]), {end})
