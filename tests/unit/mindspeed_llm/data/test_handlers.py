"""Handlers: which columns they read, what they make of a record, and what they refuse."""

import json

import numpy as np
import pytest

from mindspeed.config import ConfigError
from mindspeed_llm.data.indexed import IGNORE_INDEX, IndexedTokens
from mindspeed_llm.data.instruction import InstructionData
from mindspeed_llm.data.tokenizer import facts_of
from tests.small_tokenizers import byte_level

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\\n' }}{{ m.content }}<|im_end|>{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"
)
ALPACA = {"instruction": "Add.", "input": "1 2", "output": "3"}
SHAREGPT = {
    "conversations": [
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Ho"},
        {"from": "human", "value": "Again"},
        {"from": "gpt", "value": "Ho ho"},
    ],
    "system": "Be jolly.",
}
OPENAI = {
    "messages": [
        {"role": "system", "content": "Be exact."},
        {"role": "user", "content": "What is the time?"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}]},
        {"role": "tool", "content": "12:00"},
        {"role": "assistant", "reasoning_content": "Noon.", "content": "It is noon."},
    ],
    "tools": [{"type": "function", "function": {"name": "clock"}}],
}  # fmt: skip


def decode(ids):
    return byte_level().decode([int(i) for i in ids], skip_special_tokens=False)


def parts(sample, side=""):
    """The prompt and the answer of a sample, as text."""
    ids, labels = sample[f"{side}input_ids"], sample[f"{side}labels"]
    return decode(ids[labels == IGNORE_INDEX]), decode(ids[labels != IGNORE_INDEX])


@pytest.mark.parametrize(
    "record, map_keys, prompt",
    [
        (ALPACA, "", "Add.\n1 2"),
        ({"prompt": "P", "response": "3"}, "", "P"),
        ({"prompt": "P", "input": "I", "answer": "3"}, "", "P\nI"),
        (ALPACA, '{"prompt": "instruction", "query": "", "response": "output"}', "Add."),
        (ALPACA, '{"prompt": "input", "query": "", "response": "output"}', "1 2"),
        ({**ALPACA, "input": None}, "", "Add."),
        ({**ALPACA, "input": ""}, "", "Add."),
    ],
)
def test_alpaca(run, write_lines, record, map_keys, prompt):
    options = {"handler_name": "AlpacaStyleInstructionHandler", "prompt_type": "alpaca"}
    summary, prefix = run(write_lines([record]), map_keys=map_keys, **options)
    asked, answered = parts(InstructionData(prefix)[0])
    assert asked.endswith(f"### Instruction:\n{prompt}\n\n### Response:\n")
    assert answered == "3<|im_end|>"
    assert (summary.records, summary.written, summary.ended) == (1, 1, 1)


def test_alpaca_history_and_system(run, write_lines):
    record = {**ALPACA, "history": [["q1", "a1"], ["q2", "a2"]], "system": "S!"}
    options = {"handler_name": "AlpacaStyleInstructionHandler", "prompt_type": "chatml"}
    _, prefix = run(write_lines([record]), **options)
    asked, answered = parts(InstructionData(prefix)[0])
    assert answered == "a1<|im_end|>a2<|im_end|>3<|im_end|>"
    assert asked.startswith("<|im_start|>system\nS!<|im_end|>\n<|im_start|>user\nq1<|im_end|>\n")


def test_sharegpt_with_tags(run, write_lines):
    renamed = {
        "chat": [
            {"role": {"human": "user", "gpt": "bot"}[m["from"]], "text": m["value"]}
            for m in SHAREGPT["conversations"]
        ]
    }
    tags = {"role_tag": "role", "content_tag": "text", "user_tag": "user", "assistant_tag": "bot"}
    options = {"handler_name": "SharegptStyleInstructionHandler", "prompt_type": "chatml"}
    _, one = run(write_lines([{**SHAREGPT, "system": ""}]), name="one", **options)
    map_keys = json.dumps({"messages": "chat", "tags": tags})
    _, two = run(write_lines([renamed], "b.jsonl"), name="two", map_keys=map_keys, **options)
    first, second = InstructionData(one)[0], InstructionData(two)[0]
    assert all(np.array_equal(first[key], second[key]) for key in first)
    assert parts(first)[1] == "Ho<|im_end|>Ho ho<|im_end|>"


