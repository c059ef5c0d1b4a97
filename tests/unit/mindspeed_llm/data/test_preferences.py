"""Preferences: the layouts of TRL, OpenAI, ShareGPT and LLaMA-Factory give the same tokens."""

import numpy as np
import pytest

from mindspeed_llm.data.indexed import IGNORE_INDEX
from mindspeed_llm.data.instruction import InstructionData
from tests.small_tokenizers import byte_level

ASKED = [{"role": "user", "content": "How much is 12 + 30?"}]
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("It is 42.", "I know little."))
PARTS = {"user": "How much is 12 + 30?", "good": "It is 42.", "bad": "I know little."}


def v1(*entries):
    """Return messages as LLaMA-Factory writes them now."""
    return [{**e, "content": [{"type": "text", "value": e["content"]}]} for e in entries]


PAIRS = {
    "alpaca": (
        "AlpacaStylePairwiseHandler",
        {"instruction": PARTS["user"], "chosen": PARTS["good"], "rejected": PARTS["bad"]},
    ),
    "sharegpt": (
        "SharegptStylePairwiseHandler",
        {
            "conversations": [{"from": "human", "value": PARTS["user"]}],
            "chosen": {"from": "gpt", "value": PARTS["good"]},
            "rejected": {"from": "gpt", "value": PARTS["bad"]},
        },
    ),
    "sharegpt with messages": (
        "SharegptStylePairwiseHandler",
        {"messages": ASKED, "chosen": GOOD, "rejected": BAD},
    ),
    "messages": ("OpenAIPairwiseHandler", {"prompt": ASKED, "chosen": [GOOD], "rejected": [BAD]}),
    "implicit messages": (
        "OpenAIPairwiseHandler",
        {"chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]},
    ),
    "texts": (
        "OpenAIPairwiseHandler",
        {"prompt": PARTS["user"], "chosen": PARTS["good"], "rejected": PARTS["bad"]},
    ),
    "llama-factory": (
        "OpenAIPairwiseHandler",
        {"chosen_messages": v1(*ASKED, GOOD), "rejected_messages": v1(*ASKED, BAD)},
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_every_layout_of_pairs_gives_the_same_tokens(run, write_lines, name):
    _, expected = run(
        write_lines([PAIRS["alpaca"][1]], "a.jsonl"),
        handler_name=PAIRS["alpaca"][0],
        prompt_type="chatml",
        name="expected",
    )
    handler, record = PAIRS[name]
    summary, prefix = run(write_lines([record]), handler_name=handler, prompt_type="chatml")
    one, other = InstructionData(expected)[0], InstructionData(prefix)[0]
    assert all(np.array_equal(one[key], other[key]) for key in one)
    assert completion(other, "chosen_") == "It is 42.<|im_end|>"
    assert (summary.written, summary.ended) == (1, 1)


def completion(sample, side=""):
    """Return the text of what is trained."""
    ids, labels = sample[f"{side}input_ids"], sample[f"{side}labels"]
    return byte_level().decode(ids[labels != IGNORE_INDEX].tolist())


def test_pairs_in_a_template_that_ends_with_a_line_break(run, write_lines):
    """As tokenizers' own do: the line break is no prompt that a completion would follow."""
    from mindspeed_llm.data.tokenizer import facts_of

    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    talk = {"prompt": [*ASKED, BAD, *ASKED], "chosen": GOOD, "rejected": BAD}
    _, prefix = run(
        write_lines([talk]),
        handler_name="OpenAIPairwiseHandler",
        prompt_type="tokenizer",
        facts=facts_of(byte_level(template=template), "small"),
    )
    sample = InstructionData(prefix)[0]
    assert completion(sample, "chosen_") == "It is 42.<|im_end|>"
    assert completion(sample, "rejected_") == "I know little.<|im_end|>"


def test_the_prompt_of_texts_is_their_common_beginning(run, write_lines):
    record = {"chosen": "Who are you? I am a dog.", "rejected": "Who are you? I know little."}
    _, prefix = run(
        write_lines([record]), handler_name="OpenAIPairwiseHandler", prompt_type="empty"
    )
    sample = InstructionData(prefix)[0]
    assert completion(sample, "chosen_") == " am a dog."
    assert completion(sample, "rejected_") == " know little."


UNUSABLE = {
    "the prompts of chosen and rejected differ": {
        "chosen": [{"role": "user", "content": "other"}, GOOD],
        "rejected": [*ASKED, BAD],
    },
    "chosen and rejected are the same": {"chosen": [*ASKED, GOOD], "rejected": [*ASKED, GOOD]},
    "an answer is empty": {
        "chosen": [*ASKED, {"role": "assistant", "content": ""}],
        "rejected": [*ASKED, BAD],
    },
}


def test_pairs_that_cannot_be_used_are_counted(run, write_lines):
    good = {"chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]}
    summary, prefix = run(
        write_lines([good, *UNUSABLE.values()]),
        handler_name="OpenAIPairwiseHandler",
        prompt_type="chatml",
    )
    assert {reason: tally.count for reason, tally in summary.skipped.items()} == dict.fromkeys(
        UNUSABLE, 1
    )
    assert len(InstructionData(prefix)) == 1


@pytest.mark.parametrize(
    "handler, record",
    [
        ("OpenAIKTOHandler", {"prompt": ASKED, "completion": [GOOD]}),
        ("OpenAIKTOHandler", {"prompt": PARTS["user"], "completion": PARTS["good"]}),
        ("SharegptStyleKTOHandler", {"messages": [*ASKED, GOOD]}),
    ],
)
def test_labels_of_unpaired_completions(run, write_lines, handler, record):
    lines = [{**record, "label": label} for label in (True, False, True)]
    # The second is longer than the limit, and its label is dropped with it.
    lines.insert(1, {**lines[1]})
    key = "completion" if "completion" in record else "messages"
    long = {"role": "assistant", "content": "word " * 99}
    lines[1][key] = [*ASKED, long] if key == "messages" else [long]
    summary, prefix = run(
        write_lines(lines),
        handler_name=handler,
        prompt_type="chatml",
        seq_length=90,
        append_eod=True,
    )
    data = InstructionData(prefix)
    assert data.kind == "kto" and summary.written == 3
    assert [one["desirable"].tolist() for one in data] == [[1], [0], [1]]
    assert completion(data[0]).startswith("It is 42.<|im_end|>")


def test_labels_must_be_true_or_false(run, write_lines):
    from mindspeed.config import ConfigError

    record = {"prompt": "a", "completion": "b", "label": "yes"}
    with pytest.raises(ConfigError, match="line 1: label holds text: give true or false"):
        run(write_lines([record]), handler_name="OpenAIKTOHandler", prompt_type="chatml")


def test_steps_as_trl_writes_them(run, write_lines):
    """They give what the same steps in one text with placeholders give."""
    stepwise = {"prompt": "12 + 30?", "completions": ["12 + 30", "It is 42."]}
    text = {"input": "12 + 30?\n12 + 30x\nIt is 42.x", "value": ["+", "("]}
    tokens = {"placeholder_token": "x", "reward_tokens": ("+", "(")}
    source = write_lines([{**stepwise, "labels": [True, False]}])
    _, one = run(source, handler_name="StepwiseProcessRewardHandler", name="one", **tokens)
    source = write_lines([text], "b.jsonl")
    _, two = run(source, handler_name="AlpacaStyleProcessRewardHandler", name="two", **tokens)
    found, expected = InstructionData(one)[0], InstructionData(two)[0]
    assert all(np.array_equal(found[key], expected[key]) for key in expected)
    assert (found["labels"] != IGNORE_INDEX).sum() == 2
