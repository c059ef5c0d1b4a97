"""Batches for real models: padding, blank media and packing change no loss."""

import pytest
from torch.nn.functional import cross_entropy

from mindspeed_mm.data import build_mm_dataloader
from tests.mm import processors

MODELS = ("qwen2_5_vl", "internvl")


def conversation(question, answer, *images):
    messages = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"conversations": messages, "images": list(images)}


RECORDS = [
    conversation("<image> and <image>: what is it?", "A lazy dog.", "a.png", "b.png"),
    conversation("Who are you?", "I am a small model, and I know little."),
    conversation("How much is 12 + 30? <image>", "It is 42.", "c.png"),
    conversation("The quick brown fox?", "It jumps."),
]


@pytest.fixture(scope="module", params=MODELS)
def model(request, data):
    """Return a small model in float64; its config is saved beside its processor."""
    made = processors.new_model(request.param).double()
    made.config.save_pretrained(data.root / request.param)
    made.folder = request.param
    return made


def batches(dataset, size, **more):
    param = {"batch_size": size, "shuffle": False, **more}
    return list(build_mm_dataloader(dataset, param))


def run(model, batch):
    """Return the sum of the losses of a batch, and the gradients of the image encoder."""
    floats = {n: t.double() if t.is_floating_point() else t for n, t in batch.items()}
    labels = floats.pop("labels")
    model.zero_grad()
    logits = model(**floats, use_cache=False).logits
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    loss.backward()
    return loss.item(), [p.grad for n, p in model.named_parameters() if "vis" in n]


@pytest.fixture(scope="module")
def separate(model, data):
    """Return the loss sum of every record, each in a batch of its own."""
    found = []
    for record in RECORDS:
        (batch,) = batches(data.open([record], model=model.folder), 1)
        assert ("pixel_values" in batch) == bool(record["images"])
        found.append(run(model, batch)[0])
    return found


def test_blank_media_change_no_loss(model, data, separate):
    found = batches(data.open(RECORDS, model=model.folder), 1)
    for batch, right in zip(found, separate, strict=True):
        loss, vision = run(model, batch)
        assert loss == pytest.approx(right, rel=1e-12)
        # All ranks run the image encoder, also for a record without images.
        assert all(grad is not None for grad in vision)
    assert not any(grad.any() for grad in vision)


def test_padding_changes_no_loss(model, data, separate):
    first, second = batches(data.open(RECORDS, model=model.folder), 2)
    assert first["input_ids"].shape[1] % 8 == 0 and set(first) == set(second)
    assert run(model, first)[0] == pytest.approx(sum(separate[:2]), rel=1e-12)
    assert run(model, second)[0] == pytest.approx(sum(separate[2:]), rel=1e-12)


def test_packed_samples_do_not_attend_to_each_other(model, data, separate):
    basic = {"packing": True, "cutoff_len": 96, "preprocessing_num_workers": 1}
    dataset = data.open(RECORDS, model=model.folder, basic=basic)
    assert len(dataset) < len(RECORDS)
    for size in (1, 2):
        found = batches(dataset, size, drop_last=False)
        assert "attention_mask" not in found[0] and found[0]["input_ids"].shape[0] == 1
        total = sum(run(model, batch)[0] for batch in found)
        assert total == pytest.approx(sum(separate), rel=1e-12)


def test_no_loss_across_packed_samples(model, data):
    """With losses on prompts, a first token could be predicted from the previous sample."""
    basic = {"train_on_prompt": True, "cutoff_len": 96}
    unpacked = batches(data.open(RECORDS, model=model.folder, basic=basic), 1)
    packed = data.open(RECORDS, model=model.folder, basic=basic | {"packing": True})
    losses = [
        sum(run(model, batch)[0] for batch in found) for found in (unpacked, batches(packed, 1))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_a_batch_without_samples_has_no_loss(model, data):
    dataset = data.open(RECORDS, model=model.folder)
    batch = dataset.collator(8)([])
    assert (batch["labels"] == -100).all()
    loss, vision = run(model, batch)
    assert loss == 0 and not any(grad.any() for grad in vision)