def test_openai_with_tools(run, write_lines):
    options = {"handler_name": "OpenAIInstructionHandler", "prompt_type": "qwen"}
    _, prefix = run(write_lines([OPENAI]), **options)
    asked, answered = parts(InstructionData(prefix)[0])
    assert "Be exact.\n\n# Tools" in asked and '"name": "clock"' in asked
    assert "<tool_response>\n12:00\n</tool_response>" in asked
    call = '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'
    assert answered == f"{call}<|im_end|><think>\nNoon.\n</think>\n\nIt is noon.<|im_end|>"


def test_pairs_train_the_last_completion_only(run, write_lines):
    alpaca = {"question": "Q", "system": "S", "chosen": "good", "rejected": "bad"}
    options = {"prompt_type": "chatml", "name": "alpaca"}
    map_keys = '{"prompt": "question", "query": "", "system": "system"}'
    _, prefix = run(
        write_lines([alpaca]),
        handler_name="AlpacaStylePairwiseHandler",
        map_keys=map_keys,
        **options,
    )
    pair = InstructionData(prefix)
    assert pair.kind == "pairwise"
    assert parts(pair[0], "chosen_")[1] == "good<|im_end|>"
    assert parts(pair[0], "rejected_")[1] == "bad<|im_end|>"
    assert parts(pair[0], "chosen_")[0] == parts(pair[0], "rejected_")[0]

    talk = {
        "conversations": [*SHAREGPT["conversations"], {"from": "human", "value": "More?"}],
        "chosen": {"from": "gpt", "value": "yes"},
        "rejected": {"from": "gpt", "value": "no"},
    }
    options["name"] = "sharegpt"
    source = write_lines([talk], "talk.jsonl")
    _, prefix = run(source, handler_name="SharegptStylePairwiseHandler", **options)
    sample = InstructionData(prefix)[0]
    assert parts(sample, "chosen_")[1] == "yes<|im_end|>"
    assert parts(sample, "rejected_")[1] == "no<|im_end|>"
    assert "Ho ho<|im_end|>" in parts(sample, "chosen_")[0]


def test_prompts_have_no_answer(run, write_lines):
    options = {"handler_name": "PPOAlpacaStyleInstructionHandler", "prompt_type": "chatml"}
    _, prefix = run(write_lines([{"instruction": "Say hi."}]), **options)
    data = InstructionData(prefix)
    assert data.kind == "prompts"
    expected = "<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n"
    assert decode(data[0]["input_ids"]) == expected


def test_process_reward(run, write_lines):
    record = {"input": "step one Z step two Z done", "value": ["+", "-"]}
    options = {"handler_name": "AlpacaStyleProcessRewardHandler", "placeholder_token": "Z"}
    _, prefix = run(write_lines([record]), reward_tokens=("+", "-"), **options)
    sample = InstructionData(prefix)[0]
    positions = np.flatnonzero(sample["labels"] != IGNORE_INDEX)
    assert [decode([i]) for i in sample["input_ids"][positions]] == ["Z", "Z"]
    assert decode(sample["labels"][positions]) == "+-"
    with pytest.raises(ConfigError, match="--placeholder-token 'step' is .* tokens"):
        run(write_lines([record]), **{**options, "placeholder_token": "step"})
    with pytest.raises(ConfigError, match="line 1: value holds '-', which is no --reward-tokens"):
        run(write_lines([record]), reward_tokens=("+",), **options)


