"""Tools: the tokens of the models' own chat templates, and an error where a template has none."""

import json
from pathlib import Path

import pytest

from mindspeed.config import ConfigError
from mindspeed_llm.data.indexed import IGNORE_INDEX
from mindspeed_llm.data.instruction import InstructionData
from mindspeed_llm.data.tokenizer import facts_of
from tests.small_tokenizers import byte_level

TEMPLATES = Path(__file__).parents[3] / "llm" / "chat_templates"
OWN = {name: (TEMPLATES / f"{name}.jinja").read_text() for name in ("qwen2.5", "qwen3")}
WITHOUT_TOOLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') + "
    "'<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ONLY_DESCRIBED = "{{ (tools or []) | tojson }}" + WITHOUT_TOOLS
NO_RESULTS = (
    "{% for m in messages if m.role != 'tool' %}{{ '<|im_start|>' + m.role + '\\n' + (m.content "
    "or m.tool_calls | tojson) + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CLOCK = {"name": "clock", "description": "The time", "parameters": {"type": "object"}}
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}
SYSTEM = {"role": "system", "content": "Be exact."}


def called(*calls, content="", **more):
    found = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    return {"role": "assistant", "content": content, "tool_calls": found, **more}


def wrapped(*tools):
    return [{"type": "function", "function": tool} for tool in tools]


def says(role, content):
    return {"role": role, "content": content}


ASKED = says("user", "What is the time, and 1 + 2?")
CONVERSATIONS = {
    "described": [ASKED, says("assistant", "I cannot know.")],
    "called": [ASKED, called(("clock", {"zone": "UTC é"})), says("tool", "12:00"),
               says("assistant", "Noon.")],
    "at once": [ASKED, called(("clock", {}), ("add", {"a": 1})), says("tool", "12:00"),
                says("tool", "3"), says("assistant", "Noon, 3.")],
    "said": [ASKED, called(("clock", {}), content="Let me look."), says("tool", '{"t": "12:00"}'),
             called(("add", {"a": 1})), says("tool", "3"), says("assistant", "Noon, 3.")],
}  # fmt: skip


def encode(run, write_lines, record, template, **options):
    tokenizer = byte_level(template=template)
    options = {"handler_name": "OpenAIInstructionHandler", **options}
    facts = facts_of(tokenizer, "small")
    summary, prefix = run(write_lines([record]), facts=facts, **options)
    assert summary.written == 1
    return InstructionData(prefix)[0]


def decode(ids):
    return byte_level().decode([int(i) for i in ids], skip_special_tokens=False)


@pytest.mark.parametrize("system", [[], [SYSTEM]], ids=["no system", "system"])
@pytest.mark.parametrize("prompt_type", ["own", "tokenizer"])
@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_the_tokens_of_the_models_own_template(
    run, write_lines, messages, name, prompt_type, system
):
    tools = wrapped(CLOCK, ADD)
    tokenizer = byte_level(template=OWN[name])
    conversation = [*system, *messages]
    right = tokenizer.apply_chat_template(conversation, tools=tools, return_dict=False)
    record = {"messages": conversation, "tools": tools}
    chosen = name if prompt_type == "own" else "tokenizer"
    sample = encode(run, write_lines, record, OWN[name], prompt_type=chosen)
    assert decode(sample["input_ids"]).rstrip() == decode(right).rstrip()
    assert sample["input_ids"].tolist() == right[: len(sample["input_ids"])]
    trained = decode(sample["input_ids"][sample["labels"] != IGNORE_INDEX])
    answers = [message for message in messages if message["role"] == "assistant"]
    assert trained.count("<|im_end|>") == len(answers), "every answer and every call is trained"
    for call in (call for answer in answers for call in answer.get("tool_calls", ())):
        assert f'{{"name": "{call["function"]["name"]}", "arguments"' in trained


def test_thoughts_before_calls(run, write_lines):
    messages = [ASKED, called(("clock", {}), reasoning_content="Look."), says("tool", "12:00"),
                {**says("assistant", "Noon."), "reasoning_content": "Easy."}]  # fmt: skip
    tools = wrapped(CLOCK)
    tokenizer = byte_level(template=OWN["qwen3"])
    right = tokenizer.apply_chat_template(messages, tools=tools, return_dict=False)
    for prompt_type in ("qwen3", "tokenizer"):
        sample = encode(
            run,
            write_lines,
            {"messages": messages, "tools": tools},
            OWN["qwen3"],
            prompt_type=prompt_type,
            name=prompt_type,
        )
        assert sample["input_ids"].tolist() == right[: len(sample["input_ids"])]


