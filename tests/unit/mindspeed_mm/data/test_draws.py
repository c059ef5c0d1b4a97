"""Random augmentation: the same in any number of workers, and when a run is taken up again."""

import random
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from mindspeed.distributed.parallel_dims import ParallelDims
from mindspeed_mm.data import build_mm_dataloader
from mindspeed_mm.training.batches import Batches

SIZE, BATCH, SEED = 8, 2, 5
EPOCH = SIZE // BATCH


def draw():
    """Draw from all that data sets draw from."""
    return [torch.rand(()).item(), np.random.rand(), random.random()]


class Noisy(Dataset):
    """A data set that draws numbers for its items and for its batches."""

    scale = 1.0

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return torch.tensor([index, *draw()], dtype=torch.float64) * self.scale

    def collate_fn(self, items):
        return torch.cat([default_collate(items).flatten(), torch.tensor(draw())])


def ours(workers=0, consumed=0, seed=SEED):
    """Give batches of our loader as the training loop does, over the ends of epochs."""
    options = {"batch_size": BATCH, "seed": seed, "num_workers": workers}
    loader = build_mm_dataloader(Noisy(), options, consumed_samples=consumed)
    while True:
        yield from loader


def scripts(workers=0, consumed=0, seed=SEED, ranks=(1, 0), **more):
    """Give batches of a script's own loader."""
    world, rank = ranks
    dims = ParallelDims(world=world, rank=rank, micro_batch_size=BATCH)
    own = {"shuffle": True, "num_workers": workers, "collate_fn": Noisy().collate_fn}
    loader = DataLoader(Noisy(), BATCH, **own, **more)
    return Batches(loader, "train", dims, seed).endless(consumed)


def take(batches, count=2 * EPOCH + 1):
    return [batch.tolist() for batch in islice(batches, count)]


@pytest.mark.parametrize("route", [ours, scripts])
def test_numbers_follow_from_seed_epoch_and_item(route):
    random.seed(1)
    whole = take(route())
    random.seed(2)
    assert take(route(workers=2)) == whole
    consumed = 3 * BATCH
    for workers in (0, 2):  # other numbers have been drawn before
        assert take(route(workers, consumed), 4) == whole[3:7], workers
    flat = torch.tensor(whole)
    items = flat[:, :-3].reshape(-1, 4)
    assert len({tuple(row[1:]) for row in items.tolist()}) == len(items), "some are drawn twice"
    assert len(set(flat[:, -3:].flatten().tolist())) == flat[:, -3:].numel()
    other = torch.tensor(take(route(seed=6)))
    assert not set(other[:, -3:].flatten().tolist()) & set(flat[:, -3:].flatten().tolist())


@pytest.mark.parametrize("route", [ours, scripts])
def test_numbers_of_the_step_are_left_alone(route):
    def after(batches):
        torch.manual_seed(1), np.random.seed(1), random.seed(1)
        take(batches, EPOCH + 1)
        return draw()

    assert after(iter([])) == after(route()) == after(route(workers=1))


def test_ranks_draw_what_one_would():
    alone = take(scripts(), 6)
    ranks = [take(scripts(ranks=(2, rank)), 3) for rank in range(2)]
    assert [batch for pair in zip(*ranks) for batch in pair] == alone


def rescale(_):
    info = get_worker_info()
    info.dataset.scale = 2 * info.dataset.scale


def test_a_script_reaches_its_data_set_in_a_worker():
    plain, scaled = (take(scripts(1, worker_init_fn=init), 2) for init in (None, rescale))
    assert [[2 * x for x in batch[:-3]] for batch in plain] == [batch[:-3] for batch in scaled]
