"""Images and videos from files, addresses and folders; videos through a processor."""

import base64
import importlib.metadata
import importlib.util
import io
import re
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from mindspeed.config import ConfigError
from mindspeed_llm.data.conversation import MalformedRecord
from mindspeed_mm.data.dataset import open_datasets
from mindspeed_mm.data.media import Medium, open_image, open_video, sample_frames
from mindspeed_mm.data.options import ProcessorOptions
from mindspeed_mm.data.processor import MediaProcessor
from tests.mm import processors, videos

FRAMES, SECONDS = 12, 3.0


@pytest.fixture(scope="module")
def pictures():
    random = np.random.default_rng(3)
    levels = [random.integers(0, 256, (16, 16, 3)).astype(np.uint8) for _ in range(FRAMES)]
    return [Image.fromarray(level).quantize(16).convert("RGB") for level in levels]


@pytest.fixture(scope="module")
def film(pictures, tmp_path_factory):
    """Return an animation of four frames a second."""
    path = tmp_path_factory.mktemp("film") / "a.gif"
    lasts = 1000 * SECONDS / FRAMES
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=lasts)
    return path


def options(**more):
    return ProcessorOptions(model_name_or_path="m", **more)


@pytest.mark.parametrize(
    "total, fps, more, right",
    [
        (12, 4.0, {}, [0, 2, 4, 7, 9, 11]),
        (12, 4.0, {"video_maxlen": 3}, [0, 6, 11]),
        (12, 4.0, {"video_fps": 8.0}, list(range(12))),
        (300, 100.0, {"video_fps": 0.1}, [0, 299]),
        (1, 25.0, {}, [0]),
    ],
)
def test_frames_are_taken_at_equal_distances(total, fps, more, right):
    assert sample_frames(total, fps, options(**more)) == right


def test_animations_lists_and_folders_are_videos(film, pictures, tmp_path):
    clip = open_video(Medium("video", film.name, film.parent), options())
    assert (clip.fps, clip.total, clip.indices) == (4.0, FRAMES, [0, 2, 4, 7, 9, 11])
    for frame, index in zip(clip.frames, clip.indices):
        assert np.abs(frame.astype(int) - np.asarray(pictures[index])).mean() < 8
    for number, picture in enumerate(pictures):
        picture.save(tmp_path / f"{number:02}.png")
    names = [f"{number:02}.png" for number in range(FRAMES)]
    for source in (names, "."):
        found = open_video(Medium("video", source, tmp_path), options(video_fps=1.0))
        right = [np.asarray(pictures[index]) for index in found.indices]
        assert len(right) == 6 and (found.frames == np.stack(right)).all()
    small = open_video(Medium("video", names, tmp_path), options(video_max_pixels=64))
    assert small.frames.shape[1:] == (8, 8, 3)


def test_images_from_addresses_and_turned_ones(pictures, tmp_path):
    buffer = io.BytesIO()
    pictures[0].save(buffer, "png")
    address = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    for source in (address, {"bytes": address, "path": None}):
        found = open_image(Medium("image", source, tmp_path), options())
        assert (np.asarray(found) == np.asarray(pictures[0])).all()
    turned = Image.Exif()
    turned[0x0112] = 6  # to be shown turned by a quarter
    Image.new("RGB", (10, 20)).save(tmp_path / "t.jpg", exif=turned)
    assert open_image(Medium("image", "t.jpg", tmp_path), options()).size == (20, 10)
    larger = open_image(Medium("image", "t.jpg", tmp_path), options(image_min_pixels=800))
    assert larger.size == (40, 20)
    with pytest.raises(MalformedRecord, match="is not valid base64"):
        open_image(Medium("image", "data:image/png;base64,!!", tmp_path), options())


