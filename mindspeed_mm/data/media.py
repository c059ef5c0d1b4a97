"""Open images and videos as RGB: local files only, and errors name the damaged file."""

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
from mindspeed_mm.optional_packages import install_command

Modality = Literal["image", "video"]
UINT8_MAX, UINT16_MAX = 255, 65535
LONGEST_NAME = 500
"""Characters of a path; a longer text is shortened in messages."""
MILLISECONDS = 1000.0
UNTIMED_FPS = 2.0
"""Frame rate of a video that is given as frames, or without frame durations."""
COMPLETE = 0.9
"""Minimum fraction of the declared frames: the counts that files declare are not exact."""
ANIMATIONS = (".gif", ".webp", ".png", ".apng")
FORMATS = (
    *("AVIF", "BMP", "DIB", "GIF", "HEIF", "ICO", "JPEG", "JPEG2000", "MPO", "PCX", "PNG", "PPM"),
    *("QOI", "TGA", "TIFF", "WEBP"),
)
"""Formats that Pillow decodes itself; for PostScript it starts a program that runs the file."""
DAMAGED = (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError)
"""What Pillow raises for files that are not images, or truncated."""

Frames = Iterator[Callable[[], Image.Image]]
"""Frames of a video; calling one decodes it, which takes time."""


class MediaItem(NamedTuple):
    """An image or a video of a record, and the folder that its relative paths start from."""

    modality: Modality
    source: Any
    root: Path

    def __str__(self) -> str:
        is_named = isinstance(self.source, str) and not self.source.startswith("data:")
        return self.source if is_named else "in the record"

    def check(self) -> MediaItem:
        """Return this item if its file exists; MalformedRecord otherwise."""
        for source in self.source if isinstance(self.source, list) else [self.source]:
            found = _path_or_bytes(source, self)
            if isinstance(found, Path):
                _check_exists(found, self.modality)
            if (
                self.modality == "video"
                and not isinstance(self.source, list)
                and _needs_decoder(found)
            ):
                _import_av(found)
        return self


@dataclass(frozen=True)
class Clip:
    """Sampled frames of a video, (T, H, W, 3), their indices, its frame rate and frame count."""

    frames: np.ndarray[Any, Any]
    indices: list[int]
    fps: float
    total: int


def open_image(medium: MediaItem, options: ProcessorOptions) -> Image.Image:
    """Read an image as RGB, resized to the pixel limits."""
    image = _decode_image(_path_or_bytes(medium.source, medium))
    return _fit(image, options.image_min_pixels, options.image_max_pixels)


def open_video(medium: MediaItem, options: ProcessorOptions) -> Clip:
    """Read the sampled frames of a video, resized to the pixel limits."""
    total, fps, frames = _frames(medium)
    sampled = set(sample_frames(total, fps, options)) if total else set()
    limits = options.video_min_pixels, options.video_max_pixels
    taken, seen = {}, 0
    for index, frame in enumerate(frames):
        if index in sampled:  # the others are not kept: a long video would not fit in memory
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
    """Return equidistant frames: video_fps per second, at least two, at most video_maxlen."""
    count = round(total / fps * options.video_fps)
    count = max(1, min(max(2, count), options.video_maxlen, total))
    return [int(index) for index in np.linspace(0, total - 1, count).round()]


def blank(modality: Modality, side: int = 64) -> Image.Image | Clip:
    """Return a white image or video, for batches without any."""
    if modality == "image":
        return Image.new("RGB", (side, side), "white")
    return Clip(np.full((2, side, side, 3), 255, np.uint8), [0, 1], UNTIMED_FPS, 2)


def _path_or_bytes(source: Any, medium: MediaItem) -> Path | bytes:
    """Return the path of a source, or the bytes of a data: URL or of a bytes column."""
    if isinstance(source, dict):  # as parquet files of Hugging Face hold images
        source = source.get("bytes") or source.get("path")
    if isinstance(source, str) and source.startswith("data:"):
        try:
            return base64.b64decode(source.partition(",")[2], validate=True)
        except (binascii.Error, ValueError):
            raise MalformedRecord(f"the {medium.modality} is not valid base64") from None
    if not isinstance(source, str) or not source:
        raise MalformedRecord(f"the {medium.modality} is {kind_of(source)}, not a path")
    if source.startswith(("http://", "https://")):
        raise MalformedRecord(
            f"the {medium.modality} {source} is on the network: download it first"
        )
    return medium.root / source.removeprefix("file://")


def _check_exists(path: Path, modality: Modality) -> None:
    try:
        if path.is_file() or (modality == "video" and path.is_dir()):
            return
        # A pipe, for example, has no end: reading it would wait for ever.
        reason = "is not a regular file" if path.exists() else "does not exist"
    except OSError as error:  # no permission, or a name that is much too long
        reason = f"cannot be read: {error.strerror}"
    name = str(path)
    if len(name) > LONGEST_NAME:
        name, reason = f"{name[:100]}...", f"{reason}; give a path, or base64 as a data: URL"
    raise MalformedRecord(f"the {modality} {name} {reason}")


def _decode_image(source: Path | bytes) -> Image.Image:
    try:
        with _open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            return as_rgb(ImageOps.exif_transpose(image))
    except DAMAGED as error:
        raise MalformedRecord(f"the image {_name(source)} cannot be read: {error}") from None


def _open(source: Path | io.BytesIO) -> Image.Image:
    Image.init()  # otherwise Pillow only knows the formats that were opened before
    return Image.open(source, formats=[name for name in FORMATS if name in Image.OPEN])