def test_documents(run, write_lines):
    records = [{"text": "one two", "title": "t"}, {"text": "", "title": "u"}]
    summary, prefix = run(write_lines(records), json_keys=("text", "title"), append_eod=True)
    texts = IndexedTokens(f"{prefix}_text_document")
    assert [decode(ids) for ids in texts] == ["one two<|im_end|>"]
    assert texts.documents.tolist() == [0, 1, 1]
    titles = IndexedTokens(f"{prefix}_title_document")
    assert [decode(ids) for ids in titles] == ["t<|im_end|>", "u<|im_end|>"]
    assert (summary.records, summary.written) == (2, 2)


@pytest.mark.parametrize("key", ["weight", "loss"])
@pytest.mark.parametrize("prompt_type", ["chatml", "glm4", "tokenizer"])
def test_answers_without_weight_are_not_trained(run, write_lines, prompt_type, key):
    """As OpenAI and ms-swift do; the tokens are the same, and so are the labels of the others."""
    options = {"handler_name": "OpenAIInstructionHandler", "prompt_type": prompt_type}
    options["facts"] = facts_of(byte_level(template=CHATML))
    questions = [{"role": "user", "content": text, "weight": 1} for text in ("A?", "B?", "C?")]
    found = []
    for weights in ((None, None, None), (0, 1, None), (1, 0, 0), (0, 0, 0)):
        answers = [
            {"role": "assistant", "content": text} | ({} if weight is None else {key: weight})
            for text, weight in zip(("one", "two", "three"), weights)
        ]
        messages = [message for pair in zip(questions, answers) for message in pair]
        name = f"{prompt_type}{len(found)}"
        if weights == (0, 0, 0):
            with pytest.raises(ConfigError, match="none of 1 records can be used"):
                run(write_lines([{"messages": messages}]), name=name, **options)
            break
        _, prefix = run(write_lines([{"messages": messages}]), name=name, **options)
        (sample,) = InstructionData(prefix)
        labels = sample["labels"][sample["labels"] != IGNORE_INDEX]
        found.append((sample["input_ids"].tolist(), decode(labels)))
    end = "<|im_end|>"
    assert len({tuple(ids) for ids, _ in found}) == 1
    trained = [text.replace("\n", "") for _, text in found]
    assert trained == [f"one{end}two{end}three{end}", f"two{end}three{end}", f"one{end}"]


@pytest.mark.parametrize(
    "weights, reason",
    [((0.5, 1), "a message has the weight 0.5: give 0 or 1"), ((0, 1), "differ in weight")],
)
def test_weights_that_cannot_be_trained_stop_the_run(run, write_lines, weights, reason):
    answers = [{"role": "assistant", "content": "A", "weight": weight} for weight in weights]
    record = {"messages": [{"role": "user", "content": "Q"}, *answers]}
    options = {"handler_name": "OpenAIInstructionHandler", "prompt_type": "chatml"}
    with pytest.raises(ConfigError, match=reason):
        run(write_lines([record]), **options)


@pytest.mark.parametrize(
    "column, message, system",
    [("A", "B", "A\nB"), ("A", "A", "A"), ("", "B", "B"), ("A", "", "A"), (None, "B", "B")],
)
@pytest.mark.parametrize("style", ["Sharegpt", "OpenAI"])
def test_system_texts_of_a_column_and_of_messages(run, write_lines, style, column, message, system):
    """Neither is left out."""
    role, text = ("from", "value") if style == "Sharegpt" else ("role", "content")
    speakers = ["system", *(("human", "gpt") if style == "Sharegpt" else ("user", "assistant"))]
    entries = [{role: who, text: what} for who, what in zip(speakers, (message, "Hi", "Ho"))]
    key = "conversations" if style == "Sharegpt" else "messages"
    handler = f"{style}{'Style' if style == 'Sharegpt' else ''}InstructionHandler"
    options = {"handler_name": handler, "prompt_type": "chatml"}
    _, prefix = run(write_lines([{key: entries, "system": column}]), **options)
    assert f"<|im_start|>system\n{system}<|im_end|>" in parts(InstructionData(prefix)[0])[0]