def test_an_answer_that_begins_like_the_thoughts_it_does_not_have(run, write_lines):
    template = OWN["qwen3"].replace(
        "enable_thinking is defined and enable_thinking is false", "true"
    )
    template = template.replace(
        "{%- if loop.last or (not loop.last and reasoning_content) %}", "{%- if false %}"
    )
    record = {"messages": [ASKED, says("assistant", "<table>3</table>")]}
    sample = encode(run, write_lines, record, template, prompt_type="tokenizer")
    assert (
        decode(sample["input_ids"][sample["labels"] != IGNORE_INDEX])
        == "<table>3</table><|im_end|>"
    )


SHAREGPT = [
    {"from": "human", "value": "What is the time?"},
    {"from": "function_call", "value": '{"name": "clock", "arguments": {"zone": "UTC"}}'},
    {"from": "observation", "value": "12:00"},
    {"from": "gpt", "value": "Noon."},
]


@pytest.mark.parametrize("tools", [[CLOCK], [{"type": "function", **CLOCK}], wrapped(CLOCK)])
@pytest.mark.parametrize("prompt_type", ["qwen3", "tokenizer"])
def test_bare_tools_are_functions(run, write_lines, tools, prompt_type):
    messages = [says("user", "What is the time?"), called(("clock", {"zone": "UTC"})),
                says("tool", "12:00"), says("assistant", "Noon.")]  # fmt: skip
    tokenizer = byte_level(template=OWN["qwen3"])
    right = tokenizer.apply_chat_template(messages, tools=wrapped(CLOCK), return_dict=False)
    sample = encode(
        run,
        write_lines,
        {"conversations": SHAREGPT, "tools": json.dumps(tools)},
        OWN["qwen3"],
        handler_name="SharegptStyleInstructionHandler",
        prompt_type=prompt_type,
    )
    assert sample["input_ids"].tolist() == right[: len(sample["input_ids"])]


def test_arguments_in_a_text_are_rendered_as_an_object(run, write_lines):
    old = [ASKED, {"role": "assistant", "content": None, "function_call": {"name": "clock",
           "arguments": '{"zone":"UTC"}'}}, {"role": "function", "name": "clock", "content": "12"},
           says("assistant", "Noon.")]  # fmt: skip
    new = [
        ASKED,
        called(("clock", {"zone": "UTC"})),
        says("tool", "12"),
        says("assistant", "Noon."),
    ]
    found = [
        encode(run, write_lines, {"messages": messages}, OWN["qwen3"], prompt_type=kind, name=name)
        for kind in ("qwen3", "tokenizer")
        for name, messages in ((f"old {kind}", old), (f"new {kind}", new))
    ]
    assert len({decode(sample["input_ids"]).rstrip() for sample in found}) == 1


CALLING = {"messages": CONVERSATIONS["called"], "tools": wrapped(CLOCK)}
REFUSED = {
    "described": (WITHOUT_TOOLS, {**CALLING, "messages": CONVERSATIONS["described"]},
                  r"describes tools \(clock\), which the tokenizer's chat template does not"),
    "called": (WITHOUT_TOOLS, {"messages": CONVERSATIONS["called"]}, r"calls tools \(clock\)"),
    "only described": (ONLY_DESCRIBED, CALLING, r"calls tools \(clock\)"),
    "results": (NO_RESULTS, {"messages": CONVERSATIONS["called"]}, "has results of tools"),
    "system": ("{% for m in messages if m.role != 'system' %}{{ m.content + eos_token }}"
               "{% endfor %}", {"messages": [SYSTEM, ASKED, says("assistant", "No.")]},
               "has a system text, which the tokenizer's chat template does not render"),
    "trimmed": (WITHOUT_TOOLS.replace("(m.content or '')", "(m.content[:0] if m.role == "
                "'assistant' else m.content)"), {"messages": [ASKED, says("assistant", "No.")]},
                "answer 1 of 1, rendered by the tokenizer's chat template, is nothing but an end"),
}  # fmt: skip


