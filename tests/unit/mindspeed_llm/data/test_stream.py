"""The order of samples: a permutation per epoch, exact mixtures, and the same from any position."""

import os
import threading
import time
from collections import Counter
from fractions import Fraction
from itertools import count, islice
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed.config import ConfigError
from mindspeed_llm.data.instruction import (
    InstructionData,
    MicroBatches,
    SampleStream,
    open_stream,
    split_parts,
    split_weights,
)
from mindspeed_llm.data.shuffle import Mixture, SampleOrder
from mindspeed_llm.data.stream import Prefetcher

OPTIONS = {"handler_name": "AlpacaStyleInstructionHandler", "prompt_type": "chatml"}


@given(size=st.integers(1, 300), seed=st.integers(0, 2**32))
def test_every_epoch_has_every_sample_once(size, seed):
    order = SampleOrder(size, seed=seed)
    for epoch in range(3):
        found = [order[epoch * size + index] for index in range(size)]
        assert sorted(found) == list(range(size))


def test_epochs_and_seeds_differ_and_stay():
    def epoch(seed, number, size=200):
        order = SampleOrder(size, seed=seed)
        return [order[number * size + index] for index in range(size)]

    orders = [epoch(1, 0), epoch(1, 1), epoch(2, 0), list(range(200))]
    assert len({tuple(order) for order in orders}) == 4
    # Written down so that a later version that would break resuming is noticed.
    order = SampleOrder(1000, seed=1234)
    assert [order[index] for index in range(6)] == [754, 838, 156, 801, 820, 803]


def test_the_order_is_well_shuffled():
    size = 4096
    order = SampleOrder(size, seed=7)
    found = np.array([order[index] for index in range(size)])
    assert abs(np.corrcoef(found, np.arange(size))[0, 1]) < 0.06
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 0.06
    assert 0 < (found == np.arange(size)).sum() + 1 < 12  # a random permutation has about 1


def test_data_sets_of_a_mixture_have_orders_of_their_own():
    parts = [[{"input_ids": n} for n in range(50)] for _ in range(2)]
    stream = SampleStream(parts, [1, 1], seed=3)
    orders = [[], []]
    for part, index in map(stream.locate, range(100)):
        orders[part].append(index)
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(50))
    assert orders[0] != orders[1]


def test_without_shuffling_and_with_filled_up_epochs():
    order = SampleOrder(5, shuffle=False, multiple=4)
    assert [order[index] for index in range(10)] == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1]
    assert order.epoch_size == 8


@given(weights=st.lists(st.integers(1, 50), min_size=1, max_size=5), count=st.integers(0, 300))
def test_mixtures_follow_the_weights(weights, count):
    mixture = Mixture([Fraction(weight) for weight in weights])
    seen = Counter()
    for position in range(count):
        part, index = mixture.locate(position)
        assert index == seen[part], "each data set is read without gaps"
        seen[part] += 1
    for part, weight in enumerate(weights):
        exact = count * weight / sum(weights)
        assert abs(seen[part] - exact) < len(weights)


def test_any_number_of_ranks_shares_a_batch():
    data = [{"input_ids": np.array([n])} for n in range(10)]
    stream = SampleStream([data], seed=3)

    def batch(world, size, consumed, samples=8):
        ranks = [
            MicroBatches(stream, size=size, rank=rank, world=world, consumed=consumed)
            for rank in range(world)
        ]
        steps = samples // (world * size)
        found = [int(s["input_ids"][0]) for _ in range(steps) for r in ranks for s in next(r)]
        assert {r.consumed for r in ranks} == {consumed + samples}
        return sorted(found)

    for consumed in (0, 8, 16):
        assert batch(1, 1, consumed) == batch(2, 2, consumed) == batch(4, 1, consumed)
    one = MicroBatches(stream, size=2)
    first = [next(one) for _ in range(6)]
    again = MicroBatches(stream, size=2, consumed=4)
    assert [next(again) for _ in range(4)] == first[2:]


@pytest.fixture
def prefixes(run, write_lines):
    made = []
    for name, number in (("a", 6), ("b", 4)):
        records = [{"prompt": f"{name}{n}", "response": "x"} for n in range(number)]
        made.append(run(write_lines(records, f"{name}.jsonl"), name=name, **OPTIONS)[1])
    return made


def test_weights_and_prefixes(prefixes):
    a, b = prefixes
    stream = open_stream(["0.75", a, "0.25", b], seed=5)
    parts = Counter(stream.locate(position)[0] for position in range(40))
    assert parts == {0: 30, 1: 10}
    by_size = open_stream([a, b])
    assert Counter(by_size.locate(p)[0] for p in range(10)) == {0: 6, 1: 4}
    assert stream.fingerprint == by_size.fingerprint != open_stream([a]).fingerprint
    train, valid, _ = split_parts("50,50,0")
    with pytest.raises(
        ConfigError, match=r"--split: 0.001 % of the \d+ samples of .* are none: give"
    ):
        open_stream([a], part=(0.0, 1e-5))
    halves = [open_stream([a], part=part, shuffle=False) for part in (train, valid)]
    ids = [[half[p]["input_ids"].tolist() for p in range(3)] for half in halves]
    assert ids[0] + ids[1] == [sample["input_ids"].tolist() for sample in InstructionData(a)]


