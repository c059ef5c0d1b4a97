"""Images and videos from files, data: URLs and folders; all image modes as RGB."""

import base64
import importlib.metadata
import importlib.util
import io
import os
import re
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from mindspeed.config import ConfigError
from mindspeed_llm.data.conversation import MalformedRecord
from mindspeed_mm.data.dataset import build_datasets
from mindspeed_mm.data.media import MediaItem, open_image, open_video, sample_frames
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
def animation(pictures, tmp_path_factory):
    """Return an animation of four frames a second."""
    path = tmp_path_factory.mktemp("animation") / "a.gif"
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
def test_frames_are_sampled_at_equal_distances(total, fps, more, right):
    assert sample_frames(total, fps, options(**more)) == right


def test_animations_lists_and_folders_are_videos(animation, pictures, tmp_path):
    clip = open_video(MediaItem("video", animation.name, animation.parent), options())
    assert (clip.fps, clip.total, clip.indices) == (4.0, FRAMES, [0, 2, 4, 7, 9, 11])
    for frame, index in zip(clip.frames, clip.indices):
        assert np.abs(frame.astype(int) - np.asarray(pictures[index])).mean() < 8
    for number, picture in enumerate(pictures):
        picture.save(tmp_path / f"{number:02}.png")
    names = [f"{number:02}.png" for number in range(FRAMES)]
    for source in (names, "."):
        found = open_video(MediaItem("video", source, tmp_path), options(video_fps=1.0))
        right = [np.asarray(pictures[index]) for index in found.indices]
        assert len(right) == 6 and (found.frames == np.stack(right)).all()
    small = open_video(MediaItem("video", names, tmp_path), options(video_max_pixels=64))
    assert small.frames.shape[1:] == (8, 8, 3)


@pytest.mark.parametrize("kind", ["gif", "png", "webp"])
@pytest.mark.parametrize("lasts", [[250] * 12, [2000, *[50] * 10, 500]], ids=["even", "uneven"])
def test_frame_rate_of_an_animation_is_the_mean_of_its_frames(kind, lasts, pictures, tmp_path):
    """All twelve frames take three seconds, however long the first is shown."""
    path = tmp_path / f"a.{kind}"
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=lasts)
    clip = open_video(MediaItem("video", path.name, tmp_path), options())
    assert (clip.fps, clip.total, clip.indices) == (4.0, FRAMES, [0, 2, 4, 7, 9, 11])


def test_images_from_data_urls_and_rotated_ones(pictures, tmp_path):
    buffer = io.BytesIO()
    pictures[0].save(buffer, "png")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    for source in (url, {"bytes": url, "path": None}):
        found = open_image(MediaItem("image", source, tmp_path), options())
        assert (np.asarray(found) == np.asarray(pictures[0])).all()
    rotated = Image.Exif()
    rotated[0x0112] = 6  # to be shown rotated by 90 degrees
    Image.new("RGB", (10, 20)).save(tmp_path / "t.jpg", exif=rotated)
    assert open_image(MediaItem("image", "t.jpg", tmp_path), options()).size == (20, 10)
    larger = open_image(MediaItem("image", "t.jpg", tmp_path), options(image_min_pixels=800))
    assert larger.size == (40, 20)
    with pytest.raises(MalformedRecord, match="is not valid base64"):
        open_image(MediaItem("image", "data:image/png;base64,!!", tmp_path), options())


