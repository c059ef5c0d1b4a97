"""Packing: nothing lost, nothing changed, samples kept apart, and the rule of the greedy row."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed.config import ConfigError
from mindspeed_llm.data.indexed import IGNORE_INDEX
from mindspeed_llm.data.instruction import InstructionData
from mindspeed_llm.data.options import PreprocessOptions
from mindspeed_llm.data.packing import plan_rows

OPTIONS = {"handler_name": "AlpacaStyleInstructionHandler", "prompt_type": "chatml"}


def greedy(lengths, capacity):
    """The rule in its plainest form."""
    remaining = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    rows = []
    while remaining:
        row, free = [], capacity
        for index in list(remaining):
            if lengths[index] <= free:
                row.append(index)
                remaining.remove(index)
                free -= lengths[index]
        rows.append(row)
    return rows


@given(data=st.data(), capacity=st.integers(1, 50))
def test_rows_are_those_of_the_rule(data, capacity):
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=40))
    assert plan_rows(lengths, capacity) == greedy(lengths, capacity)


@pytest.mark.parametrize("lengths", [[5], [0]])
def test_a_sample_that_fits_no_row(lengths):
    with pytest.raises(ValueError, match="1 to 4 tokens"):
        plan_rows(lengths, 4)


@pytest.fixture
def records():
    rng = np.random.default_rng(0)
    words = ["fox", "dog", "12", "user", "naïve", "\n"]
    texts = [" ".join(rng.choice(words, rng.integers(1, 30))) for _ in range(80)]
    return [{"prompt": q, "response": a} for q, a in zip(texts[::2], texts[1::2])]


@pytest.mark.parametrize("neat", [True, False])
def test_packed_rows_hold_exactly_the_samples(run, write_lines, records, neat, facts):
    source = write_lines(records)
    _, plain_prefix = run(source, name="plain", **OPTIONS)
    summary, prefix = run(source, pack=True, neat_pack=neat, seq_length=256, **OPTIONS)
    plain, packed = InstructionData(plain_prefix), InstructionData(prefix)
    assert packed.is_packed and not plain.is_packed
    assert summary.rows == len(packed) < len(plain) == summary.written == 40
    whole = {sample["input_ids"].tobytes(): sample["labels"].tobytes() for sample in plain}
    found = []
    for row in packed:
        assert len(row["input_ids"]) == 256
        mask = row["attention_mask"]
        if not neat:
            assert (mask == 1).all()
            continue
        padding = mask == 0
        assert (row["input_ids"][padding] == facts.pad_id).all()
        assert (row["labels"][padding] == IGNORE_INDEX).all()
        assert not padding[: (~padding).sum()].any(), "padding is behind the samples"
        for number in range(1, mask.max() + 1):
            inside = mask == number
            found.append(row["input_ids"][inside].tobytes())
            assert whole[found[-1]] == row["labels"][inside].tobytes()
    if neat:
        assert sorted(found) == sorted(sample["input_ids"].tobytes() for sample in plain)
    else:
        joined = [row["input_ids"].tobytes() for row in packed]
        assert all(any(one in row for row in joined) for one in whole)


def test_too_long_samples(run, write_lines, records):
    source = write_lines(records)
    sizes = [len(s["input_ids"]) for s in InstructionData(run(source, name="all", **OPTIONS)[1])]
    limit = sorted(sizes)[20]
    over = sum(size > limit for size in sizes)
    packings = {"apart": {}, "pack": {"pack": True}, "neat": {"pack": True, "neat_pack": True}}
    rules = {"": 40 - over, "drop": 40 - over, "cut": 40}
    for (name, packing), (rule, kept) in product(packings.items(), rules.items()):
        options = {**OPTIONS, **packing, **({"too_long": rule} if rule else {})}
        summary, prefix = run(source, name=f"{name} {rule}", seq_length=limit, **options)
        assert summary.written == kept, name
        assert summary.records == summary.written + summary.skipped_records == 40
        assert summary.longest == max(sizes), "what was dropped counts too"
        assert InstructionData(prefix).longest <= limit
        described = summary.describe_too_long(PreprocessOptions(seq_length=limit, **options))
        assert described.startswith(f"{over} of 40 longer than {limit} tokens: ")
        if kept < 40:
            assert summary.skipped[f"longer than {limit} tokens"].count == over
            assert ": dropped (--too-long drop; first: " in described
        else:
            assert summary.truncated.count == over
            assert ": cut (--too-long cut; first: " in described


@pytest.mark.parametrize("packing", [{}, {"pack": True}, {"pack": True, "neat_pack": True}])
def test_too_long_samples_can_be_an_error(run, write_lines, tmp_path, packing):
    records = [{"prompt": "q", "response": "a"}] * 3 + [{"prompt": "q", "response": "a b " * 40}]
    options = {**OPTIONS, **packing, "too_long": "error", "seq_length": 40}
    with pytest.raises(
        ConfigError, match=r"line 4: has \d+ tokens, more than --seq-length 40: rai"
    ):
        run(write_lines(records), **options)
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]
    summary, _ = run(write_lines(records[:3]), **options)
    described = summary.describe_too_long(PreprocessOptions(**options))
    assert described == "none of 3 (--too-long error, --seq-length 40)"


def test_pairs_cannot_be_packed(run, write_lines):
    record = {"instruction": "q", "chosen": "a", "rejected": "b"}
    with pytest.raises(ConfigError, match="drop --pack here, and give --variable-seq-lengths"):
        run(
            write_lines([record]),
            handler_name="AlpacaStylePairwiseHandler",
            prompt_type="chatml",
            pack=True,
            seq_length=64,
        )
