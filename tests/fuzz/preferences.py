"""Preferences, references and rewards that post-training cannot use."""

import copy
import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.draws import Case, Draw
from tests.llm.mutants import as_json, changed

Record = dict[str, Any]
Spoiler = Callable[[Record], Any]
LONG = "a long question " * 20


def _user(text: str) -> Record:
    return {"role": "user", "content": text}


def _answer(text: str) -> Record:
    return {"role": "assistant", "content": text}


def _set(**values: Any) -> Spoiler:
    return lambda record: record.update(values)


def _drop(column: str) -> Spoiler:
    return lambda record: record.pop(column)


LAYOUTS: dict[str, tuple[Record, tuple[Spoiler, ...]]] = {
    "AlpacaStylePairwiseHandler": (
        {"instruction": "why", "chosen": "good", "rejected": "bad"},
        (
            _set(chosen=""),
            _set(rejected=None),
            _set(rejected="good"),
            _set(chosen=3),
            _set(instruction=LONG),
            _drop("chosen"),
            _set(history=[["one"]]),
        ),
    ),
    "SharegptStylePairwiseHandler": (
        {"messages": [_user("why")], "chosen": _answer("good"), "rejected": _answer("bad")},
        (
            _set(chosen=_answer(" ")),
            _set(chosen=_answer("bad")),
            _set(messages=[]),
            _set(messages=[_user("why"), _answer("so")]),
            _set(rejected={"role": "robot", "content": "x"}),
            _set(messages=[_user(LONG)]),
        ),
    ),
    "OpenAIPairwiseHandler": (
        {
            "prompt": "why",
            "chosen": [_user("why"), _answer("good")],
            "rejected": [_user("why"), _answer("bad")],
        },
        (
            _set(rejected=[_user("how"), _answer("bad")]),
            _set(prompt="how"),
            _set(chosen=[_user("why"), _answer("bad")]),
            _set(chosen=[_user("why")]),
            _set(chosen=[]),
            _set(chosen=[_user("why"), _answer("")]),
            _set(chosen=[_user("why"), {"role": "assistant", "content": [{"type": "image"}]}]),
        ),
    ),
    "OpenAIKTOHandler": (
        {"prompt": "why", "completion": "so", "label": True},
        (
            _set(completion=""),
            _set(label="yes"),
            _set(label=None),
            _set(prompt=LONG),
            _set(completion=[_user("how"), _answer("so")]),
            _drop("completion"),
        ),
    ),
    "AlpacaStyleKTOHandler": (
        {"instruction": "why", "output": "so", "kto_tag": False},
        (_set(output=""), _set(kto_tag=2), _drop("kto_tag"), _set(instruction=LONG)),
    ),
    "StepwiseProcessRewardHandler": (
        {"prompt": "1 + 1", "completions": ["add", "2"], "labels": [True, False]},
        (
            _set(labels=[True]),
            _set(completions=[], labels=[]),
            _set(labels=[True, 1]),
            _set(completions=["add", None]),
            _set(prompt=LONG),
        ),
    ),
    "OpenAIPromptHandler": (
        {"prompt": "why", "answer": "so"},
        (_set(prompt=LONG), _set(prompt=[_answer("so")]), _set(prompt=[]), _drop("prompt")),
    ),
}
"""Layouts of records: a good one, and what makes it one that has to be left out."""

FINE = ("[len(c) for c in completions]", "[True] * len(completions)", "map(len, completions)")
BAD = (
    "[float('nan')] * len(completions)",
    "[1.0, float('-inf')] * (len(completions) // 2)",
    "[1.0]",
    "[]",
    "None",
    "'good'",
    "[None] * len(completions)",
    "[10 ** 400] * len(completions)",
    "[1e300] * len(completions)",
    "[[1.0]] * len(completions)",
    "{'score': 1.0}",
    "completions / 0",
    "answer[99]",
    "exec('raise ValueError(chr(27) + chr(0) + chr(10))')",
    "exec('raise KeyboardInterrupt')",
    "__import__('sys').exit(0)",
    "__import__('os')._exit(3)",
    "__import__('os').kill(__import__('os').getpid(), 9)",
    "__import__('time').sleep(99)",
    "[1.0 for _ in iter(int, 1)]",
    "no_such_name(completions)",
)
"""What a function of rewards may return, as an expression."""
BROKEN = (
    "def score(:\n",
    "import no_such_module\n",
    "raise SystemExit(1)\n",
    "while True:\n    pass\n",
    "score = 3\n",
    "def other(**fields):\n    return []\n",
    "def score(prompts):\n    return []\n",
    "",
    "\0",
)
"""Files that have no such function."""
SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_key_value_heads")