def test_damaged_and_missing_videos_raise(animation, pictures, tmp_path):
    whole = animation.read_bytes()
    for size in (40, len(whole) // 2):  # the head of the file, and some frames
        (tmp_path / "half.gif").write_bytes(whole[:size])
        with pytest.raises(MalformedRecord, match="half.gif (cannot be read|ends after)"):
            open_video(MediaItem("video", "half.gif", tmp_path), options())
    with pytest.raises(MalformedRecord, match="c.mp4 does not exist"):
        MediaItem("video", "c.mp4", tmp_path).check()
    (tmp_path / "frames").mkdir()
    for number, picture in enumerate([pictures[0], Image.new("RGB", (8, 8))]):
        picture.save(tmp_path / "frames" / f"{number}.png")
    with pytest.raises(MalformedRecord, match="the frames of the video frames differ in size"):
        open_video(MediaItem("video", "frames", tmp_path), options())


@pytest.mark.parametrize("modality", ["image", "video"])
def test_what_is_no_file_is_not_opened(modality, tmp_path):
    """Opening a pipe waits for a writer, for ever."""
    os.mkfifo(tmp_path / "a.png")
    for source in ("a.png", ["a.png"]):
        with pytest.raises(MalformedRecord, match=f"the {modality} .*a.png is not a regular file"):
            MediaItem(modality, source, tmp_path).check()
    (tmp_path / "folder").mkdir()
    if modality == "image":
        with pytest.raises(MalformedRecord, match="folder is not a regular file"):
            MediaItem(modality, "folder", tmp_path).check()


def test_video_files_need_pyav(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    (tmp_path / "b.mp4").write_bytes(b"no video")
    release = importlib.metadata.version("torch").partition("+")[0]
    right = f"b.mp4 cannot be read without PyAV: pip install av torchvision torch=={release}"
    with pytest.raises(ConfigError, match=re.escape(right)):
        MediaItem("video", "b.mp4", tmp_path).check()


@pytest.mark.skipif(
    importlib.util.find_spec("av") is None, reason="video files: av is not installed"
)
@pytest.mark.parametrize("kind", ["mp4", "mkv", "avi"])
def test_video_files(kind, tmp_path):
    path = tmp_path / f"a.{kind}"
    videos.write_video(path, seed=1, size=64)
    url = "data:video/x;base64," + base64.b64encode(path.read_bytes()).decode()
    for source in (path.name, url):
        clip = open_video(MediaItem("video", source, tmp_path), options())
        assert (clip.fps, clip.total, clip.indices) == (4.0, FRAMES, videos.TAKEN)
        assert (clip.frames == videos.frames(path)).all()
    # The complete header, which declares the length; half of the frames.
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    if kind == "mkv":  # it does not declare the length
        assert open_video(MediaItem("video", path.name, tmp_path), options()).total < FRAMES
    else:
        with pytest.raises(MalformedRecord, match="cannot be read: .*Invalid data|ends after"):
            open_video(MediaItem("video", path.name, tmp_path), options())


class Videos:
    """Computes patches of every frame like Qwen's video processor, which needs torchvision."""

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
        metadata = [Metadata(**one) for one in video_metadata]
        found = {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids)}
        return found | {"video_metadata": metadata}


class Metadata:
    """The metadata of a video for a video processor."""

    def __init__(self, total_num_frames, fps, frames_indices, duration):
        self.sampled_fps = len(frames_indices) / total_num_frames * fps


def test_videos_go_through_the_processor(data, animation):
    records = [
        {
            "conversations": [
                {"from": "human", "value": "<video> and <image>: what happens?"},
                {"from": "gpt", "value": "A fox jumps."},
            ],
            "videos": [str(animation)],
            "images": "a.png",
        },
        {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "I know."}]},
    ]
    given = data.options(records)
    processor = processors.qwen2_5_vl()
    processor.video_processor = Videos()
    names = ["image_processor", "tokenizer", "video_processor"]
    type(processor).get_attributes = classmethod(lambda cls: names)
    dataset = build_datasets(given, MediaProcessor(processor, given.preprocess_parameters))
    (sample,) = dataset[0]
    clip = open_video(
        MediaItem("video", str(animation), animation.parent), given.preprocess_parameters
    )
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
    assert (
        sample.token_types["mm_token_type_ids"].tolist() == right["mm_token_type_ids"][0].tolist()
    )
    assert set(sample.tensors) | {"input_ids", "attention_mask", "mm_token_type_ids"} == set(right)
    for name, tensors in sample.tensors.items():
        assert torch.equal(torch.cat(tensors), torch.as_tensor(right[name]))
    batch = dataset.collator(8)(dataset[1])  # text, with a blank image and video
    assert {"pixel_values", "pixel_values_videos", "second_per_grid_ts"} <= set(batch)
    assert batch["attention_mask"].sum() == len(dataset[1][0])


GREY = np.arange(256, dtype=np.uint8).reshape(16, 16)
FAST = ProcessorOptions(model_name_or_path="m", video_fps=100.0)


def read(path):
    return np.asarray(open_image(MediaItem("image", path.name, path.parent), FAST))


