"""Records to samples: the tokens and tensors of transformers' own processors, labels of our own."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from mindspeed.config import ConfigError
from mindspeed_mm.data.processor import load_processor
from tests.mm import processors

IMAGES = ("a.png", "b.png", "c.png")
TALK = [
    ("user", "Look: <image> and <image>. What is <|im_end|>?"),
    ("assistant", "A dog."),
    ("user", "And this one?\n<image>"),
    ("assistant", "I am a small model."),
]


def talk(turns=TALK, images=IMAGES):
    names = {"user": "human", "assistant": "gpt"}
    said = [{"from": names[role], "value": text} for role, text in turns]
    return {"conversations": said, "images": list(images)}


def reference(data, model, turns=TALK, images=IMAGES):
    """Return what transformers makes of the whole conversation at once."""
    processor = load_processor(data.options([], model=model).preprocess_parameters)
    messages = []
    for role, text in turns:
        parts = []
        for place, piece in enumerate(text.split("<image>")):
            parts += [{"type": "image"}] if place else []
            parts += [{"type": "text", "text": piece}] if piece else []
        messages.append({"role": role, "content": parts})
    text = processor.apply_chat_template(messages, tokenize=False)
    opened = [Image.open(data.root / name).convert("RGB") for name in images]
    return processor, processor(text=[text], images=opened, return_tensors="pt")


@pytest.mark.parametrize("model", processors.MAKERS)
def test_samples_equal_what_the_processor_makes_of_the_whole(data, model):
    turns = [(role, text.replace("<|im_end|>", "it")) for role, text in TALK]
    (sample,) = data.samples([talk(turns)], model=model)
    processor, right = reference(data, model, turns)
    assert sample.ids.tolist() == right["input_ids"][0].tolist()
    batch = data.open([talk(turns)], model=model).collator(1)([sample])
    assert set(batch) - {"labels"} == set(right)
    for name in sample.tensors:
        assert torch.equal(batch[name], torch.as_tensor(right[name]))
    for name, marks in sample.marks.items():
        assert marks.tolist() == right[name][0].tolist()
    learnt = sample.ids[sample.labels != -100]
    said = processor.tokenizer.decode(learnt).split("<|im_end|>")
    assert [text.strip() for text in said] == ["A dog.", "I am a small model.", ""]
    assert (sample.labels[sample.labels != -100] == learnt).all()


def test_special_tokens_in_the_data_stay_text(data):
    (sample,) = data.samples([talk()])
    tokenizer = processors.qwen2_5_vl().tokenizer
    assert (sample.ids == tokenizer.convert_tokens_to_ids("<|im_end|>")).sum() == len(TALK)
    assert TALK[0][1].partition("What")[2] in tokenizer.decode(sample.ids)


def test_label_masks(data):
    tokenizer = processors.qwen2_5_vl().tokenizer
    (sample,) = data.samples([talk()], basic={"mask_history": True})
    learnt = tokenizer.decode(sample.ids[sample.labels != -100])
    assert learnt == "I am a small model.<|im_end|>"
    (sample,) = data.samples([talk()], basic={"train_on_prompt": True})
    images = sample.ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert (sample.labels == np.where(images, -100, sample.ids)).all() and images.any()


def test_layouts_say_the_same(data):
    """ShareGPT with other names, OpenAI with parts, and alpaca with history."""
    plain = data.samples([talk()])[0]
    messages = [{"role": role, "content": text} for role, text in TALK]
    named = {"messages": "messages", "role_tag": "role", "content_tag": "content"}
    named |= {"user_tag": "user", "assistant_tag": "assistant", "images": "pictures"}
    named |= {"observation_tag": None, "system_tag": "system"}
    record = {"messages": messages, "pictures": list(IMAGES)}
    parts = [
        {"role": "user", "content": _openai(TALK[0][1], ["a.png", "b.png"])},
        {"role": "assistant", "content": TALK[1][1]},
        {"role": "user", "content": _openai(TALK[2][1], ["c.png"])},
        {"role": "assistant", "content": [{"type": "text", "text": TALK[3][1]}]},
    ]
    alpaca = {"instruction": TALK[2][1], "output": TALK[3][1], "images": list(IMAGES)}
    alpaca["turns"] = [[TALK[0][1], TALK[1][1]]]
    found = [
        data.samples([record], attr=named)[0],
        data.samples([{"messages": parts}], attr={"formatting": "openai"})[0],
        data.samples([alpaca], attr={"formatting": "alpaca", "history": "turns"})[0],
    ]
    with pytest.raises(ConfigError, match="names images in its messages and in a column"):
        data.open([{"messages": parts, "images": ["a.png"]}], attr={"formatting": "openai"})
    by_name = data.samples([talk()], basic={"template": "chatml"})[0]
    assert by_name.ids.tolist() == plain.ids.tolist()[:-1]  # without the last line break
    for other in found:
        assert other.ids.tolist() == plain.ids.tolist()
        assert other.labels.tolist() == plain.labels.tolist()
        assert torch.equal(*(torch.cat(s.tensors["pixel_values"]) for s in (other, plain)))


def _openai(text, images):
    parts, left = [], list(images)
    for place, piece in enumerate(text.split("<image>")):
        if place:
            forms = {"image_url": {"url": left[0]}}, {"image": left[0]}, {"path": left[0]}
            form = forms[len(left) % 3]
            parts.append({"type": next(iter(form)).replace("path", "image"), **form})
            left.pop(0)
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


def test_images_in_a_parquet_file(data):
    """As Hugging Face writes them: bytes in the record."""
    pictures = [{"bytes": (data.root / name).read_bytes(), "path": name} for name in IMAGES]
    table = pa.Table.from_pylist([talk(images=()) | {"images": pictures}])
    pq.write_table(table, data.root / "rows.parquet")
    rows = {"dataset": str(data.root / "rows.parquet")}
    found, plain = (data.samples([talk()], basic=basic)[0] for basic in (rows, {}))
    assert found.ids.tolist() == plain.ids.tolist()
    assert torch.equal(*(torch.cat(s.tensors["pixel_values"]) for s in (found, plain)))


def test_text_is_cut_and_images_are_not(data):
    whole = data.samples([talk()])[0]
    image = processors.qwen2_5_vl().tokenizer.convert_tokens_to_ids("<|image_pad|>")
    first = int(np.flatnonzero(whole.ids == image)[0])
    cut = data.samples([talk()], basic={"cutoff_len": len(whole) - 5})[0]
    assert cut.ids.tolist() == whole.ids.tolist()[:-5]
    answer = int(np.flatnonzero(whole.labels != -100)[0])
    shorter = data.samples([talk()], basic={"cutoff_len": answer + 1})[0]
    assert len(shorter) == answer + 1 and len(shorter.tensors["image_grid_thw"]) == 2
    dataset = data.open([talk()], basic={"cutoff_len": first + 3})
    with pytest.raises(ConfigError, match="jsonl, line 1: the image behind token .* would be cut"):
        dataset[0]
    skips = {"cutoff_len": first + 3, "on_bad_record": "skip"}
    (skipped,) = data.open([talk()], basic=skips)[0]
    assert "would be cut" in skipped.reason
    (unusable,) = data.open([talk()], basic={"cutoff_len": first})[0]
    assert unusable.reason == "nothing to learn is left" and not unusable.is_bad


def test_sizes_of_images(data):
    (sample,) = data.samples([talk()], more={"image_max_pixels": 128})
    grids = torch.cat(sample.tensors["image_grid_thw"])
    assert (grids.prod(1) * processors.PATCH**2 <= 192).all()


BAD = {
    "has 1 <image> for 2 images": talk([("user", "<image>"), ("assistant", "x")], ["a.png"] * 2),
    "nothing.png does not exist": talk([("user", "<image>"), ("assistant", "x")], ["nothing.png"]),
    "is on the network": talk([("user", "<image>"), ("assistant", "x")], ["http://x/y.png"]),
    "an answer holds <image>": talk([("user", "x"), ("assistant", "<image>")], ["a.png"]),
    "has no conversations": {"talk": []},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_records_are_named_or_skipped_and_counted(data, message):
    records = [talk(), BAD[message], talk()]
    with pytest.raises(ConfigError, match=f"records.jsonl, line 2: .*{message}"):
        data.open(records)
    dataset = data.open(records, basic={"on_bad_record": "skip"})
    assert len(dataset) == 2 and message in dataset.skipped[0].reason


def test_damaged_images_are_named_or_skipped(data):
    (data.root / "half.png").write_bytes((data.root / "a.png").read_bytes()[:200])
    record = talk([("user", "<image>"), ("assistant", "x")], ["half.png"])
    with pytest.raises(ConfigError, match="line 1: the image .*half.png cannot be read"):
        data.open([record])[0]
    (skipped,) = data.open([record], basic={"on_bad_record": "skip"})[0]
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
def test_wrong_options(data, section, values, message):
    with pytest.raises(ConfigError, match=message):
        data.open([talk()], **{section: values})


@pytest.mark.parametrize("column", ["audios", "audio", "image", "video"])
def test_media_in_a_column_that_is_not_read_are_named(data, column):
    said = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]
    record = {"conversations": said, column: ["a.wav"]}
    with pytest.raises(ConfigError, match=f"line 1: has {column}, which is not read .*images, vid"):
        data.open([record])
    data.open([record | {column: []}])
    with pytest.raises(ConfigError, match="has images, which is not read"):
        data.open([{"conversations": said, "images": ["a.png"]}], attr={"images": None})


def test_audio_in_a_message_is_named(data):
    content = [{"type": "input_audio", "input_audio": {"data": ""}}, {"type": "text", "text": "?"}]
    said = [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes."}]
    with pytest.raises(ConfigError, match="line 1: a message holds input_audio: only text"):
        data.open([{"messages": said}], attr={"formatting": "openai"})


@pytest.mark.parametrize("formatting, role", [("sharegpt", "from"), ("openai", "role")])
def test_a_role_that_is_not_known_stops_the_run(data, formatting, role):
    record = {"conversations": [{role: "cat", "value": "miau", "content": "miau"}]}
    attr = {"formatting": formatting, "messages": "conversations"}
    with pytest.raises(ConfigError, match=f"line 1: a message has the {role} 'cat'") as error:
        data.open([record], attr=attr)
    assert "--map-keys" not in str(error.value)


def test_records_of_a_one_line_array_are_told_apart(data):
    good = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes."}]}
    (data.root / "one.json").write_text(json.dumps([good, good, {"conversations": 3}]))
    with pytest.raises(ConfigError, match="one.json, record 3: conversations holds a number"):
        data.open([], basic={"dataset": str(data.root / "one.json")})
