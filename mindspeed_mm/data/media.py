"""Images and videos, opened: nothing is fetched from a network, and what is damaged is named."""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image, ImageOps, ImageSequence

from mindspeed.config import ConfigError
from mindspeed_llm.data.conversation import MalformedRecord
from mindspeed_llm.data.readers import kind_of
from mindspeed_mm.data.options import ProcessorOptions
from mindspeed_mm.data.pixels import as_rgb
from mindspeed_mm.packages import how_to_install

Kind = Literal["image", "video"]
MILLISECONDS = 1000.0
UNTIMED_FPS = 2.0
"""Frames a second of a video that is given as frames, or does not say how long they last."""
COMPLETE = 0.9
"""Share of its frames that a video has at least: what files say of themselves is not exact."""
ANIMATIONS = (".gif", ".webp", ".png", ".apng")
FORMATS = (
    "AVIF",
    "BMP",
    "DIB",
    "GIF",
    "HEIF",
    "ICO",
    "JPEG",
    "JPEG2000",
    "MPO",
    "PCX",
    "PNG",
    "PPM",
)
FORMATS += ("QOI", "TGA", "TIFF", "WEBP")
"""What Pillow decodes itself; for PostScript it starts a program that runs what is in the file."""
DAMAGED = (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError)
"""What Pillow raises for files that are no images, or only half of one."""


Frames = Iterator[Callable[[], Image.Image]]
"""Frames of a video; a frame becomes an image, which takes time, when it is called."""


class Medium(NamedTuple):
    """An image or a video as a record names it, and the folder that relative paths start from."""

    kind: Kind
    source: Any
    root: Path

    def __str__(self) -> str:
        is_named = isinstance(self.source, str) and not self.source.startswith("data:")
        return self.source if is_named else "in the record"

    def check(self) -> Medium:
        """Return this medium if its file is there, else say what is wrong."""
        for source in self.source if isinstance(self.source, list) else [self.source]:
            found = _path_or_bytes(source, self)
            if isinstance(found, Path) and not found.exists():
                raise MalformedRecord(f"the {self.kind} {found} does not exist")
            if self.kind == "video" and not isinstance(self.source, list) and _is_film(found):
                _import_av(found)
        return self


@dataclass(frozen=True)
class Clip:
    """Frames of a video, (T, H, W, 3), which of its frames they are, and its frames a second."""

    frames: np.ndarray[Any, Any]
    indices: list[int]
    fps: float
    total: int


def open_image(medium: Medium, options: ProcessorOptions) -> Image.Image:
    """Read an image as RGB, within the limits of pixels."""
    image = _decode_image(_path_or_bytes(medium.source, medium))
    return _fit(image, options.image_min_pixels, options.image_max_pixels)


def open_video(medium: Medium, options: ProcessorOptions) -> Clip:
    """Read the frames that are to be taken of a video, within the limits of pixels."""
    total, fps, frames = _frames(medium)
    wanted = set(sample_frames(total, fps, options)) if total else set()
    limits = options.video_min_pixels, options.video_max_pixels
    taken, seen = {}, 0
    for index, frame in enumerate(frames):
        if index in wanted:  # the others are not kept: a long video would not fit in memory
            taken[index] = np.asarray(_fit(frame(), *limits))
        seen += 1
    if not taken:
        raise MalformedRecord(f"the video {medium} has no frames")
    if seen < COMPLETE * total:
        raise MalformedRecord(f"the video {medium} ends after {seen} of {total} frames")
    if len({frame.shape for frame in taken.values()}) > 1:
        raise MalformedRecord(f"the frames of the video {medium} differ in size")
    return Clip(np.stack(list(taken.values())), list(taken), fps, total)


def sample_frames(total: int, fps: float, options: ProcessorOptions) -> list[int]:
    """Choose frames at equal distances: video_fps a second, two at least, at most video_maxlen."""
    wanted = round(total / fps * options.video_fps)
    count = max(1, min(max(2, wanted), options.video_maxlen, total))
    return [int(place) for place in np.linspace(0, total - 1, count).round()]


def blank(kind: Kind, side: int = 64) -> Image.Image | Clip:
    """Return a white image or video, to stand in where a batch has none."""
    if kind == "image":
        return Image.new("RGB", (side, side), "white")
    return Clip(np.full((2, side, side, 3), 255, np.uint8), [0, 1], UNTIMED_FPS, 2)