def as_rgb(grey):
    return np.repeat(grey[..., None], 3, axis=-1)


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.pgm"])
def test_16_bits_are_scaled(name, tmp_path):
    Image.fromarray(GREY.astype(np.uint16) * 257).save(tmp_path / name)
    np.testing.assert_array_equal(read(tmp_path / name), as_rgb(GREY))


def test_a_transparent_value_of_16_bits_is_white(tmp_path):
    values = GREY.astype(np.uint16) * 257
    Image.fromarray(values).save(tmp_path / "a.png", transparency=int(values[3, 4]))
    shown = np.where(values == values[3, 4], 255, GREY)
    np.testing.assert_array_equal(read(tmp_path / "a.png"), as_rgb(shown))


def test_16_bits_of_the_other_byte_order(tmp_path):
    values = GREY.astype(">u2") * 257
    Image.frombytes("I;16B", (16, 16), values.astype(">u2").tobytes()).save(tmp_path / "a.tif")
    np.testing.assert_array_equal(read(tmp_path / "a.tif"), as_rgb(GREY))


def test_32_bit_integers_within_16_bits_are_scaled_and_wider_ones_raise(tmp_path):
    path = tmp_path / "a.tif"
    Image.fromarray(GREY.astype(np.int32) * 257).save(path)
    np.testing.assert_array_equal(read(path), as_rgb(GREY))
    Image.fromarray(GREY.astype(np.int32) * 70000).save(path)
    with pytest.raises(MalformedRecord, match="a.tif cannot be read: its integers range from 0 to"):
        read(path)


@pytest.mark.parametrize("scale", [1.0, 1 / 255])
def test_float_values_of_either_range(scale, tmp_path):
    Image.fromarray((GREY * scale).astype(np.float32)).save(tmp_path / "a.tif")
    np.testing.assert_array_equal(read(tmp_path / "a.tif"), as_rgb(GREY))


@pytest.mark.parametrize("value", [np.nan, -1.0, 300.0])
def test_other_float_values_raise(value, tmp_path):
    Image.fromarray(np.full((4, 4), value, np.float32)).save(tmp_path / "a.tif")
    with pytest.raises(MalformedRecord, match="float values are not within 0 and 1"):
        read(tmp_path / "a.tif")


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_white(mode, tmp_path):
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, 4, 8))
    image = image.quantize(4) if mode == "P" else image.convert(mode)
    image.save(tmp_path / "a.png")
    found = read(tmp_path / "a.png")
    assert (found[:, :4] == 0).all() and (found[:, 4:] == 255).all()


def test_half_transparent_pixels_are_blended_with_white(tmp_path):
    Image.new("RGBA", (2, 2), (255, 0, 0, 51)).save(tmp_path / "a.png")
    assert read(tmp_path / "a.png")[0, 0].tolist() == [255, 204, 204]


def test_one_bit_cmyk_and_rotated_images(tmp_path):
    Image.fromarray(GREY > 127).save(tmp_path / "bit.png")
    assert set(np.unique(read(tmp_path / "bit.png"))) == {0, 255}
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "a.tif")
    assert read(tmp_path / "a.tif")[0, 0].tolist() == [255, 0, 0]
    rotated = Image.Exif()
    rotated[0x0112] = 6
    Image.fromarray(GREY.astype(np.uint16) * 257).save(tmp_path / "rotated.png", exif=rotated)
    np.testing.assert_array_equal(read(tmp_path / "rotated.png"), as_rgb(np.rot90(GREY, -1)))


def test_frames_of_an_animation_are_blended_too(tmp_path):
    frames = [Image.new("RGBA", (8, 8), (level, 0, 0, 0)) for level in (10, 200)]
    frames[0].save(tmp_path / "a.png", save_all=True, append_images=frames[1:], duration=500)
    clip = open_video(MediaItem("video", "a.png", tmp_path), FAST)
    assert (clip.frames == 255).all()


@pytest.mark.parametrize("noise", [False, True], ids=["slashes", "a name that is too long"])
def test_base64_without_its_prefix_is_a_bad_record(noise, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255 if noise else 1, (90, 90, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=0 if noise else 9)
    text = base64.b64encode(buffer.getvalue()).decode()
    text = text.replace("/", "A") if noise else "/".join(text * 3)
    with pytest.raises(MalformedRecord, match=r"\.\.\. .*; give a path, or base64 as a data: URL"):
        MediaItem("image", text + "A" * 600 * noise, tmp_path).check()
