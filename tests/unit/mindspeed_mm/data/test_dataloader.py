"""The dataloader: order, resume, workers, skipped records, and random augmentation."""

import collections
import os
import pickle
import random
import signal
import subprocess
import threading
import time
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from mindspeed.config import ConfigError, build
from mindspeed.distributed.parallel_dims import ParallelDims
from mindspeed_mm.data import DataConfig, build_mm_dataloader
from mindspeed_mm.data.dataloader import MicroBatchSampler, SampleIndex
from mindspeed_mm.data.options import DataloaderOptions
from mindspeed_mm.training.batches import Batches
from tests.mm import processors
from tests.ranks import run_ranks

SIZE = 23


def options(**more):
    return DataloaderOptions(**{"batch_size": 2, "seed": 5, **more})


def walk(world, start, count, **more):
    """Return the items that all ranks consume together, micro-batch by micro-batch."""
    samplers = [MicroBatchSampler(SIZE, options(**more), rank, world) for rank in range(world)]
    found, position = [], start
    while len(found) < count:
        for sampler in samplers:
            sampler.position = position
        for batches in zip(*samplers, strict=True):
            found += [index.item for batch in batches for index in batch]
            position = samplers[0].after(position)
    return found[:count]


def test_every_item_occurs_once_per_epoch_and_no_tail_is_lost():
    found = walk(2, 0, 3 * SIZE)
    epochs = [found[start : start + SIZE] for start in range(0, len(found), SIZE)]
    assert all(sorted(epoch) == list(range(SIZE)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert walk(2, 0, SIZE, seed=6) != epochs[0]
    assert walk(2, 0, SIZE, shuffle=False) == list(range(SIZE))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_another_number_of_ranks_resumes_from_the_same_position(world):
    whole = walk(2, 0, 4 * SIZE)
    assert walk(world, 24, 2 * SIZE) == whole[24 : 24 + 2 * SIZE]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_validation_keeps_the_tail_and_ranks_have_equally_many_batches(world):
    samplers = [MicroBatchSampler(SIZE, options(drop_last=False), r, world) for r in range(world)]
    batches = [list(sampler) for sampler in samplers]
    assert {len(one) for one in batches} == {len(samplers[0])}
    indices = [index for one in batches for batch in one for index in batch]
    real = [index.item for index in indices if not index.is_filler]
    assert sorted(real) == list(range(SIZE))
    assert all(batch for one in batches for batch in one)
    assert samplers[0].after(SIZE // (2 * world) * 2 * world) == SIZE


class Numbers(torch.utils.data.Dataset):
    """A user's own dataset."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return {"x": torch.tensor([index])}


@pytest.mark.parametrize("workers", [0, 1])
def test_position_counts_returned_batches_not_prefetched_ones(workers):
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
    assert other.consumed_samples == SIZE + 1  # the tail continued into the next epoch
    with pytest.raises(ConfigError, match="saved with data of size 9, this run has 23"):
        other.load_state_dict(state | {"size": 9})


def test_records_skipped_while_training_are_counted(data, caplog):
    (data.root / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nno")
    messages = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "Yes."}]
    records = [{"conversations": messages, "images": [f]} for f in ("a.png", "broken.png", "c.png")]
    dataset = data.open(records, basic={"on_bad_record": "skip"})
    loader = build_mm_dataloader(dataset, options(batch_size=1, shuffle=False, num_workers=1))
    labels = [batch["labels"] for batch in loader]
    assert [(one != -100).any().item() for one in labels] == [True, False, True]
    assert loader.skipped == 1 and "line 2: the image" in caplog.text
    stopping = build_mm_dataloader(data.open(records), options(num_workers=1))
    with pytest.raises(ConfigError, match="^[^\n]*line 2: .*broken.png cannot be read[^\n]*$"):
        list(stopping)


class _Waiting(Dataset):
    """Items that are returned only once a file exists; records the process of the worker."""

    def __init__(self, folder):
        self._folder = folder

    def __len__(self):
        return 4

    def __getitem__(self, number):
        (self._folder / f"{os.getpid()}.pid").touch()
        while not (self._folder / "go").exists():
            time.sleep(0.01)
        return number


@pytest.mark.parametrize("loader", ["script", "ours"])
def test_workers_survive_signals_to_the_process_group(tmp_path, loader):
    """So that the last step of a stopped run has its batches."""
    assert run_ranks(_take_under_signals, 1, tmp_path, loader) == [[0, 1, 2, 3]]


def _take_under_signals(folder, kind):
    # On a rank, not in pytest: imports of other tests may start threads in a forked worker.
    data = _Waiting(folder)
    if kind == "ours":
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
        # Not from this process: a parent may stop its workers.
        subprocess.run(["kill", f"-{int(number)}", pids[0].stem], check=True)
    (folder / "go").touch()
    thread.join()
    return [int(batch) for batch in got]


@pytest.mark.parametrize("model", processors.MAKERS)
def test_datasets_are_pickled_for_spawned_workers(data, model):
    """Workers are spawned on macOS, and wherever ranks are not forked."""
    messages = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "Yes."}]
    dataset = data.open([{"conversations": messages, "images": ["a.png"]}], model=model)
    ((sample,),) = dataset
    ((restored,),) = other_dataset = pickle.loads(pickle.dumps(dataset))
    batch, other = dataset.collator(8)([sample]), other_dataset.collator(8)([restored])
    assert batch.keys() == other.keys()
    assert all(torch.equal(batch[key], other[key]) for key in batch)


def test_validation_split_is_fixed_and_disjoint(data):
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


def test_command_line_values_override_the_file():
    basic, folder = {"dataset": "a.json,b.json", "cutoff_len": 7}, {"model_name_or_path": "m"}
    values = {"dataset_param": {"basic_parameters": basic, "preprocess_parameters": folder}}
    config = build(DataConfig, values).for_run(seq_length=64, micro_batch_size=3, seed=9)
    assert config.dataset_param.basic_parameters.cutoff_len == 64
    assert config.dataset_param.basic_parameters.dataset == ("a.json", "b.json")
    assert config.dataloader_param == DataloaderOptions(batch_size=3, seed=9)


ITEMS, BATCH, SEED = 8, 2, 5
EPOCH = ITEMS // BATCH


def draw():
    """Draw from every RNG that datasets use."""
    return [torch.rand(()).item(), np.random.rand(), random.random()]


class Noisy(Dataset):
    """A dataset with random items and random batches."""

    scale = 1.0

    def __len__(self):
        return ITEMS

    def __getitem__(self, index):
        return torch.tensor([index, *draw()], dtype=torch.float64) * self.scale

    def collate_fn(self, items):
        return torch.cat([default_collate(items).flatten(), torch.tensor(draw())])


def ours(workers=0, consumed=0, seed=SEED):
    """Yield batches of our loader like the train loop does, across epochs."""
    options = {"batch_size": BATCH, "seed": seed, "num_workers": workers}
    loader = build_mm_dataloader(Noisy(), options, consumed_samples=consumed)
    while True:
        yield from loader


def scripts(workers=0, consumed=0, seed=SEED, ranks=(1, 0), **more):
    """Yield batches of a script's own DataLoader."""
    world, rank = ranks
    dims = ParallelDims(world=world, rank=rank, micro_batch_size=BATCH)
    own = {"shuffle": True, "num_workers": workers, "collate_fn": Noisy().collate_fn}
    loader = DataLoader(Noisy(), BATCH, **own, **more)
    return Batches(loader, "train", dims, seed).endless(consumed)


def take(batches, count=2 * EPOCH + 1):
    return [batch.tolist() for batch in islice(batches, count)]


@pytest.mark.parametrize("route", [ours, scripts])
def test_random_numbers_follow_from_seed_epoch_and_item(route):
    random.seed(1)
    whole = take(route())
    random.seed(2)
    assert take(route(workers=2)) == whole
    consumed = 3 * BATCH
    for workers in (0, 2):  # with another RNG state
        assert take(route(workers, consumed), 4) == whole[3:7], workers
    flat = torch.tensor(whole)
    items = flat[:, :-3].reshape(-1, 4)
    assert len({tuple(row[1:]) for row in items.tolist()}) == len(items), "some are drawn twice"
    assert len(set(flat[:, -3:].flatten().tolist())) == flat[:, -3:].numel()
    other = torch.tensor(take(route(seed=6)))
    assert not set(other[:, -3:].flatten().tolist()) & set(flat[:, -3:].flatten().tolist())


@pytest.mark.parametrize("route", [ours, scripts])
def test_the_rng_of_the_train_step_is_unchanged(route):
    def after(batches):
        torch.manual_seed(1), np.random.seed(1), random.seed(1)
        take(batches, EPOCH + 1)
        return draw()

    assert after(iter([])) == after(route()) == after(route(workers=1))


def test_ranks_draw_the_numbers_of_a_single_rank():
    single = take(scripts(), 6)
    ranks = [take(scripts(ranks=(2, rank)), 3) for rank in range(2)]
    assert [batch for pair in zip(*ranks) for batch in pair] == single


def rescale(_):
    info = get_worker_info()
    info.dataset.scale = 2 * info.dataset.scale


def test_worker_init_fn_reaches_the_dataset():
    plain, scaled = (take(scripts(1, worker_init_fn=init), 2) for init in (None, rescale))
    assert [[2 * x for x in batch[:-3]] for batch in plain] == [batch[:-3] for batch in scaled]


def test_random_numbers_are_those_of_earlier_versions():
    """The seed of an item is a hash of this text: a run resumes with the augmentations it had."""
    assert repr(SampleIndex(3, 1)) == "Place(item=3, epoch=1, fills_in=False)"