@pytest.mark.parametrize("template, record, reason", REFUSED.values(), ids=REFUSED)
def test_what_the_template_would_drop_is_refused(run, write_lines, template, record, reason):
    facts = facts_of(byte_level(template=template), "small")
    good = {"messages": [ASKED, says("assistant", "No.")]}
    records = [record] if "answer 1" in reason else [good, record]
    options = {"handler_name": "OpenAIInstructionHandler", "prompt_type": "tokenizer"}
    pattern = rf"data.jsonl, line {len(records)}: .*{reason}.*--on-bad-line skip$"
    with pytest.raises(ConfigError, match=pattern):
        run(write_lines(records), facts=facts, **options)
    if len(records) > 1:
        summary, _ = run(write_lines(records), facts=facts, on_bad_line="skip", **options)
        assert (summary.written, summary.skipped["malformed"].count) == (1, 1)


@pytest.mark.parametrize(
    "handler, record",
    [
        ("SharegptStyleInstructionHandler", {"conversations": SHAREGPT}),
        (
            "SharegptStylePairwiseHandler",
            {"conversations": SHAREGPT[:3], "chosen": "Noon.", "rejected": "No."},
        ),
        (
            "AlpacaStyleInstructionHandler",
            {"instruction": "Time?", "output": "Noon.", "tools": [CLOCK]},
        ),
        (
            "PPOAlpacaStyleInstructionHandler",
            {"instruction": "Time?", "tools": json.dumps([CLOCK])},
        ),
    ],
)
def test_every_handler_refuses_tools_that_would_be_dropped(run, write_lines, handler, record):
    facts = facts_of(byte_level(template=WITHOUT_TOOLS), "small")
    with pytest.raises(ConfigError, match=r"line 1: .*tools.* --prompt-type .*such as qwen"):
        run(write_lines([record]), facts=facts, handler_name=handler, prompt_type="tokenizer")


def test_a_template_of_the_user_without_tools(run, write_lines, tmp_path):
    mine = {"name": "mine", "format_tools": {"slots": []}}
    (tmp_path / "mine.json").write_text(json.dumps([mine]))
    options = {"handler_name": "OpenAIInstructionHandler", "prompt_type": "mine"}
    with pytest.raises(ConfigError, match=r"describes tools \(clock\), which the template mine"):
        path = str(tmp_path / "mine.json")
        run(write_lines([CALLING]), prompt_type_path=path, **options)


def test_an_end_token_in_the_data_is_no_answer(run, write_lines):
    record = {"prompt": "Hi", "response": " <|im_end|>\n"}
    options = {"handler_name": "AlpacaStyleInstructionHandler", "prompt_type": "empty"}
    with pytest.raises(ConfigError, match="line 1: answer 1 of 1.*nothing but an end token"):
        run(write_lines([record]), **options)
    summary, _ = run(write_lines([record]), **{**options, "special_tokens": "text"})
    assert summary.written == 1, "here it is text"


@pytest.mark.parametrize("column", ["images", "audios", "videos", "image"])
@pytest.mark.parametrize("handler", ["AlpacaStyleInstructionHandler", "GeneralPretrainHandler"])
def test_media_are_refused(run, write_lines, handler, column):
    good = {"text": "t", "instruction": "Hi", "output": "Ho", column: []}
    records = [good] * 300 + [{**good, column: ["a.png"]}]
    options = {"handler_name": handler, "prompt_type": "chatml"}
    with pytest.raises(ConfigError, match=rf"line 301: has {column}, .* mindspeed-mm"):
        run(write_lines(records), **options)
    options["map_keys"] = json.dumps({column: ""})
    assert run(write_lines(records), **options)[0].written == 301


def test_media_in_parts_of_a_message_are_refused(run, write_lines):
    content = [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": "x"}}]
    record = {"messages": [says("user", content), says("assistant", "A cat.")]}
    options = {"handler_name": "OpenAIInstructionHandler", "prompt_type": "chatml"}
    with pytest.raises(ConfigError, match="line 1: a message holds image_url: only text"):
        run(write_lines([record]), **options)