@pytest.mark.parametrize("words", [[], ["0.5", "a", "0.5"], ["0.5", "a", "b", "c"], ["0", "a"]])
def test_wrong_data_paths(words):
    with pytest.raises(ConfigError, match="--data-path"):
        split_weights(words)


@pytest.mark.parametrize("split", ["x", "1,2,3,4", "-1,2", "0,0,0", ""])
def test_wrong_splits(split):
    with pytest.raises(ConfigError, match="--split"):
        split_parts(split)


def test_missing_data(prefixes, tmp_path):
    a, b = prefixes
    for prefix, message in (
        (str(tmp_path), f"is a folder: give the prefix of data in it .it holds {a}, {b}.$"),
        (a + "_packed", "give exactly the --output-prefix of preprocessing"),
        (a + "_packed_input_ids_document.idx", "give exactly the --output-prefix of preprocessing"),
        (str(tmp_path / "none"), "no preprocessed data has that prefix; expected files such as"),
        (a + "0", f"{a}0: no preprocessed data has that prefix; did you mean {a}.$"),
    ):
        with pytest.raises(ConfigError, match=message):
            InstructionData(prefix)
    with pytest.raises(ConfigError, match="6 of 6 samples are longer than --seq-length 3"):
        open_stream([a], seq_length=3)


def test_a_missing_file_is_named(prefixes):
    from mindspeed_llm.tasks.posttrain.sft import SFTTrainer

    a, b = prefixes
    os.remove(f"{a}_packed_labels_document.idx")
    options = SimpleNamespace(stage="sft")
    trainer = SimpleNamespace(options=options, data_path=[a], data_kind=SFTTrainer.data_kind)
    with pytest.raises(ConfigError) as caught:
        SFTTrainer.configure_from_data(trainer)
    expected = f"{a}_packed_labels_document.idx is missing: --stage sft needs it; {a} holds "
    assert str(caught.value).startswith(expected + "prompts, not conversations: preprocess with")
    os.remove(f"{b}_packed_attention_mask_document.idx")
    with pytest.raises(ConfigError, match="b_packed_attention_mask_document.idx is missing: prep"):
        InstructionData(b)


@pytest.mark.parametrize("stage", ["trl_ppo", "grpo"])
def test_conversations_are_no_prompts(prefixes, stage):
    """They have all files that prompts have, and more."""
    from mindspeed_llm.tasks.posttrain.launcher import TRAINERS

    a, _ = prefixes
    trainer = SimpleNamespace(
        options=SimpleNamespace(stage=stage), data_path=[a], data_kind=TRAINERS[stage].data_kind
    )
    with pytest.raises(ConfigError) as caught:
        TRAINERS[stage].configure_from_data(trainer)
    assert str(caught.value) == (
        f"--stage {stage}: {a} holds conversations, not prompts: preprocess with another "
        "--handler-name, or give another --stage"
    )


def test_files_of_different_runs(prefixes):
    a, b = prefixes
    for ending in (".bin", ".idx"):
        labels = f"_packed_labels_document{ending}"
        with open(b + labels, "rb") as source, open(a + labels, "wb") as target:
            target.write(source.read())
    with pytest.raises(ConfigError, match="do not match"):
        InstructionData(a)


def test_the_fingerprint_follows_the_data(prefixes):
    a, _ = prefixes
    before = InstructionData(a).fingerprint
    path = f"{a}_packed_labels_document.bin"
    content = bytearray(open(path, "rb").read())
    content[-1] ^= 1
    open(path, "wb").write(content)
    assert InstructionData(a).fingerprint != before


def test_prefetched_items_keep_their_order_and_end():
    items = Prefetcher(iter(range(100)), ahead=3)
    assert list(items) == list(range(100))
    with pytest.raises(StopIteration):
        next(items)


def test_a_few_are_made_ahead_and_no_more():
    made = []
    items = Prefetcher((made.append(number) or number for number in count()), ahead=3)
    assert list(islice(items, 2)) == [0, 1]
    deadline = time.monotonic() + 120
    while len(made) < 6 and time.monotonic() < deadline:  # 2 taken, 3 wait, 1 waits for a slot
        time.sleep(0.001)
    time.sleep(0.05)
    assert made == list(range(6))
    items.close()


def test_what_the_thread_raises_comes_in_its_turn_and_stays():
    def items():
        yield 1
        raise ValueError("record 2 is broken")

    prefetched = Prefetcher(items())
    assert next(prefetched) == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="record 2 is broken"):
            next(prefetched)


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_a_closed_one_leaves_no_thread(taken):
    before = set(threading.enumerate())
    items = Prefetcher(count(), ahead=2)
    assert list(islice(items, taken)) == list(range(taken))
    items.close()
    assert not set(threading.enumerate()) - before  # those of tests before may end meanwhile


def test_the_thread_is_prepared_first():
    seen = []
    items = Prefetcher(iter([1]), begin=lambda: seen.append(threading.current_thread()))
    assert next(items) == 1 and seen != [threading.current_thread()]
