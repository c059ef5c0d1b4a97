"""Samples: ids and labels of rendered conversations, and prompts as in training."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_llm.data import samples
from mindspeed_llm.data.chat import Segment
from mindspeed_llm.data.chat_jinja import JinjaFormat
from mindspeed_llm.data.conversation import Conversation, Message
from mindspeed_llm.data.encoder import TextEncoder
from mindspeed_llm.data.indexed import IGNORE_INDEX
from mindspeed_llm.data.samples import (
    Batch,
    EncodedSegment,
    PromptEncoder,
    SampleEncoder,
    build,
    end_of_answer,
    ends_with_stop_token,
)
from mindspeed_llm.data.template import (
    SHIPPED_PATH,
    Field,
    SlotFormatter,
    Template,
    TemplateFormat,
    load_template,
)
from mindspeed_llm.data.tokenizer import facts_of
from tests.small_tokenizers import byte_level, metaspace

ids = st.lists(st.integers(0, 60000), max_size=4)
parts = st.lists(ids.map(lambda found: np.array(found, np.uint32)), max_size=3)
segments = st.builds(EncodedSegment, parts, st.booleans(), st.none() | st.integers(0, 9))
tracks = st.lists(st.tuples(st.lists(segments, max_size=4), st.booleans()), max_size=5)


def labelled(track):
    """The ids and labels of one sequence, token by token."""
    found, labels = [], []
    for parts, is_completion, first_label in track:
        segment = [int(one) for part in parts for one in part]
        own = segment if is_completion else [IGNORE_INDEX] * len(segment)
        if segment and first_label is not None:
            own = [first_label, *own[1:]]
        found += segment
        labels += own
    return found, labels


@given(tracks=tracks)
def test_a_batch_is_its_sequences(tracks):
    chosen = np.array([is_chosen for _, is_chosen in tracks], bool)
    batch = Batch.of([track for track, _ in tracks], np.dtype("<u2"))
    right = [labelled(track) for track, is_chosen in tracks if is_chosen]
    joined = batch.concatenate(chosen)
    assert joined.ids.dtype == "<u2" and joined.column("ones").tolist() == [1] * len(joined.ids)
    assert joined.ids.tolist() == [one for found, _ in right for one in found]
    assert joined.column("labels").tolist() == [one for _, labels in right for one in labels]
    assert joined.lengths.tolist() == [len(found) for found, _ in right]
    assert batch.sizes.tolist() == [len(labelled(track)[0]) for track, _ in tracks]
    counts, last = joined.count_trained()
    assert counts.tolist() == [sum(one != IGNORE_INDEX for one in labels) for _, labels in right]
    for end, (_, labels) in zip(last.tolist(), right):
        assert ends_with_stop_token(np.array(labels), {end}) or not any(
            n != IGNORE_INDEX for n in labels
        )


texts = st.sampled_from(["", " ", "The quick", " brown", "42", "x" * 300, "</s>"])
some = st.lists(texts.filter(bool) | st.integers(1, 9), max_size=4)
written = st.lists(st.builds(Segment, some, st.booleans(), st.none()), max_size=3)
TOKENIZERS = {"bytes": byte_level(), "first": metaspace("first"), "always": metaspace("always")}


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("cached", [3, 20_000])
@given(blocks=st.lists(st.lists(written, max_size=3), max_size=4))
def test_the_cache_changes_nothing(kind, cached, blocks):
    encoder = TextEncoder(facts_of(TOKENIZERS[kind]), parse_special=False, accelerate=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "CACHED_TEXTS", cached)
        sample_encoder = SampleEncoder(encoder)
        for block in blocks:
            found = [[segment.parts for segment in track] for track in sample_encoder.encode(block)]
            fresh = [
                [segment.parts for segment in SampleEncoder(encoder).encode([t])[0]] for t in block
            ]
            assert str(found) == str(fresh)


fields = st.sampled_from(["content", "idx"]).map(Field)


@given(
    slots=st.lists(fields | st.sampled_from(["", "a", "b "]) | st.integers(0, 3), max_size=8),
    content=st.sampled_from(["", "c", "d e"]),
)
def test_adjacent_texts_are_one_part(slots, content):
    values = {"content": content}
    right = []
    for part in slots:
        part = values.get(part.name, "") if isinstance(part, Field) else part
        if isinstance(part, str) and right and isinstance(right[-1], str):
            right[-1] += part
        else:
            right.append(part)
    form = SlotFormatter(slots)
    assert form.apply(values) == [part for part in right if part != ""]
    assert form.apply(values) == form.apply(values), "filling leaves no trace"


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
    sample = build(SampleEncoder(encoder).encode([chat.render(whole)])[0])
    prompts = PromptEncoder(facts, name, thinking="false" if name == "qwen3" else "none")
    asked = prompts.encode(TALK, "Be.")
    assert sample.ids[: len(asked)].tolist() == asked
    assert (
        sample.labels[len(asked)] != IGNORE_INDEX and sample.labels[len(asked) - 1] == IGNORE_INDEX
    )
    assert name == "empty" or prompts.stop_ids


PHI = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\\n' }}{{ m.content }}<|im_end|>{{ '\\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant\\n' if add_generation_prompt else eos_token }}"
)
BARE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\\n' }}{% endfor %}"
STRICT = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"


@pytest.mark.parametrize("template", [CHAT, PHI, BARE])
@pytest.mark.parametrize("eos", ["<|im_end|>", "</s>"])
def test_the_end_of_an_answer_is_that_of_the_chat_template(template, eos):
    """Also where the tokenizer's eos is not what ends a turn (Phi, the base models of Qwen)."""
    tokenizer = byte_level(eos, template=template)
    facts = facts_of(tokenizer)
    found = end_of_answer(JinjaFormat(facts), TextEncoder(facts, parse_special=False))
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    whole = tokenizer.apply_chat_template(talk, tokenize=False)
    assert tokenizer.decode(found) == (whole[whole.rindex("b") + 1 :] if template != BARE else "")


@pytest.mark.parametrize("name", ["chatml", "glm4", "default", "phi3", "empty"])
def test_the_end_of_an_answer_is_that_of_the_template(name):
    """What chat templates put behind its end token, the shipped ones put before a question."""
    facts = facts_of(byte_level("</s>"))
    template = Template(load_template(name), facts)
    chat = TemplateFormat(template)
    found = end_of_answer(chat, TextEncoder(facts, parse_special=name == "empty"))
    assert found == ([] if name == "empty" else [template.eos_id])


def test_a_template_that_refuses_an_answer_has_no_end():
    facts = facts_of(byte_level(template=STRICT + CHAT))
    assert end_of_answer(JinjaFormat(facts), TextEncoder(facts, parse_special=False)) == []