def draw_preferences(draw: Draw) -> Case:
    """Draw one: records, damaged files, a reference or a reward function."""
    kinds = [_records, _records, _odd_records, _files, _reference, _rewards, _rewards]
    return draw.one(kinds)(draw)  # type: ignore[no-any-return]


def _records(draw: Draw) -> Case:
    """Spoil some of several records: the others are kept."""
    handler = draw.one(list(LAYOUTS))
    good, spoilers = LAYOUTS[handler]
    number = draw(st.integers(1, 3))
    records = [copy.deepcopy(good) for _ in range(number)]
    for _ in range(draw(st.integers(1, 3))):
        records.append(copy.deepcopy(good))
        draw.one(spoilers)(records[-1])
    order = draw(st.permutations(range(len(records))))
    content = b"".join(as_json(records[index]) + b"\n" for index in order)
    path = "raw/preferences.jsonl"
    return _preprocess(handler, content, f"kept {number} {path}")


def _odd_records(draw: Draw) -> Case:
    """Put odd values into records: each is written or counted."""
    handler = draw.one(list(LAYOUTS))
    good, _ = LAYOUTS[handler]
    odd = draw(changed([copy.deepcopy(good) for _ in range(3)]))
    content = b"".join(as_json(record) + b"\n" for record in [good, *odd])
    return _preprocess(handler, content, "records raw/preferences.jsonl")


def _preprocess(handler: str, content: bytes, check: str) -> Case:
    more = ("--handler-name", handler)
    return Case("preprocess preferences", more, {"raw/preferences.jsonl": content}, check)


def _files(draw: Draw) -> Case:
    if draw(st.booleans()):
        path = draw.one(["raw/pairs.jsonl", "raw/questions.jsonl"])
        command = "posttrain dpo" if "pairs" in path else "posttrain grpo"
        return Case(command, (), {path: draw.damage(path)})
    if draw(st.booleans()):
        path = draw.find("cache/data/questions*/*fields*.bin")
        content = draw.flip(path) if draw(st.booleans()) else draw.damage(path)
        return Case("posttrain grpo", (), {path: content})
    path = draw.find("cache/reference/*.npy")
    content = draw.flip(path) if draw(st.booleans()) else draw.damage(path)
    return Case("posttrain dpo", (), {path: content}, "numbers")


def _reference(draw: Draw) -> Case:
    more = ("--ref-model", "reference")
    if draw(st.booleans()):
        path = "reference/model.safetensors"
        return Case("posttrain dpo", more, {path: draw.structure(path)}, "numbers")
    path = "reference/config.json"
    config = json.loads(draw.read(path))
    size = draw.one(SIZES)
    config[size] = draw.one([0, 1, 2, 4, 8, 64, -1, None, "x", config[size] + 1])
    is_same = config == json.loads(draw.read(path))
    return Case("posttrain dpo", more, {path: as_json(config)}, "" if is_same else "refused")


def _rewards(draw: Draw) -> Case:
    path = "raw/rewards.py"
    kind = draw.one(["fine", "bad", "bad", "bad", "broken", "damaged"])
    if kind == "damaged":  # whatever it does then, the run ends in time
        return Case("posttrain grpo", (), {path: draw.damage(path)})
    if kind == "broken":
        return Case("posttrain grpo", (), {path: draw.one(BROKEN).encode()}, "refused")
    body = draw.one(FINE if kind == "fine" else BAD)
    content = f"def score(prompts, completions, answer):\n    return {body}\n"
    check = "refused" if kind == "bad" else ""
    return Case("posttrain grpo", (), {path: content.encode()}, check)