def test_tools_may_be_called_functions(run, write_lines):
    """As in OpenAI's data from before tools; both describe the tool in the same way."""
    old = {"messages": OPENAI["messages"], "functions": [OPENAI["tools"][0]["function"]]}
    options = {"handler_name": "OpenAIInstructionHandler", "prompt_type": "qwen"}
    found = []
    for name, record in (("new", OPENAI), ("old", old)):
        _, prefix = run(write_lines([record], f"{name}.jsonl"), name=name, **options)
        found.append(InstructionData(prefix)[0]["input_ids"].tolist())
    assert found[0] == found[1] and '{"name": "clock"}' in decode(found[0])


REFUSED = [
    ("Alpaca", {"instruction": "x"}, "no column output for response; it has instruction"),
    ("Alpaca", {"instruction": 5, "output": "y"}, "line 1: instruction holds a number, not text"),
    ("Alpaca", {**ALPACA, "history": ["x"]}, "history must be a list of .question, answer. pairs"),
    ("Sharegpt", {"talk": []}, "no column conversations for messages; it has talk"),
    ("Sharegpt", {"conversations": "x"}, "conversations holds text, not a list of messages"),
    ("Sharegpt", {"conversations": [1]}, "a message is a number, not an object"),
    ("Sharegpt", {"conversations": [{"from": "human"}]}, "a message has no value; it has from"),
    (
        "Sharegpt",
        OPENAI,
        "a message has tool_calls, which SharegptStyleInstructionHandler does not "
        "read: give --handler-name OpenAIInstructionHandler",
    ),
    (
        "Sharegpt",
        {"messages": [{"role": "user", "content": "Hi"}, OPENAI["messages"][-1]]},
        "a message has reasoning_content, which",
    ),
]


@pytest.mark.parametrize("style, record, reason", REFUSED)
def test_malformed_records_stop_the_run(run, write_lines, style, record, reason):
    options = {"handler_name": f"{style}StyleInstructionHandler", "prompt_type": "chatml"}
    with pytest.raises(ConfigError, match=reason):
        run(write_lines([record]), **options)


ROLES = [
    ("SharegptStyleInstruction", "conversations", "from", "value", "human, gpt, observation"),
    (
        "OpenAIInstruction",
        "messages",
        "role",
        "content",
        "system, developer, user, assistant, tool or function",
    ),
]


@pytest.mark.parametrize("handler, column, role, content, allowed", ROLES)
def test_unknown_roles_stop_the_run(run, write_lines, handler, column, role, content, allowed):
    record = {column: [{role: "cat", content: "miau"}]}
    options = {"handler_name": f"{handler}Handler", "prompt_type": "chatml"}
    expected = f"line 1: a message has the {role} 'cat': give {allowed}"
    with pytest.raises(ConfigError, match=expected):
        run(write_lines([record]), **options)


UNUSABLE = [
    ("Alpaca", {**ALPACA, "output": ""}, "an answer is empty"),
    ("Alpaca", {**ALPACA, "output": None}, "an answer is empty"),
    ("Sharegpt", {"conversations": SHAREGPT["conversations"][:1]}, "the last message is no answer"),
    ("Sharegpt", {"conversations": SHAREGPT["conversations"][1:]}, "the roles do not take turns"),
    ("Sharegpt", {"conversations": []}, "there are no messages"),
]


@pytest.mark.parametrize("style, record, reason", UNUSABLE)
def test_unusable_records_are_dropped_and_counted(run, write_lines, style, record, reason):
    options = {"handler_name": f"{style}StyleInstructionHandler", "prompt_type": "chatml"}
    good = ALPACA if style == "Alpaca" else SHAREGPT
    summary, prefix = run(write_lines([good, record, good]), **options)
    assert {name: tally.count for name, tally in summary.skipped.items()} == {reason: 1}
    assert summary.skipped[reason].first.endswith("data.jsonl, line 2")
    assert (summary.records, summary.written, len(InstructionData(prefix))) == (3, 2, 2)


