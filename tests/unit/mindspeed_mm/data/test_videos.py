"""Images and videos from files through the models' processors: padded, packed, blank."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from mindspeed_mm.data import build_mm_dataset
from tests.mm import videos

pytestmark = videos.needs_packages()


@pytest.fixture(scope="module", params=videos.NAMES)
def folder(request, tmp_path_factory):
    """Return a folder with a model, its processor and records, named after the model."""
    folder = tmp_path_factory.mktemp("videos") / request.param
    videos.write(folder, request.param)
    return folder


def open_data(folder, **basic):
    basic = {"dataset": str(folder / "rows.json"), **basic}
    more = {"model_name_or_path": str(folder)}
    return build_mm_dataset({"basic_parameters": basic, "preprocess_parameters": more})


def test_samples_equal_those_of_transformers(folder):
    for (sample,), right in zip(open_data(folder), videos.ByHand(folder, folder.name)):
        found = {"input_ids": sample.ids, "labels": sample.labels} | sample.token_types
        found = {name: torch.from_numpy(value)[None] for name, value in found.items()}
        found |= {name: torch.cat(tensors) for name, tensors in sample.tensors.items()}
        right.pop("attention_mask")
        if not sample.modalities:
            right.pop("mm_token_type_ids", None)  # all of them are 0
        assert found.keys() == right.keys()
        assert all(torch.equal(found[name], right[name].to(found[name])) for name in found)


def test_batching_and_packing_change_no_loss(folder):
    model = videos.new_model(folder.name).double().eval()

    def loss(batch):
        floats = {n: t.double() if t.is_floating_point() else t for n, t in batch.items()}
        labels = floats.pop("labels")
        with torch.no_grad():
            logits = model(**floats, use_cache=False).logits
        targets = labels[:, 1:].flatten()
        return cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum")

    by_hand = videos.ByHand(folder, folder.name)
    separate = [loss(by_hand[number]).item() for number in range(len(by_hand))]
    dataset = open_data(folder)
    for numbers in [(0,), (1,), (2,), (3, 4), (1, 1), (4, 0, 3, 2)]:
        batch = dataset.collator(8)([dataset[number][0] for number in numbers])
        right = sum(separate[number] for number in numbers)
        assert loss(batch).item() == pytest.approx(right, rel=1e-12), numbers
    packed = open_data(folder, packing=True, cutoff_len=256)
    assert len(packed) < len(dataset)
    total = sum(loss(packed.collator(8)(row)).item() for row in packed)
    assert total == pytest.approx(sum(separate), rel=1e-12)
