"""Records to samples: tokens and tensors of transformers' processors, our labels."""

import json
import re

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
TURNS = [
    ("user", "Look: <image> and <image>. What is <|im_end|>?"),
    ("assistant", "A dog."),
    ("user", "And this one?\n<image>"),
    ("assistant", "I am a small model."),
]


def conversation(turns=TURNS, images=IMAGES):
    names = {"user": "human", "assistant": "gpt"}
    messages = [{"from": names[role], "value": text} for role, text in turns]
    return {"conversations": messages, "images": list(images)}


def reference(data, model, turns=TURNS, images=IMAGES):
    """Return the output of transformers for the whole conversation at once."""
    processor = load_processor(data.options([], model=model).preprocess_parameters)
    messages = []
    for role, text in turns:
        parts = []
        for index, piece in enumerate(text.split("<image>")):
            parts += [{"type": "image"}] if index else []
            parts += [{"type": "text", "text": piece}] if piece else []
        messages.append({"role": role, "content": parts})
    text = processor.apply_chat_template(messages, tokenize=False)
    opened = [Image.open(data.root / name).convert("RGB") for name in images]
    return processor, processor(text=[text], images=opened, return_tensors="pt")


@pytest.mark.parametrize("model", processors.MAKERS)
def test_samples_equal_the_processor_on_the_whole_conversation(data, model):
    turns = [(role, text.replace("<|im_end|>", "it")) for role, text in TURNS]
    (sample,) = data.samples([conversation(turns)], model=model)
    processor, right = reference(data, model, turns)
    assert sample.ids.tolist() == right["input_ids"][0].tolist()
    batch = data.open([conversation(turns)], model=model).collator(1)([sample])
    assert set(batch) - {"labels"} == set(right)
    for name in sample.tensors:
        assert torch.equal(batch[name], torch.as_tensor(right[name]))
    for name, types in sample.token_types.items():
        assert types.tolist() == right[name][0].tolist()
    trained = sample.ids[sample.labels != -100]
    answers = processor.tokenizer.decode(trained).split("<|im_end|>")
    assert [text.strip() for text in answers] == ["A dog.", "I am a small model.", ""]
    assert (sample.labels[sample.labels != -100] == trained).all()


def test_special_tokens_in_the_data_stay_text(data):
    (sample,) = data.samples([conversation()])
    tokenizer = processors.qwen2_5_vl().tokenizer
    assert (sample.ids == tokenizer.convert_tokens_to_ids("<|im_end|>")).sum() == len(TURNS)
    assert TURNS[0][1].partition("What")[2] in tokenizer.decode(sample.ids)


def test_label_masks(data):
    tokenizer = processors.qwen2_5_vl().tokenizer
    (sample,) = data.samples([conversation()], basic={"mask_history": True})
    trained = tokenizer.decode(sample.ids[sample.labels != -100])
    assert trained == "I am a small model.<|im_end|>"
    (sample,) = data.samples([conversation()], basic={"train_on_prompt": True})
    images = sample.ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert (sample.labels == np.where(images, -100, sample.ids)).all() and images.any()


def test_layouts_give_equal_samples(data):
    """ShareGPT with other names, OpenAI with parts, and alpaca with history."""
    plain = data.samples([conversation()])[0]
    messages = [{"role": role, "content": text} for role, text in TURNS]
    named = {"messages": "messages", "role_tag": "role", "content_tag": "content"}
    named |= {"user_tag": "user", "assistant_tag": "assistant", "images": "pictures"}
    named |= {"observation_tag": None, "system_tag": "system"}
    record = {"messages": messages, "pictures": list(IMAGES)}
    parts = [
        {"role": "user", "content": _openai(TURNS[0][1], ["a.png", "b.png"])},
        {"role": "assistant", "content": TURNS[1][1]},
        {"role": "user", "content": _openai(TURNS[2][1], ["c.png"])},
        {"role": "assistant", "content": [{"type": "text", "text": TURNS[3][1]}]},
    ]
    alpaca = {"instruction": TURNS[2][1], "output": TURNS[3][1], "images": list(IMAGES)}
    alpaca["turns"] = [[TURNS[0][1], TURNS[1][1]]]
    found = [
        data.samples([record], attr=named)[0],
        data.samples([{"messages": parts}], attr={"formatting": "openai"})[0],
        data.samples([alpaca], attr={"formatting": "alpaca", "history": "turns"})[0],
    ]
    with pytest.raises(ConfigError, match="has images in its messages and in a column"):
        data.open([{"messages": parts, "images": ["a.png"]}], attr={"formatting": "openai"})
    by_name = data.samples([conversation()], basic={"template": "chatml"})[0]
    assert by_name.ids.tolist() == plain.ids.tolist()[:-1]  # without the last line break
    for other in found:
        assert other.ids.tolist() == plain.ids.tolist()
        assert other.labels.tolist() == plain.labels.tolist()
        assert torch.equal(*(torch.cat(s.tensors["pixel_values"]) for s in (other, plain)))


def _openai(text, images):
    parts, left = [], list(images)
    for index, piece in enumerate(text.split("<image>")):
        if index:
            forms = {"image_url": {"url": left[0]}}, {"image": left[0]}, {"path": left[0]}
            form = forms[len(left) % 3]
            parts.append({"type": next(iter(form)).replace("path", "image"), **form})
            left.pop(0)
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