def test_a_system_message_behind_others_is_not_moved_to_the_front(run, write_lines):
    """Answers before it would be trained as if it had been there."""
    first, *others = OPENAI["messages"]
    late = {**OPENAI, "messages": [*others, first, *others]}
    options = {"handler_name": "OpenAIInstructionHandler", "prompt_type": "qwen"}
    summary, _ = run(write_lines([OPENAI, late]), **options)
    tallies = {name: tally.count for name, tally in summary.skipped.items()}
    assert tallies == {"a system message is not in front": 1} and summary.written == 1


@pytest.mark.parametrize(
    "options, message",
    [
        ({"handler_name": "AlpacaStyleInstuctionHandler"}, "mean AlpacaStyleInstructionHandler"),
        ({"prompt_type": "qwne"}, "did you mean qwen"),
        ({"prompt_type": ""}, "--prompt-type is missing"),
        ({"prompt_type": "tokenizer"}, "has no chat template"),
        ({"prompt_type": "intern2", "enable_thinking": "true"}, "has no thoughts"),
        ({"map_keys": '{"respons": "x"}'}, "respons is not known; did you mean response"),
        ({"map_keys": '{"response": "otput"}'}, "no column otput for response; it has input"),
        ({"map_keys": '{"response": 3}'}, "response holds a number"),
        ({"map_keys": '{"response": ""}'}, "requires response"),
        ({"map_keys": "{"}, "is not valid JSON"),
        ({"map_keys": "[]"}, "is not a JSON object"),
        ({"neat_pack": True}, "needs --pack"),
        ({"pack": True}, "--pack needs --seq-length"),
        ({"seq_length": 0}, "--seq-length 0 is too small"),
        ({"workers": -1}, "--workers -1 is too small"),
        ({"tokenizer_type": "BertWordPieceCase"}, "use PretrainedFromHF"),
        ({"handler_name": "GeneralPretrainHandler", "pack": True, "seq_length": 8}, "drop --pack"),
        ({"handler_name": "GeneralPretrainHandler"}, "has no column text; it has input, in"),
        ({"handler_name": "OpenAIPromptHandler", "append_eod": True}, "--append-eod: .*: drop the"),
        ({"handler_name": "StepwiseProcessRewardHandler", "append_eod": True}, "--append-eod: "),
    ],
)  # fmt: skip
def test_errors_before_work_starts(run, write_lines, tmp_path, options, message):
    defaults = {"handler_name": "AlpacaStyleInstructionHandler", "prompt_type": "chatml"}
    with pytest.raises(ConfigError, match=message):
        run(write_lines([ALPACA]), **{**defaults, **options})
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


def test_a_template_of_the_user(run, write_lines, tmp_path):
    mine = {"name": "mine", "format_user": {"slots": ["Q: {{content}} A:"]}}
    (tmp_path / "mine.json").write_text(json.dumps([mine]))
    options = {"handler_name": "AlpacaStyleInstructionHandler", "prompt_type": "mine"}
    path = str(tmp_path / "mine.json")
    _, prefix = run(write_lines([ALPACA]), prompt_type_path=path, **options)
    assert parts(InstructionData(prefix)[0]) == ("Q: Add.\n1 2 A:", "3<|im_end|>")


def test_a_template_that_needs_other_tokens(run, write_lines, tmp_path):
    mine = {"name": "mine", "stop_words": ["<|nope|>"], "replace_eos": True}
    (tmp_path / "mine.json").write_text(json.dumps([mine]))
    options = {"handler_name": "AlpacaStyleInstructionHandler", "prompt_type": "mine"}
    with pytest.raises(ConfigError, match=r"needs the token <\|nope\|>"):
        run(write_lines([ALPACA]), prompt_type_path=str(tmp_path / "mine.json"), **options)


def test_a_template_without_a_stop_token_warns(run, write_lines, caplog):
    options = {"handler_name": "AlpacaStyleInstructionHandler", "prompt_type": "empty"}
    summary, _ = run(write_lines([ALPACA]), **options)
    assert "will not be trained to stop" in caplog.text and summary.ended == 0
    caplog.clear()
    summary, _ = run(write_lines([ALPACA]), append_eod=True, **options)
    assert not caplog.text and summary.ended == 1
