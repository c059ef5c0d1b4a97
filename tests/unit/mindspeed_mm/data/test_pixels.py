"""Images of every mode become the RGB that a viewer shows."""

import numpy as np
import pytest
from PIL import Image

from mindspeed_llm.data.conversation import MalformedRecord
from mindspeed_mm.data.media import Medium, open_image, open_video
from mindspeed_mm.data.options import ProcessorOptions

GREY = np.arange(256, dtype=np.uint8).reshape(16, 16)
OPTIONS = ProcessorOptions(model_name_or_path="m", video_fps=100.0)


def read(path):
    return np.asarray(open_image(Medium("image", path.name, path.parent), OPTIONS))


def as_rgb(grey):
    return np.repeat(grey[..., None], 3, axis=-1)


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.pgm"])
def test_16_bits_are_scaled(name, tmp_path):
    Image.fromarray(GREY.astype(np.uint16) * 257).save(tmp_path / name)
    np.testing.assert_array_equal(read(tmp_path / name), as_rgb(GREY))


def test_16_bits_of_the_other_byte_order(tmp_path):
    values = GREY.astype(">u2") * 257
    Image.frombytes("I;16B", (16, 16), values.astype(">u2").tobytes()).save(tmp_path / "a.tif")
    np.testing.assert_array_equal(read(tmp_path / "a.tif"), as_rgb(GREY))


def test_32_bit_integers_of_16_bits_are_scaled_and_wider_ones_are_refused(tmp_path):
    path = tmp_path / "a.tif"
    Image.fromarray(GREY.astype(np.int32) * 257).save(path)
    np.testing.assert_array_equal(read(path), as_rgb(GREY))
    Image.fromarray(GREY.astype(np.int32) * 70000).save(path)
    with pytest.raises(MalformedRecord, match="a.tif cannot be read: its integers reach from 0 to"):
        read(path)


@pytest.mark.parametrize("scale", [1.0, 1 / 255])
def test_floating_values_of_either_range(scale, tmp_path):
    Image.fromarray((GREY * scale).astype(np.float32)).save(tmp_path / "a.tif")
    np.testing.assert_array_equal(read(tmp_path / "a.tif"), as_rgb(GREY))


@pytest.mark.parametrize("value", [np.nan, -1.0, 300.0])
def test_other_floating_values_are_refused(value, tmp_path):
    Image.fromarray(np.full((4, 4), value, np.float32)).save(tmp_path / "a.tif")
    with pytest.raises(MalformedRecord, match="floating values are not within 0 and 1"):
        read(tmp_path / "a.tif")


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(mode, tmp_path):
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, 4, 8))
    image = image.quantize(4) if mode == "P" else image.convert(mode)
    image.save(tmp_path / "a.png")
    found = read(tmp_path / "a.png")
    assert (found[:, :4] == 0).all() and (found[:, 4:] == 255).all()


def test_half_transparent_is_mixed_with_white(tmp_path):
    Image.new("RGBA", (2, 2), (255, 0, 0, 51)).save(tmp_path / "a.png")
    assert read(tmp_path / "a.png")[0, 0].tolist() == [255, 204, 204]


def test_one_bit_cmyk_and_turned_images(tmp_path):
    Image.fromarray(GREY > 127).save(tmp_path / "bit.png")
    assert set(np.unique(read(tmp_path / "bit.png"))) == {0, 255}
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "a.tif")
    assert read(tmp_path / "a.tif")[0, 0].tolist() == [255, 0, 0]
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(GREY.astype(np.uint16) * 257).save(tmp_path / "turned.png", exif=turned)
    np.testing.assert_array_equal(read(tmp_path / "turned.png"), as_rgb(np.rot90(GREY, -1)))


def test_frames_of_an_animation_too(tmp_path):
    frames = [Image.new("RGBA", (8, 8), (level, 0, 0, 0)) for level in (10, 200)]
    frames[0].save(tmp_path / "a.png", save_all=True, append_images=frames[1:], duration=500)
    clip = open_video(Medium("video", "a.png", tmp_path), OPTIONS)
    assert (clip.frames == 255).all()
