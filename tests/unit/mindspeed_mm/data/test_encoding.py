"""Records to samples: the tokens and tensors of transformers' own processors, labels of our own."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from mindspeed.config import ConfigError, build
from mindspeed_mm.data.dataset import open_datasets
from mindspeed_mm.data.options import DatasetOptions
from mindspeed_mm.data.processor import MediaProcessor, load_processor
from tests import small_processors

MODELS = ("qwen2_5_vl", "internvl", "llava")
SIZES = {"a.png": (40, 16), "b.png": (16, 30), "c.png": (9, 9)}
TALK = [
    ("user", "Look: <image> and <image>. What is <|im_end|>?"),
    ("assistant", "A dog."),
    ("user", "And this one?\n<image>"),
    ("assistant", "I am a small model."),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a folder for each processor, and one with images."""
    root = tmp_path_factory.mktemp("mm")
    for model in MODELS:
        getattr(small_processors, f"save_{model}")(root / model)
    random = np.random.default_rng(0)
    for name, (width, height) in SIZES.items():
        pixels = random.integers(0, 255, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(root / name)
    return root


def options(folders, records, *, model="qwen2_5_vl", attr=None, basic=None, more=None):
    path = folders / "records.json"
    path.write_text(json.dumps(records))
    values = {
        "attr": attr or {},
        "basic_parameters": {"dataset": str(path), **(basic or {})},
        "preprocess_parameters": {"model_name_or_path": str(folders / model), **(more or {})},
    }
    return build(DatasetOptions, values)


def open_all(given):
    parameters = given.preprocess_parameters
    return open_datasets(given, MediaProcessor(load_processor(parameters), parameters))


def samples(folders, records, **more):
    return [one for row in open_all(options(folders, records, **more)) for one in row]


def talk(turns=TALK, images=tuple(SIZES)):
    names = {"user": "human", "assistant": "gpt"}
    said = [{"from": names[role], "value": text} for role, text in turns]
    return {"conversations": said, "images": list(images)}


def reference(folders, model, turns=TALK, images=tuple(SIZES)):
    """Return what transformers makes of the whole conversation at once."""
    processor = load_processor(options(folders, [], model=model).preprocess_parameters)
    messages = []
    for role, text in turns:
        parts = []
        for place, piece in enumerate(text.split("<image>")):
            parts += [{"type": "image"}] if place else []
            parts += [{"type": "text", "text": piece}] if piece else []
        messages.append({"role": role, "content": parts})
    text = processor.apply_chat_template(messages, tokenize=False)
    opened = [Image.open(folders / name).convert("RGB") for name in images]
    return processor, processor(text=[text], images=opened, return_tensors="pt")


@pytest.mark.parametrize("model", MODELS)
def test_samples_equal_what_the_processor_makes_of_the_whole(folders, model):
    turns = [(role, text.replace("<|im_end|>", "it")) for role, text in TALK]
    (sample,) = samples(folders, [talk(turns)], model=model)
    processor, right = reference(folders, model, turns)
    assert sample.ids.tolist() == right["input_ids"][0].tolist()
    for name, tensors in sample.tensors.items():
        assert torch.equal(torch.cat(tensors), torch.as_tensor(right[name]))
    for name, marks in sample.marks.items():
        assert marks.tolist() == right[name][0].tolist()
    learnt = sample.ids[sample.labels != -100]
    said = processor.tokenizer.decode(learnt).split("<|im_end|>")
    assert [text.strip() for text in said] == ["A dog.", "I am a small model.", ""]
    assert (sample.labels[sample.labels != -100] == learnt).all()


def test_special_tokens_in_the_data_stay_text(folders):
    (sample,) = samples(folders, [talk()])
    tokenizer = small_processors.qwen2_5_vl().tokenizer
    assert (sample.ids == tokenizer.convert_tokens_to_ids("<|im_end|>")).sum() == len(TALK)
    assert TALK[0][1].partition("What")[2] in tokenizer.decode(sample.ids)


def test_label_masks(folders):
    tokenizer = small_processors.qwen2_5_vl().tokenizer
    (sample,) = samples(folders, [talk()], basic={"mask_history": True})
    learnt = tokenizer.decode(sample.ids[sample.labels != -100])
    assert learnt == "I am a small model.<|im_end|>"
    (sample,) = samples(folders, [talk()], basic={"train_on_prompt": True})
    images = sample.ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert (sample.labels == np.where(images, -100, sample.ids)).all() and images.any()


def test_layouts_say_the_same(folders):
    """ShareGPT with other names, OpenAI with parts, and alpaca with history."""
    plain = samples(folders, [talk()])[0]
    messages = [{"role": role, "content": text} for role, text in TALK]
    named = {"messages": "messages", "role_tag": "role", "content_tag": "content"}
    named |= {"user_tag": "user", "assistant_tag": "assistant", "images": "pictures"}
    named |= {"observation_tag": None, "system_tag": "system"}
    record = {"messages": messages, "pictures": list(SIZES)}
    parts = [
        {"role": "user", "content": _openai(TALK[0][1], ["a.png", "b.png"])},
        {"role": "assistant", "content": TALK[1][1]},
        {"role": "user", "content": _openai(TALK[2][1], ["c.png"])},
        {"role": "assistant", "content": [{"type": "text", "text": TALK[3][1]}]},
    ]
    alpaca = {"instruction": TALK[2][1], "output": TALK[3][1], "images": list(SIZES)}
    alpaca["turns"] = [[TALK[0][1], TALK[1][1]]]
    found = [
        samples(folders, [record], attr=named)[0],
        samples(folders, [{"messages": parts}], attr={"formatting": "openai"})[0],
        samples(folders, [alpaca], attr={"formatting": "alpaca", "history": "turns"})[0],
    ]
    by_name = samples(folders, [talk()], basic={"template": "chatml"})[0]
    assert by_name.ids.tolist() == plain.ids.tolist()[:-1]  # without the last line break
    for other in found:
        assert other.ids.tolist() == plain.ids.tolist()
        assert other.labels.tolist() == plain.labels.tolist()
        assert torch.equal(*(torch.cat(s.tensors["pixel_values"]) for s in (other, plain)))


def _openai(text, images):
    parts, left = [], list(images)
    for place, piece in enumerate(text.split("<image>")):
        if place:
            parts.append({"type": "image_url", "image_url": {"url": left.pop(0)}})
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


def test_text_is_cut_and_images_are_not(folders):
    whole = samples(folders, [talk()])[0]
    image = small_processors.qwen2_5_vl().tokenizer.convert_tokens_to_ids("<|image_pad|>")
    first = int(np.flatnonzero(whole.ids == image)[0])
    cut = samples(folders, [talk()], basic={"cutoff_len": len(whole) - 5})[0]
    assert cut.ids.tolist() == whole.ids.tolist()[:-5]
    answer = int(np.flatnonzero(whole.labels != -100)[0])
    shorter = samples(folders, [talk()], basic={"cutoff_len": answer + 1})[0]
    assert len(shorter) == answer + 1 and len(shorter.tensors["image_grid_thw"]) == 2
    dataset = open_all(options(folders, [talk()], basic={"cutoff_len": first + 3}))
    with pytest.raises(ConfigError, match="json, line 1: the image behind token .* would be cut"):
        dataset[0]
    skips = {"cutoff_len": first + 3, "on_bad_record": "skip"}
    (skipped,) = open_all(options(folders, [talk()], basic=skips))[0]
    assert "would be cut" in skipped.reason
    (unusable,) = open_all(options(folders, [talk()], basic={"cutoff_len": first}))[0]
    assert unusable.reason == "nothing to learn is left" and not unusable.is_bad


def test_sizes_of_images(folders):
    (sample,) = samples(folders, [talk()], more={"image_max_pixels": 128})
    grids = torch.cat(sample.tensors["image_grid_thw"])
    assert (grids.prod(1) * small_processors.PATCH**2 <= 192).all()


BAD = {
    "has 1 <image> for 2 images": talk([("user", "<image>"), ("assistant", "x")], ["a.png"] * 2),
    "nothing.png does not exist": talk([("user", "<image>"), ("assistant", "x")], ["nothing.png"]),
    "is on the network": talk([("user", "<image>"), ("assistant", "x")], ["http://x/y.png"]),
    "an answer holds <image>": talk([("user", "x"), ("assistant", "<image>")], ["a.png"]),
    "has no conversations": {"talk": []},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_records_are_named_or_skipped_and_counted(folders, message):
    records = [talk(), BAD[message], talk()]
    with pytest.raises(ConfigError, match=f"records.json, line 1: .*{message}"):
        open_all(options(folders, records))
    dataset = open_all(options(folders, records, basic={"on_bad_record": "skip"}))
    assert len(dataset) == 2 and message in dataset.skipped[0].reason


def test_damaged_images_are_named_or_skipped(folders):
    (folders / "half.png").write_bytes((folders / "a.png").read_bytes()[:200])
    record = talk([("user", "<image>"), ("assistant", "x")], ["half.png"])
    with pytest.raises(ConfigError, match="line 1: the image .*half.png cannot be read"):
        open_all(options(folders, [record]))[0]
    (skipped,) = open_all(options(folders, [record], basic={"on_bad_record": "skip"}))[0]
    assert "half.png cannot be read" in skipped.reason


@pytest.mark.parametrize(
    "section, values, message",
    [
        ("attr", {"imges": "x"}, "unknown option attr.imges='x'; did you mean images?"),
        ("basic", {"cutof_len": 3}, "cutof_len=3; did you mean cutoff_len?"),
        ("basic", {"train_on_prompt": True, "mask_history": True}, "choose one"),
        ("basic", {"template": "qwen2"}, "template qwen2: .* did you mean qwen3?"),
        ("basic", {"packing": True}, "give it, or --seq-length"),
        ("more", {"model_name_or_path": "no/where"}, "no/where is no folder"),
    ],
)
def test_wrong_options(folders, section, values, message):
    with pytest.raises(ConfigError, match=message):
        open_all(options(folders, [talk()], **{section: values}))