def test_images_in_a_parquet_file(data):
    """As Hugging Face writes them: bytes in the record."""
    pictures = [{"bytes": (data.root / name).read_bytes(), "path": name} for name in IMAGES]
    table = pa.Table.from_pylist([conversation(images=()) | {"images": pictures}])
    pq.write_table(table, data.root / "rows.parquet")
    rows = {"dataset": str(data.root / "rows.parquet")}
    found, plain = (data.samples([conversation()], basic=basic)[0] for basic in (rows, {}))
    assert found.ids.tolist() == plain.ids.tolist()
    assert torch.equal(*(torch.cat(s.tensors["pixel_values"]) for s in (found, plain)))


def test_text_is_truncated_and_images_are_not(data):
    whole = data.samples([conversation()])[0]
    image = processors.qwen2_5_vl().tokenizer.convert_tokens_to_ids("<|image_pad|>")
    first = int(np.flatnonzero(whole.ids == image)[0])
    cut = data.samples([conversation()], basic={"cutoff_len": len(whole) - 5})[0]
    assert cut.ids.tolist() == whole.ids.tolist()[:-5]
    answer = int(np.flatnonzero(whole.labels != -100)[0])
    shorter = data.samples([conversation()], basic={"cutoff_len": answer + 1})[0]
    assert len(shorter) == answer + 1 and len(shorter.tensors["image_grid_thw"]) == 2
    dataset = data.open([conversation()], basic={"cutoff_len": first + 3})
    with pytest.raises(
        ConfigError, match="jsonl, line 1: the image after token .* would be truncated"
    ):
        dataset[0]
    skips = {"cutoff_len": first + 3, "on_bad_record": "skip"}
    (skipped,) = data.open([conversation()], basic=skips)[0]
    assert "would be truncated" in skipped.reason
    (unusable,) = data.open([conversation()], basic={"cutoff_len": first})[0]
    assert unusable.reason == "no token with a loss is left" and not unusable.is_bad


def test_sizes_of_images(data):
    (sample,) = data.samples([conversation()], more={"image_max_pixels": 128})
    grids = torch.cat(sample.tensors["image_grid_thw"])
    assert (grids.prod(1) * processors.PATCH**2 <= 192).all()


BAD = {
    "has 1 <image> for 2 images": conversation(
        [("user", "<image>"), ("assistant", "x")], ["a.png"] * 2
    ),
    "nothing.png does not exist": conversation(
        [("user", "<image>"), ("assistant", "x")], ["nothing.png"]
    ),
    "is on the network": conversation(
        [("user", "<image>"), ("assistant", "x")], ["http://x/y.png"]
    ),
    "an answer contains <image>": conversation(
        [("user", "x"), ("assistant", "<image>")], ["a.png"]
    ),
    "has no conversations": {"talk": []},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_records_are_named_or_skipped_and_counted(data, message):
    records = [conversation(), BAD[message], conversation()]
    with pytest.raises(ConfigError, match=f"records.jsonl, line 2: .*{message}"):
        data.open(records)
    dataset = data.open(records, basic={"on_bad_record": "skip"})
    assert len(dataset) == 2 and message in dataset.skipped[0].reason


def test_bad_records_are_separated_in_one_line(data):
    with pytest.raises(ConfigError) as error:
        data.open([BAD["has no conversations"], conversation(), BAD["is on the network"]])
    first, _, rest = str(error.value).partition("; fix them, or set on_bad_record: skip")
    assert re.search("line 1: has no conversations.*; [^;]*line 3: .* is on the network", first)
    assert not rest and "\n" not in first


def test_damaged_images_are_named_or_skipped(data):
    (data.root / "half.png").write_bytes((data.root / "a.png").read_bytes()[:200])
    record = conversation([("user", "<image>"), ("assistant", "x")], ["half.png"])
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
        ("basic", {"packing": True}, "set it, or --seq-length"),
        ("more", {"model_name_or_path": "no/where"}, "no/where is not a folder"),
    ],
)
def test_wrong_options(data, section, values, message):
    with pytest.raises(ConfigError, match=message):
        data.open([conversation()], **{section: values})


@pytest.mark.parametrize("column", ["audios", "audio", "image", "video"])
def test_media_in_an_unread_column_raise(data, column):
    messages = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]
    record = {"conversations": messages, column: ["a.wav"]}
    with pytest.raises(ConfigError, match=f"line 1: has {column}, which is not read .*images, vid"):
        data.open([record])
    data.open([record | {column: []}])
    with pytest.raises(ConfigError, match="has images, which is not read"):
        data.open([{"conversations": messages, "images": ["a.png"]}], attr={"images": None})


def test_audio_in_a_message_raises(data):
    content = [{"type": "input_audio", "input_audio": {"data": ""}}, {"type": "text", "text": "?"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes."}]
    with pytest.raises(ConfigError, match="line 1: a message contains input_audio: only text"):
        data.open([{"messages": messages}], attr={"formatting": "openai"})


@pytest.mark.parametrize("formatting, role", [("sharegpt", "from"), ("openai", "role")])
def test_an_unknown_role_stops_the_run(data, formatting, role):
    record = {"conversations": [{role: "cat", "value": "miau", "content": "miau"}]}
    attr = {"formatting": formatting, "messages": "conversations"}
    with pytest.raises(ConfigError, match=f"line 1: a message has the {role} 'cat'") as error:
        data.open([record], attr=attr)
    assert "--map-keys" not in str(error.value)


def test_records_of_a_one_line_array_are_numbered(data):
    good = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes."}]}
    (data.root / "one.json").write_text(json.dumps([good, good, {"conversations": 3}]))
    with pytest.raises(ConfigError, match="one.json, record 3: conversations holds a number"):
        data.open([], basic={"dataset": str(data.root / "one.json")})