def test_damaged_and_missing_videos_are_told(film, pictures, tmp_path):
    whole = film.read_bytes()
    for size in (40, len(whole) // 2):  # the head of the file, and some frames
        (tmp_path / "half.gif").write_bytes(whole[:size])
        with pytest.raises(MalformedRecord, match="half.gif (cannot be read|ends after)"):
            open_video(Medium("video", "half.gif", tmp_path), options())
    with pytest.raises(MalformedRecord, match="c.mp4 does not exist"):
        Medium("video", "c.mp4", tmp_path).check()
    (tmp_path / "frames").mkdir()
    for number, picture in enumerate([pictures[0], Image.new("RGB", (8, 8))]):
        picture.save(tmp_path / "frames" / f"{number}.png")
    with pytest.raises(MalformedRecord, match="the frames of the video frames differ in size"):
        open_video(Medium("video", "frames", tmp_path), options())


def test_films_need_a_decoder(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    (tmp_path / "b.mp4").write_bytes(b"no video")
    release = importlib.metadata.version("torch").partition("+")[0]
    right = f"b.mp4 cannot be read without PyAV: pip install av torchvision torch=={release}"
    with pytest.raises(ConfigError, match=re.escape(right)):
        Medium("video", "b.mp4", tmp_path).check()


@pytest.mark.skipif(importlib.util.find_spec("av") is None, reason="no films: av is not installed")
@pytest.mark.parametrize("kind", ["mp4", "mkv", "avi"])
def test_films(kind, tmp_path):
    path = tmp_path / f"a.{kind}"
    videos.write_film(path, seed=1, size=64)
    address = "data:video/x;base64," + base64.b64encode(path.read_bytes()).decode()
    for source in (path.name, address):
        clip = open_video(Medium("video", source, tmp_path), options())
        assert (clip.fps, clip.total, clip.indices) == (4.0, FRAMES, videos.TAKEN)
        assert (clip.frames == videos.frames(path)).all()
    # All of the head, which says how long it is; half of the frames.
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    if kind == "mkv":  # it does not say how long it is
        assert open_video(Medium("video", path.name, tmp_path), options()).total < FRAMES
    else:
        with pytest.raises(MalformedRecord, match="cannot be read: .*Invalid data|ends after"):
            open_video(Medium("video", path.name, tmp_path), options())


class Videos:
    """Does what Qwen's video processor does, which needs torchvision: patches of every frame."""

    merge_size, temporal_patch_size = 2, 1
    model_input_names = ["pixel_values_videos", "video_grid_thw"]

    def __call__(self, videos, video_metadata, do_sample_frames, **_):
        assert not do_sample_frames
        side, patches, grids = processors.PATCH, [], []
        for frames in videos:
            count, height, width, _ = frames.shape
            tiles = torch.from_numpy(frames).unfold(1, side, side).unfold(2, side, side)
            patches.append(tiles.reshape(-1, 3 * side * side) / 255.0)
            grids.append([count, height // side, width // side])
        facts = [Facts(**one) for one in video_metadata]
        found = {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids)}
        return found | {"video_metadata": facts}


class Facts:
    """What a video processor knows of a video."""

    def __init__(self, total_num_frames, fps, frames_indices, duration):
        self.sampled_fps = len(frames_indices) / total_num_frames * fps


def test_videos_go_through_the_processor(data, film):
    records = [
        {
            "conversations": [
                {"from": "human", "value": "<video> and <image>: what happens?"},
                {"from": "gpt", "value": "A fox jumps."},
            ],
            "videos": [str(film)],
            "images": "a.png",
        },
        {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "I know."}]},
    ]
    given = data.options(records)
    processor = processors.qwen2_5_vl()
    processor.video_processor = Videos()
    names = ["image_processor", "tokenizer", "video_processor"]
    type(processor).get_attributes = classmethod(lambda cls: names)
    dataset = open_datasets(given, MediaProcessor(processor, given.preprocess_parameters))
    (sample,) = dataset[0]
    clip = open_video(Medium("video", str(film), film.parent), given.preprocess_parameters)
    facts = {"total_num_frames": FRAMES, "fps": 4.0, "frames_indices": clip.indices, "duration": 3}
    text = processor.apply_chat_template(
        [
            {
                "role": "user",
                "content": [
                    {"type": "video"},
                    {"type": "text", "text": " and "},
                    {"type": "image"},
                    {"type": "text", "text": ": what happens?"},
                ],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "A fox jumps."}]},
        ],
        tokenize=False,
    )
    right = processor(
        text=[text],
        images=[Image.open(data.root / "a.png")],
        videos=[clip.frames],
        video_metadata=[facts],
        do_sample_frames=False,
        return_tensors="pt",
    )
    assert sample.ids.tolist() == right["input_ids"][0].tolist()
    assert sample.marks["mm_token_type_ids"].tolist() == right["mm_token_type_ids"][0].tolist()
    assert set(sample.tensors) | {"input_ids", "attention_mask", "mm_token_type_ids"} == set(right)
    for name, tensors in sample.tensors.items():
        assert torch.equal(torch.cat(tensors), torch.as_tensor(right[name]))
    alone = dataset.collator(8)(dataset[1])  # text, with an image and a video that stand in
    assert {"pixel_values", "pixel_values_videos", "second_per_grid_ts"} <= set(alone)
    assert alone["attention_mask"].sum() == len(dataset[1][0])