def _path_or_bytes(source: Any, medium: Medium) -> Path | bytes:
    """Find out what names a medium: a path, a data: address, or a column of bytes."""
    if isinstance(source, dict):  # as parquet files of Hugging Face hold images
        source = source.get("bytes") or source.get("path")
    if isinstance(source, str) and source.startswith("data:"):
        try:
            return base64.b64decode(source.partition(",")[2], validate=True)
        except (binascii.Error, ValueError):
            raise MalformedRecord(f"the {medium.kind} is not valid base64") from None
    if not isinstance(source, str) or not source:
        raise MalformedRecord(f"the {medium.kind} is {kind_of(source)}, not a path")
    if source.startswith(("http://", "https://")):
        raise MalformedRecord(f"the {medium.kind} {source} is on the network: download it first")
    return medium.root / source.removeprefix("file://")


def _decode_image(source: Path | bytes) -> Image.Image:
    try:
        with _open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            return as_rgb(ImageOps.exif_transpose(image))
    except DAMAGED as error:
        raise MalformedRecord(f"the image {_name(source)} cannot be read: {error}") from None


def _open(source: Path | io.BytesIO) -> Image.Image:
    Image.init()  # else Pillow knows the formats that were asked for before only
    return Image.open(source, formats=[name for name in FORMATS if name in Image.OPEN])


def _frames(medium: Medium) -> tuple[int, float, Frames]:
    """Return how many frames a video has, how many a second, and the frames one after the other."""
    source = medium.source
    if isinstance(source, list):
        parts = [_path_or_bytes(one, medium) for one in source]
        return len(parts), UNTIMED_FPS, (partial(_decode_image, part) for part in parts)
    found = _path_or_bytes(source, medium)
    if _is_film(found):
        return _open_film(found)
    assert isinstance(found, Path)
    if found.is_dir():
        files = sorted(path for path in found.iterdir() if path.is_file())
        return len(files), UNTIMED_FPS, (partial(_decode_image, file) for file in files)
    return _open_animation(found)


def _is_film(source: Path | bytes) -> bool:
    """Tell whether a video needs a decoder; folders of frames and animated images do not."""
    return isinstance(source, bytes) or not (source.is_dir() or source.suffix.lower() in ANIMATIONS)


def _import_av(source: Path | bytes) -> Any:
    try:
        import av
    except ImportError:
        raise ConfigError(
            f"the video {_name(source)} cannot be read without PyAV: {how_to_install()}; or give a "
            "folder of frames"
        ) from None
    return av


def _open_animation(path: Path) -> tuple[int, float, Frames]:
    with _naming(path, DAMAGED):
        file = _open(path)
        total, lasts = getattr(file, "n_frames", 1), file.info.get("duration")
        frames = (partial(as_rgb, frame) for frame in ImageSequence.Iterator(file))
    return total, MILLISECONDS / lasts if lasts else UNTIMED_FPS, _told(frames, path, DAMAGED)


def _open_film(source: Path | bytes) -> tuple[int, float, Frames]:
    av = _import_av(source)
    errors = (av.FFmpegError, OSError, ValueError)
    with _naming(source, errors):
        file = av.open(io.BytesIO(source) if isinstance(source, bytes) else str(source))
        if not file.streams.video:
            raise ValueError("it has no pictures")
        stream = file.streams.video[0]
        rate, total = float(stream.average_rate or UNTIMED_FPS), stream.frames
        if not total:  # not every kind of file says it
            total = sum(packet.size > 0 for packet in file.demux(stream))
            file.seek(0)
    frames = (frame.to_image for frame in file.decode(video=0))
    return total, rate, _told(frames, source, errors)


@contextmanager
def _naming(source: Path | bytes, errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """Say of which video it is if something is damaged."""
    try:
        yield
    except errors as error:
        raise MalformedRecord(f"the video {_name(source)} cannot be read: {error}") from None


def _told(frames: Frames, source: Path | bytes, errors: tuple[type[Exception], ...]) -> Frames:
    """Yield the frames; damage may show when one is read, or when it becomes an image."""

    def image(frame: Callable[[], Image.Image]) -> Image.Image:
        with _naming(source, errors):
            return frame()

    with _naming(source, errors):
        for frame in frames:
            yield partial(image, frame)


def _fit(image: Image.Image, least: int | None, most: int | None) -> Image.Image:
    """Scale an image so that its pixels are within the limits; its sides keep their ratio."""
    pixels = image.width * image.height
    wanted = min(max(pixels, least or 0), most or max(pixels, least or 0))
    if wanted == pixels:
        return image
    scale = math.sqrt(wanted / pixels)
    width, height = (max(1, int(side * scale)) for side in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC)


def _name(source: Path | bytes) -> str:
    return "in the record" if isinstance(source, bytes) else str(source)
