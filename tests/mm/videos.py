"""Processors with videos, video files, and the reference of transformers.

All of it needs PyAV and torchvision.
"""

import importlib.util
import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from mindspeed_mm.optional_packages import torchvision_problem
from tests.mm import processors

FRAMES, RATE, SIDE = 12, 4, 24
TAKEN = [0, 2, 4, 7, 9, 11]
"""Two frames a second, at equal distances."""
PIXELS = {"shortest_edge": 64, "longest_edge": 576}
QWEN = {
    # Classes of the processor and of its video processor, and how many pixels a frame may have,
    # or all frames of a video.
    "qwen2_vl": ("Qwen2VLProcessor", "Qwen2VLVideoProcessor", 576),
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor", 576),
    "qwen3_vl": ("Qwen3VLProcessor", "Qwen3VLVideoProcessor", 6 * 576),
}
NAMES = (*QWEN, "internvl")
IMAGE, VIDEO = "<image>", "<video>"
RECORDS = [
    (f"{VIDEO} and {IMAGE}: what happens?", "A fox jumps.", ["b.png"], ["a.mp4"]),
    ("How much is 2 + 3?", "It is 5.", [], []),
    (f"{IMAGE}What is shown?", "A lake.", ["a.png"], []),
    (f"What is in {VIDEO}?", "Nothing but noise.", [], ["b.mp4"]),
    (f"{VIDEO}{VIDEO}Which is longer?", "The second one.", [], ["b.mp4", "a.mp4"]),
]


def needs_packages():
    """Return the mark that skips tests with a reason where a package does not load."""
    problem = "av is not installed" if importlib.util.find_spec("av") is None else None
    problem = problem or torchvision_problem()
    return pytest.mark.skipif(bool(problem), reason=f"videos need av and torchvision: {problem}")


def whole(name):
    """Return a processor with its video processor, small as those of tests.mm.processors."""
    import transformers

    if name == "internvl":
        images = transformers.GotOcr2ImageProcessor(**processors.TILES)
        videos = transformers.InternVLVideoProcessor(size=processors.TILES["size"])
        return processors.internvl(images, videos)
    processor_class, video_class, most = QWEN[name]
    # A token is 8 x 8 pixels of an image or of two frames.
    sizes = {"patch_size": processors.PATCH, "temporal_patch_size": 2, "merge_size": 2}
    images = transformers.Qwen2VLImageProcessor(size=PIXELS, **sizes)
    videos = getattr(transformers, video_class)(size={**PIXELS, "longest_edge": most}, **sizes)
    words = processors.tokenizer(**processors.VISION)
    template = processors.QWEN_TEMPLATE
    return getattr(transformers, processor_class)(images, words, videos, chat_template=template)


def new_model(name):
    """Build the model that fits the processor, the same every time."""
    return processors.new_model(name, **({"temporal_patch_size": 2} if name in QWEN else {}))


def write(folder, name):
    """Write a model with its processor, images, video files and records."""
    whole(name).save_pretrained(folder)
    new_model(name).save_pretrained(folder)
    random = np.random.default_rng(0)
    for file in ("a.png", "b.png"):
        Image.fromarray(random.integers(0, 255, (16, 40, 3), np.uint8)).save(folder / file)
    write_video(folder / "a.mp4", seed=1)
    write_video(folder / "b.mp4", seed=2)
    rows = [
        {
            "conversations": [{"from": "human", "value": said}, {"from": "gpt", "value": answer}],
            "images": images,
            "videos": videos,
        }
        for said, answer, images, videos in RECORDS
    ]
    (folder / "rows.json").write_text(json.dumps(rows))


def write_video(path, seed, size=SIDE):
    """Write a video of moving squares."""
    import av

    random = np.random.default_rng(seed)
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=RATE)
        stream.width = stream.height = size
        stream.pix_fmt = "yuv420p"
        colour = random.integers(0, 255, 3, np.uint8)
        for number in range(FRAMES):
            picture = np.full((size, size, 3), 20 * number, np.uint8)
            picture[number : number + 8, 4:12] = colour
            file.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        file.mux(stream.encode())


class ByHand(Dataset):
    """The records, encoded with transformers and PyAV only."""

    def __init__(self, folder, name):
        self._folder, self._processor = folder, whole(name)

    def __len__(self):
        return len(RECORDS)

    def __getitem__(self, number):
        question, answer, images, videos = RECORDS[number]
        asked = [{"role": "user", "content": _parts(question)}]
        said = [*asked, {"role": "assistant", "content": [{"type": "text", "text": answer}]}]
        prompt = self._run(asked, images, videos, add_generation_prompt=True)["input_ids"]
        batch = self._run(said, images, videos)
        labels = batch["input_ids"].clone()
        labels[:, : prompt.shape[1]] = -100
        labels[:, -1] = -100  # the line break after the answer
        return {**batch, "labels": labels}

    def _run(self, messages, images, videos, **more):
        text = self._processor.apply_chat_template(messages, tokenize=False, **more)
        given = {"text": [text], "return_tensors": "pt"}
        if images:
            given["images"] = [Image.open(self._folder / file) for file in images]
        if videos:
            facts = {"total_num_frames": FRAMES, "fps": RATE, "frames_indices": TAKEN}
            facts["duration"] = FRAMES / RATE
            given["videos"] = [frames(self._folder / file) for file in videos]
            given["video_metadata"] = [facts] * len(videos)
            given["do_sample_frames"] = False
        found = dict(self._processor(**given))
        return {key: torch.as_tensor(value) for key, value in found.items()}


def frames(path):
    """Return the sampled frames of a video file, decoded by PyAV."""
    import av

    with av.open(str(path)) as file:
        found = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    return np.stack([found[place] for place in TAKEN])


def _parts(text):
    texts = text.replace(IMAGE, f"|{IMAGE}|").replace(VIDEO, f"|{VIDEO}|").split("|")
    kinds = {IMAGE: {"type": "image"}, VIDEO: {"type": "video"}}
    return [kinds.get(one, {"type": "text", "text": one}) for one in texts if one]
