"""The order of batches: every item once an epoch, on any number of ranks, from any position."""

import collections
import os
import pickle
import signal
import subprocess
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from mindspeed.config import ConfigError, build
from mindspeed.distributed.parallel_dims import ParallelDims
from mindspeed_mm.data import DataConfig, build_mm_dataloader
from mindspeed_mm.data.loader import BatchOrder
from mindspeed_mm.data.options import DataloaderOptions
from mindspeed_mm.training.batches import Batches
from tests.mm import processors
from tests.ranks import run_ranks

SIZE = 23


def options(**more):
    return DataloaderOptions(**{"batch_size": 2, "seed": 5, **more})


def walk(world, start, count, **more):
    """Return the items that all ranks take together, micro-batch by micro-batch."""
    orders = [BatchOrder(SIZE, options(**more), rank, world) for rank in range(world)]
    found, position = [], start
    while len(found) < count:
        for order in orders:
            order.position = position
        for batches in zip(*orders, strict=True):
            found += [place.item for batch in batches for place in batch]
            position = orders[0].after(position)
    return found[:count]


def test_every_item_comes_once_an_epoch_and_no_tail_is_lost():
    found = walk(2, 0, 3 * SIZE)
    epochs = [found[place : place + SIZE] for place in range(0, len(found), SIZE)]
    assert all(sorted(epoch) == list(range(SIZE)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert walk(2, 0, SIZE, seed=6) != epochs[0]
    assert walk(2, 0, SIZE, shuffle=False) == list(range(SIZE))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_another_number_of_ranks_goes_on_from_the_same_place(world):
    whole = walk(2, 0, 4 * SIZE)
    assert walk(world, 24, 2 * SIZE) == whole[24 : 24 + 2 * SIZE]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_validation_keeps_the_tail_and_ranks_have_as_many_batches(world):
    orders = [BatchOrder(SIZE, options(drop_last=False), r, world) for r in range(world)]
    batches = [list(order) for order in orders]
    assert {len(one) for one in batches} == {len(orders[0])}
    places = [place for one in batches for batch in one for place in batch]
    real = [place.item for place in places if not place.fills_in]
    assert sorted(real) == list(range(SIZE))
    assert all(batch for one in batches for batch in one)
    assert orders[0].after(SIZE // (2 * world) * 2 * world) == SIZE


class Numbers(torch.utils.data.Dataset):
    """A user's own data set."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return {"x": torch.tensor([index])}


@pytest.mark.parametrize("workers", [0, 1])
def test_position_is_what_was_handed_out_not_what_was_prepared(workers):
    loader = build_mm_dataloader(Numbers(), options(num_workers=workers))
    batches = iter(loader)
    first = [next(batches)["x"].flatten().tolist() for _ in range(3)]
    assert loader.consumed_samples == 6 and len(loader) == 12
    state = loader.state_dict()
    other = build_mm_dataloader(Numbers(), options(num_workers=workers))
    other.load_state_dict(state)
    rest = [batch["x"].flatten().tolist() for batch in other]
    assert rest == [batch["x"].flatten().tolist() for batch in batches]
    counts = collections.Counter(sum(first + rest, []))
    assert set(counts) == set(range(SIZE)) and sum(counts.values()) == SIZE + 1
    assert other.consumed_samples == SIZE + 1  # the tail went on into the next epoch
    with pytest.raises(ConfigError, match="the data had size 9 and has 23 now"):
        other.load_state_dict(state | {"size": 9})


def test_records_left_out_while_training_are_counted(data, caplog):
    (data.root / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nno")
    said = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "Yes."}]
    records = [{"conversations": said, "images": [f]} for f in ("a.png", "broken.png", "c.png")]
    dataset = data.open(records, basic={"on_bad_record": "skip"})
    loader = build_mm_dataloader(dataset, options(batch_size=1, shuffle=False, num_workers=1))
    labels = [batch["labels"] for batch in loader]
    assert [(one != -100).any().item() for one in labels] == [True, False, True]
    assert loader.skipped == 1 and "line 2: the image" in caplog.text
    stopping = build_mm_dataloader(data.open(records), options(num_workers=1))
    with pytest.raises(ConfigError, match="^[^\n]*line 2: .*broken.png cannot be read[^\n]*$"):
        list(stopping)


class _Waiting(Dataset):
    """Items that are given only when a file appears, each with the process that made it."""

    def __init__(self, folder):
        self._folder = folder

    def __len__(self):
        return 4

    def __getitem__(self, number):
        (self._folder / f"{os.getpid()}.pid").touch()
        while not (self._folder / "go").exists():
            time.sleep(0.01)
        return number


@pytest.mark.parametrize("whose", ["script", "ours"])
def test_workers_outlive_signals_that_all_processes_get(tmp_path, whose):
    """So that the step which the run ends with has its batches."""
    assert run_ranks(_take_under_signals, 1, tmp_path, whose) == [[0, 1, 2, 3]]


def _take_under_signals(folder, whose):
    # In a rank, not in pytest: what other tests have imported may start threads in a forked worker.
    data = _Waiting(folder)
    if whose == "ours":
        loader = build_mm_dataloader(data, options(batch_size=1, shuffle=False, num_workers=1))
        batches = iter(loader)
    else:
        dims = ParallelDims()
        batches = Batches(DataLoader(data, num_workers=1), "train", dims, 0).endless()
    got = []
    thread = threading.Thread(target=lambda: got.extend(next(batches) for _ in range(4)))
    thread.start()
    while not (pids := list(folder.glob("*.pid"))):
        time.sleep(0.01)
    for number in (signal.SIGTERM, signal.SIGINT):
        # Not from us: a parent may end its workers.
        subprocess.run(["kill", f"-{int(number)}", pids[0].stem], check=True)
    (folder / "go").touch()
    thread.join()
    return [int(batch) for batch in got]


@pytest.mark.parametrize("model", processors.MAKERS)
def test_workers_may_be_new_processes(data, model):
    """They are on macOS, and wherever a rank was not forked: everything has to be sent there."""
    said = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "Yes."}]
    dataset = data.open([{"conversations": said, "images": ["a.png"]}], model=model)
    ((sample,),) = dataset
    ((sent,),) = there = pickle.loads(pickle.dumps(dataset))
    batch, other = dataset.collator(8)([sample]), there.collator(8)([sent])
    assert batch.keys() == other.keys()
    assert all(torch.equal(batch[key], other[key]) for key in batch)


def test_validation_set_is_fixed_and_apart(data):
    records = [
        {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": str(number)}]}
        for number in range(20)
    ]
    train, valid = data.open(records, basic={"val_rate": 0.2})
    texts = [{bytes(one.ids) for row in part for one in row} for part in (train, valid)]
    assert len(train) == 16 and len(valid) == 4 and not texts[0] & texts[1]
    again = data.open(records, basic={"val_rate": 0.2})[1]
    assert {bytes(one.ids) for row in again for one in row} == texts[1]
    limited = data.open(records, basic={"val_rate": 0.2, "val_max_samples": 1, "max_samples": 10})
    assert [len(part) for part in limited] == [9, 1]
    path = str(data.root / "records.jsonl")
    both = data.open(records, basic={"val_dataset": path, "val_max_samples": 3})
    assert [len(part) for part in both] == [20, 3]


def test_run_values_win_over_the_file():
    basic, folder = {"dataset": "a.json,b.json", "cutoff_len": 7}, {"model_name_or_path": "m"}
    values = {"dataset_param": {"basic_parameters": basic, "preprocess_parameters": folder}}
    config = build(DataConfig, values).for_run(seq_length=64, micro_batch_size=3, seed=9)
    assert config.dataset_param.basic_parameters.cutoff_len == 64
    assert config.dataset_param.basic_parameters.dataset == ("a.json", "b.json")
    assert config.dataloader_param == DataloaderOptions(batch_size=3, seed=9)
