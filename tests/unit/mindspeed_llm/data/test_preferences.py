"""Preferences: the layouts of TRL, OpenAI, ShareGPT and LLaMA-Factory give the same tokens."""

import numpy as np
import pytest

from mindspeed.config import ConfigError
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
    "conversations with their question": (
        "OpenAIPairwiseHandler",
        {"prompt": PARTS["user"], "chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]},
    ),
    "conversations with their prompt": (
        "OpenAIPairwiseHandler",
        {"prompt": ASKED, "chosen": [*ASKED, GOOD], "rejected": v1(*ASKED, BAD)},
    ),
    "fine-tuning of OpenAI": (
        "OpenAIPairwiseHandler",
        {
            "input": {"messages": ASKED, "tools": []},
            "preferred_output": [GOOD],
            "non_preferred_output": [BAD],
        },
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


def test_a_question_may_be_one_of_several_in_its_conversations(run, write_lines):
    """As in TRL, all of the conversation but the last answer is the prompt then."""
    before = [{"role": "system", "content": "Be brief."}, *ASKED, BAD, *ASKED]
    whole = {"prompt": before, "chosen": GOOD, "rejected": BAD}
    text = {"prompt": PARTS["user"], "chosen": [*before, GOOD], "rejected": [*before, BAD]}
    samples = []
    for name, record in (("a", whole), ("b", text)):
        source = write_lines([record], f"{name}.jsonl")
        options = {"handler_name": "OpenAIPairwiseHandler", "prompt_type": "chatml"}
        samples.append(InstructionData(run(source, name=name, **options)[1])[0])
    assert all(np.array_equal(samples[0][key], samples[1][key]) for key in samples[0])


def test_instructions_to_the_system_may_be_in_the_prompt_alone(run, write_lines):
    system = {"role": "system", "content": "Be brief."}
    whole = {"prompt": [system, *ASKED], "chosen": GOOD, "rejected": BAD}
    repeated = {"prompt": [system, *ASKED], "chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]}
    samples = []
    for name, record in (("a", whole), ("b", repeated)):
        source = write_lines([record], f"{name}.jsonl")
        options = {"handler_name": "OpenAIPairwiseHandler", "prompt_type": "chatml"}
        samples.append(InstructionData(run(source, name=name, **options)[1])[0])
    assert all(np.array_equal(samples[0][key], samples[1][key]) for key in samples[0])


@pytest.mark.parametrize("answer", [{"content": "yes"}, {"role": "asistant", "content": "yes"}])
def test_an_answer_of_a_wrong_role_is_an_error_and_not_skipped(run, write_lines, answer):
    record = {"prompt": ASKED, "chosen": [answer], "rejected": [BAD]}
    with pytest.raises(ConfigError, match="role"):
        run(write_lines([record]), handler_name="OpenAIPairwiseHandler", prompt_type="chatml")


def test_an_answer_to_a_conversation_may_be_a_list_of_one_message(run, write_lines):
    options = {"handler_name": "SharegptStylePairwiseHandler", "prompt_type": "chatml"}
    record = {"messages": ASKED, "chosen": [GOOD], "rejected": [BAD]}
    sample = InstructionData(run(write_lines([record]), **options)[1])[0]
    assert completion(sample, "chosen_") == "It is 42.<|im_end|>"
    assert completion(sample, "rejected_") == "I know little.<|im_end|>"
    record["chosen"] = [*ASKED, GOOD]
    with pytest.raises(ConfigError, match="chosen holds 2 messages: give the answer alone, and wh"):
        run(write_lines([record]), name="two", **options)


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text", None])
def test_parts_of_text_have_several_names(run, write_lines, kind):
    part = {"type": kind, "text": GOOD["content"]}
    good = {"role": "assistant", "content": [part]}
    record = {"prompt": ASKED, "chosen": [good], "rejected": [BAD]}
    options = {"handler_name": "OpenAIPairwiseHandler", "prompt_type": "chatml"}
    sample = InstructionData(run(write_lines([record]), **options)[1])[0]
    assert completion(sample, "chosen_") == "It is 42.<|im_end|>"


def test_tools_of_an_input(run, write_lines):
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    record = {"input": {"messages": ASKED, "tools": [tool]}}
    record |= {"preferred_output": [GOOD], "non_preferred_output": [BAD]}
    options = {"handler_name": "OpenAIPairwiseHandler", "prompt_type": "qwen"}
    ids = InstructionData(run(write_lines([record]), **options)[1])[0]["chosen_input_ids"]
    assert '{"name": "add", "parameters": {}}' in byte_level().decode(ids.tolist())


UNUSABLE = {
    "the prompt is not in the conversations of its answers": {
        "prompt": "other",
        "chosen": [*ASKED, GOOD],
        "rejected": [*ASKED, BAD],
    },
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
    records = [{"prompt": PARTS["user"], **record} for record in (good, *UNUSABLE.values())]
    summary, prefix = run(
        write_lines(records),
        handler_name="OpenAIPairwiseHandler",
        prompt_type="chatml",
    )
    assert {reason: tally.count for reason, tally in summary.skipped.items()} == dict.fromkeys(
        UNUSABLE, 1
    )
    assert len(InstructionData(prefix)) == 1


@pytest.mark.parametrize("kind", ["with their question", "after a prompt", "without a prompt"])
def test_pairs_whose_calls_of_tools_differ_are_left_out(run, write_lines, kind):
    """Only the last answer is trained: what comes before it has to be the same on both sides."""

    def side(city, answer):
        called = {"function": {"name": "weather", "arguments": f'{{"city": "{city}"}}'}}
        call = {"role": "assistant", "content": "", "tool_calls": [called]}
        return [call, {"role": "tool", "content": "It rains."}, answer]

    def record(chosen, rejected):
        asked = [] if kind == "after a prompt" else ASKED
        sides = {"chosen": [*asked, *chosen], "rejected": [*asked, *rejected]}
        return sides if kind == "without a prompt" else {"prompt": ASKED, **sides}

    pairs = [(side("Rome", GOOD), side(city, BAD)) for city in ("Rome", "Paris")]
    options = {"handler_name": "OpenAIPairwiseHandler", "prompt_type": "qwen"}
    summary, _ = run(write_lines([record(*pair) for pair in pairs]), **options)
    assert summary.written == 1
    assert [*summary.skipped] == ["the prompts of chosen and rejected differ"]


@pytest.mark.parametrize(
    "handler, record",
    [
        ("OpenAIKTOHandler", {"prompt": ASKED, "completion": [GOOD]}),
        ("OpenAIKTOHandler", {"prompt": PARTS["user"], "completion": PARTS["good"]}),
        ("OpenAIKTOHandler", {"prompt": PARTS["user"], "completion": [*ASKED, GOOD]}),
        ("AlpacaStyleKTOHandler", {"prompt": PARTS["user"], "answer": PARTS["good"]}),
        ("SharegptStyleKTOHandler", {"messages": [*ASKED, GOOD]}),
    ],
)
def test_labels_of_unpaired_completions(run, write_lines, handler, record):
    column = "kto_tag" if len(record) == 2 else "label"
    lines = [{**record, column: label} for label in (True, False, True)]
    # The second is longer than the limit, and its label is dropped with it.
    lines.insert(1, {**lines[1]})
    text = "word " * 99
    long = {"role": "assistant", "content": text}
    replaced = {"completion": [long], "messages": [*ASKED, long], "answer": text}
    lines[1] |= {key: value for key, value in replaced.items() if key in record}
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
    with pytest.raises(ConfigError, match="line 1: label holds the text 'yes': give true or false"):
        run(write_lines([record]), handler_name="OpenAIKTOHandler", prompt_type="chatml")


def test_labels_of_a_table_are_texts(run, tmp_path):
    lines = ["prompt,completion,label", "a,b,true", "a,c,FALSE", "a,d,1", "a,e,0"]
    (tmp_path / "judged.csv").write_text("\n".join(lines) + "\n")
    source = str(tmp_path / "judged.csv")
    _, prefix = run(source, handler_name="OpenAIKTOHandler", prompt_type="chatml")
    assert [int(sample["desirable"][0]) for sample in InstructionData(prefix)] == [1, 0, 1, 0]


def test_a_question_in_a_column_that_is_not_read_is_not_lost(run, write_lines):
    """A pair without its prompt would train answers to nothing."""
    from mindspeed.config import ConfigError

    source = write_lines([{"instruction": "why", "chosen": "It is so.", "rejected": "It is not."}])
    values = {"handler_name": "OpenAIPairwiseHandler", "prompt_type": "chatml"}
    expected = "line 1: has no prompt, and instruction is not read: give --handler-name Alpaca"
    with pytest.raises(ConfigError, match=expected):
        run(source, **values)
    _, named = run(source, map_keys='{"prompt": "instruction"}', name="named", **values)
    _, off = run(source, map_keys='{"prompt": ""}', name="off", **values)
    lengths = [InstructionData(prefix)[0]["chosen_input_ids"].size for prefix in (named, off)]
    assert lengths[0] != lengths[1]
    messages = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "It is so."}]
    other = [messages[0], {"role": "assistant", "content": "It is not."}]
    both = {"instruction": "why", "chosen": messages, "rejected": other}
    summary, _ = run(write_lines([both], "b.jsonl"), name="both", **values)
    assert summary.written == 1


@pytest.mark.parametrize("column", ["question", "input"])
def test_tables_do_not_hide_a_question_that_is_not_read(run, tmp_path, column):
    """Of a table only the columns that are used are read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from mindspeed.config import ConfigError

    record = {"system": "", column: "why", "chosen": "It is so.", "rejected": "It is not."}
    pq.write_table(pa.Table.from_pylist([record]), tmp_path / "pairs.parquet")
    values = {"handler_name": "OpenAIPairwiseHandler", "prompt_type": "chatml"}
    with pytest.raises(ConfigError, match=f"row 1: has no prompt, and {column} is not read: name"):
        run(str(tmp_path / "pairs.parquet"), **values)


def test_tables_fill_no_fields_into_tools_and_calls(run, write_lines, tmp_path):
    """All structs of a column of parquet have the same fields, null where a record has none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def record(name, kind):
        calls = [{"type": "function", "function": {"name": "f", "arguments": {name: "x"}}}]
        parameters = {"type": "object", "properties": {name: {"type": kind, "enum": ["x", None]}}}
        return {
            "prompt": "why",
            "chosen": [{"role": "assistant", "content": None, "tool_calls": calls}],
            "rejected": [{"role": "assistant", "content": "no"}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
        }

    records = [record("city", "string"), record("unit", "null")]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "calls.parquet")
    values = {"handler_name": "OpenAIPairwiseHandler", "prompt_type": "qwen"}
    _, table = run(str(tmp_path / "calls.parquet"), name="table", **values)
    _, lines = run(write_lines(records), name="lines", **values)
    for one, other in zip(InstructionData(table), InstructionData(lines), strict=True):
        for key in ("chosen_input_ids", "chosen_labels", "rejected_input_ids"):
            assert one[key].tolist() == other[key].tolist()


def test_texts_without_a_common_beginning_are_no_answers_to_nothing(run, write_lines):
    records = [{"chosen": f"\n\nHuman: Hi\n\nAssistant: {n}", "rejected": "Bye"} for n in range(2)]
    records.append({"chosen": "Human: Hi\nAssistant: yes", "rejected": "Human: Hi\nAssistant: no"})
    values = {"handler_name": "OpenAIPairwiseHandler", "prompt_type": "chatml"}
    summary, _ = run(write_lines(records), **values)
    assert summary.written == 1
    assert summary.skipped["the prompts of chosen and rejected differ"].count == 2
    switched_off, _ = run(write_lines(records), map_keys='{"prompt": ""}', name="off", **values)
    assert switched_off.written == 3


@pytest.mark.parametrize("prompt_type", ["chatml", "tokenizer"])
@pytest.mark.parametrize("handler", ["OpenAIPairwiseHandler", "OpenAIKTOHandler"])
def test_packing_is_left_to_training(run, write_lines, handler, prompt_type):
    """With templates of ours and with that of the tokenizer."""
    from mindspeed.config import ConfigError

    record = {"prompt": "a", "chosen": "b", "rejected": "c", "completion": "b", "label": True}
    packed = {"pack": True, "neat_pack": True, "seq_length": 64}
    with pytest.raises(ConfigError, match="^--pack: .* --variable-seq-lengths to posttrain_gpt"):
        run(write_lines([record]), handler_name=handler, prompt_type=prompt_type, **packed)


@pytest.mark.parametrize(
    "handler, other",
    [
        ("AlpacaStylePairwiseHandler", "OpenAIPairwiseHandler"),
        ("AlpacaStyleKTOHandler", "OpenAIKTOHandler"),
        ("PPOAlpacaStyleInstructionHandler", "OpenAIPromptHandler"),
    ],
)
def test_prompts_of_messages_have_their_handler(run, write_lines, handler, other):
    from mindspeed.config import ConfigError

    record = {"prompt": ASKED, "chosen": "a", "rejected": "b", "answer": "a", "label": True}
    with pytest.raises(ConfigError, match=f"line 1: prompt holds .* give --handler-name {other}"):
        run(write_lines([record]), handler_name=handler, prompt_type="chatml")


def test_answers_of_messages_have_their_handler(run, write_lines):
    from mindspeed.config import ConfigError

    for answer in ([{"role": "assistant", "content": "a"}], {"from": "gpt", "value": "a"}):
        record = {"prompt": "why", "chosen": answer, "rejected": "b"}
        with pytest.raises(ConfigError, match="chosen holds .* give --handler-name OpenAIPairwise"):
            run(
                write_lines([record]),
                handler_name="AlpacaStylePairwiseHandler",
                prompt_type="chatml",
            )


def test_a_handler_that_would_not_read_the_question_is_not_named(run, write_lines):
    from mindspeed.config import ConfigError

    record = {"system": "s", "question": "q", "chosen": "a", "rejected": "b"}
    options = {"handler_name": "AlpacaStylePairwiseHandler", "prompt_type": "chatml"}
    with pytest.raises(ConfigError, match=r"has no column instruction .* with --map-keys$"):
        run(write_lines([record]), **options)
    summary, _ = run(write_lines([record]), map_keys='{"prompt": "question"}', **options)
    assert summary.written == 1


def test_a_handler_that_fits_the_columns_is_named(run, write_lines):
    from mindspeed.config import ConfigError

    record = {"instruction": "a", "output": "b", "kto_tag": True}
    with pytest.raises(ConfigError) as caught:
        run(
            write_lines([record]),
            handler_name="SharegptStyleKTOHandler",
            prompt_type="chatml",
        )
    assert str(caught.value).endswith(
        "with --map-keys, or give --handler-name AlpacaStyleKTOHandler, which fits these"
    )


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


def test_pairs_that_are_cut_keep_one_prompt(run, write_lines):
    """However long the other answer is; and pairs that are the same afterwards are counted."""
    asked, start = "how " * 40, "well " * 60
    records = [
        {"instruction": asked, "chosen": "It is 42.", "rejected": start},
        {"instruction": asked, "chosen": start, "rejected": start + "no"},
        {"instruction": "why", "chosen": "It is 42.", "rejected": start},
    ]
    summary, prefix = run(
        write_lines(records),
        handler_name="AlpacaStylePairwiseHandler",
        prompt_type="chatml",
        seq_length=90,
        too_long="cut",
    )
    assert summary.written == 2 and summary.truncated.count == 2
    assert summary.skipped["chosen and rejected are the same"].count == 1
    for number, sample in enumerate(InstructionData(prefix)):
        ids, labels = (
            {side: sample[f"{side}_{key}"] for side in ("chosen", "rejected")}
            for key in ("input_ids", "labels")
        )
        assert max(map(len, ids.values())) == 90
        given = {side: ids[side][labels[side] == IGNORE_INDEX].tolist() for side in ids}
        given["chosen"] = given["chosen"][: len(given["rejected"])]  # less what ends the turn
        assert given["chosen"] == given["rejected"], number
        assert completion(sample, "chosen_") == "It is 42.<|im_end|>"


def test_parts_of_a_message_that_are_no_text(run, write_lines):
    from mindspeed.config import ConfigError

    def pair(kind):
        entry = {"role": "assistant", "content": [{"type": kind, "value": "a.png"}]}
        return {"chosen_messages": [*ASKED, entry], "rejected_messages": [*ASKED, BAD]}

    options = {"handler_name": "OpenAIPairwiseHandler", "prompt_type": "chatml"}
    with pytest.raises(ConfigError, match="a message holds image_url: only text"):
        run(write_lines([pair("image_url")]), **options)
    _, prefix = run(write_lines([pair("reasoning")]), **options)
    assert completion(InstructionData(prefix)[0], "chosen_").startswith("<think>\na.png\n</think>")


SYSTEM = "You are a pirate."
COLUMNS_OF = {
    "OpenAIPairwiseHandler": {"chosen": PARTS["good"], "rejected": PARTS["bad"]},
    "OpenAIKTOHandler": {"completion": PARTS["good"], "label": True},
    "OpenAIPromptHandler": {"answer": "42"},
    "OpenAIInstructionHandler": {"messages": [*ASKED, GOOD]},
}


@pytest.mark.parametrize("handler", COLUMNS_OF)
def test_a_column_may_hold_the_system_text(run, write_lines, handler):
    """As in orca_dpo_pairs; beside messages of the system it comes before them, or counts once."""
    record = {"prompt": ASKED, **COLUMNS_OF[handler]}
    key = "messages" if "messages" in record else "prompt"
    samples = []
    for name, column, messages in (
        ("in the messages", "", [SYSTEM]),
        ("in the column", SYSTEM, []),
        ("in both", SYSTEM, [SYSTEM]),
        ("more in the messages", SYSTEM, ["Be brief."]),
    ):
        said = [{"role": "system", "content": text} for text in messages]
        source = write_lines(
            [{**record, key: said + record[key], "system": column}], f"{name}.jsonl"
        )
        _, prefix = run(source, name=name, handler_name=handler, prompt_type="chatml")
        samples.append(InstructionData(prefix)[0])
    key = next(key for key in samples[0] if key.endswith("input_ids"))
    texts = [byte_level().decode(sample[key].tolist()) for sample in samples]
    assert texts[0] == texts[1] == texts[2] and SYSTEM in texts[0]
    assert texts[3] == texts[0].replace(SYSTEM, f"{SYSTEM}\nBe brief.")


def test_a_system_text_that_map_keys_leave_out_is_warned_of(run, write_lines, caplog):
    record = {"question": "a", "chosen": "b", "rejected": "c", "system": SYSTEM, "history": []}
    source = write_lines([record])
    for name, more, warnings in (
        ("left out", "", ["the column system is not read, as --map-keys does not name it"]),
        ("off", ', "system": ""', []),
        ("read", ', "system": "system"', []),
    ):
        caplog.clear()
        run(
            source,
            name=name,
            handler_name="AlpacaStylePairwiseHandler",
            prompt_type="chatml",
            map_keys=f'{{"prompt": "question"{more}}}',
        )
        assert [line.message[: len(w)] for line, w in zip(caplog.records, warnings)] == warnings
        assert len(caplog.records) == len(warnings)