def _frames(medium: MediaItem) -> tuple[int, float, Frames]:
    """Return the frame count, the frame rate and the frames of a video."""
    source = medium.source
    if isinstance(source, list):
        parts = [_path_or_bytes(one, medium) for one in source]
        return len(parts), UNTIMED_FPS, (partial(_decode_image, part) for part in parts)
    found = _path_or_bytes(source, medium)
    if _needs_decoder(found):
        return _open_video_file(found)
    assert isinstance(found, Path)
    if found.is_dir():
        files = sorted(path for path in found.iterdir() if path.is_file())
        return len(files), UNTIMED_FPS, (partial(_decode_image, file) for file in files)
    return _open_animation(found)


def _needs_decoder(source: Path | bytes) -> bool:
    """Return whether a video needs PyAV; folders of frames and animated images do not."""
    return isinstance(source, bytes) or not (source.is_dir() or source.suffix.lower() in ANIMATIONS)


def _import_av(source: Path | bytes) -> Any:
    try:
        import av
    except ImportError:
        raise ConfigError(
            f"the video {_name(source)} cannot be read without PyAV: {install_command()}; or give "
            "a folder of frames"
        ) from None
    return av


def _open_animation(path: Path) -> tuple[int, float, Frames]:
    with _decode_errors(path, DAMAGED):
        file = _open(path)
        total = getattr(file, "n_frames", 1)
        durations = [_duration(frame) for frame in ImageSequence.Iterator(file)]
        frames = (partial(as_rgb, frame) for frame in ImageSequence.Iterator(file))
    seconds = sum(durations) / MILLISECONDS
    fps = len(durations) / seconds if seconds else UNTIMED_FPS
    return total, fps, _with_errors(frames, path, DAMAGED)


def _duration(frame: Image.Image) -> float:
    """Return the milliseconds that a frame is shown; frames may differ."""
    frame.load()  # webp files tell it only then
    return float(frame.info.get("duration") or 0.0)


def _open_video_file(source: Path | bytes) -> tuple[int, float, Frames]:
    av = _import_av(source)
    errors = (av.FFmpegError, OSError, ValueError)
    with _decode_errors(source, errors):
        file = av.open(io.BytesIO(source) if isinstance(source, bytes) else str(source))
        if not file.streams.video:
            raise ValueError("it has no video stream")
        stream = file.streams.video[0]
        rate, total = float(stream.average_rate or UNTIMED_FPS), stream.frames
        if not total:  # not every container declares it
            total = sum(packet.size > 0 for packet in file.demux(stream))
            file.seek(0)
    frames = (frame.to_image for frame in file.decode(video=0))
    return total, rate, _with_errors(frames, source, errors)


@contextmanager
def _decode_errors(source: Path | bytes, errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """Raise errors of a decoder as MalformedRecord with the name of the video."""
    try:
        yield
    except errors as error:
        raise MalformedRecord(f"the video {_name(source)} cannot be read: {error}") from None


def _with_errors(
    frames: Frames, source: Path | bytes, errors: tuple[type[Exception], ...]
) -> Frames:
    """Yield the frames; errors occur when one is read, or when it is decoded."""

    def image(frame: Callable[[], Image.Image]) -> Image.Image:
        with _decode_errors(source, errors):
            return frame()

    with _decode_errors(source, errors):
        for frame in frames:
            yield partial(image, frame)


def _fit(image: Image.Image, minimum: int | None, maximum: int | None) -> Image.Image:
    """Resize an image to the pixel limits; the aspect ratio is kept."""
    pixels = image.width * image.height
    target = min(max(pixels, minimum or 0), maximum or max(pixels, minimum or 0))
    if target == pixels:
        return image
    scale = math.sqrt(target / pixels)
    width, height = (max(1, int(side * scale)) for side in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC)


def _name(source: Path | bytes) -> str:
    return "in the record" if isinstance(source, bytes) else str(source)


def as_rgb(image: Image.Image) -> Image.Image:
    """Convert to 8-bit RGB as a viewer shows it: Pillow alone clips 16-bit and float values.

    Transparent pixels become white.
    """
    if image.mode.startswith("I"):
        values = np.asarray(image)
        grey = _from_uint16(values)
        if isinstance(transparent := image.info.get("transparency"), int):
            grey = np.where(values == transparent, UINT8_MAX, grey)
        return _grey(grey)
    if image.mode == "F":
        return _grey(_from_float(np.asarray(image)))
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def _from_uint16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Scale 16-bit values; Pillow may open 16-bit files as 32-bit integers."""
    if values.size and (values.min() < 0 or values.max() > UINT16_MAX):
        raise ValueError(
            f"its integers range from {values.min()} to {values.max()}: save it with 8 or 16 bits"
        )
    step = UINT16_MAX // UINT8_MAX
    return (values.astype(np.int64) + step // 2) // step


def _from_float(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Scale values within 0 and 1; keep values within 0 and 255."""
    if not np.isfinite(values).all() or (
        values.size and (values.min() < 0 or values.max() > UINT8_MAX)
    ):
        raise ValueError(
            "its float values are not within 0 and 1, or 0 and 255: save it with 8 bits"
        )
    return np.rint(values * UINT8_MAX if values.size and values.max() <= 1 else values)


def _grey(values: np.ndarray[Any, Any]) -> Image.Image:
    return Image.fromarray(values.astype(np.uint8)).convert("RGB")
