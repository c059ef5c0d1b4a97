"""The processor of a transformers model, run on one image or video at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mindspeed.config import ConfigError, parse_json
from mindspeed_llm.data.conversation import MalformedRecord
from mindspeed_llm.data.indexed import Array
from mindspeed_llm.data.tokenizer import TokenizerFacts, facts_of
from mindspeed_mm.data.media import Clip, MediaItem, Modality, blank, open_image, open_video
from mindspeed_mm.data.options import ProcessorOptions
from mindspeed_mm.optional_packages import (
    check_torchvision,
    install_command,
    torchvision_problem,
)
from mindspeed_mm.transformers_errors import one_line

CLASS_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
TOKENS = ("input_ids", "attention_mask")
WHOLE_TEXT = {
    *("bbox", "cross_attention_mask", "image_attention_mask", "image_embeds_position_mask"),
    *("labels", "position_ids", "qformer_input_ids"),
}
"""What some processors compute from the whole text around an image: its tokens have a row each."""


@dataclass(frozen=True)
class Expansion:
    """An image or video as tokens, types of these tokens, and tensors for the model."""

    ids: Array
    token_types: dict[str, Array] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


class MediaProcessor:
    """Expands images and videos with a processor of transformers."""

    def __init__(self, processor: Any, options: ProcessorOptions) -> None:
        self._processor, self._options = processor, options
        self._names = set(processor.model_input_names) - set(TOKENS)
        self.facts = self._describe()
        self.tokens: dict[Modality, int] = dict(self._find_tokens())
        self._check_padding()
        self.prefix = _prefix(processor.tokenizer)
        """Tokens that the tokenizer prepends to every text."""
        self._blanks: dict[Modality, Expansion] = {}

    def expand(self, medium: MediaItem) -> Expansion:
        """Open an image or video and run the processor on it."""
        self.check(medium.modality)
        opened = (open_image if medium.modality == "image" else open_video)(medium, self._options)
        try:
            return self._run(opened)
        except Exception as error:  # third-party code, possibly with damaged files
            raise MalformedRecord(
                f"the processor fails on the {medium.modality} {medium}: {one_line(error)}"
            ) from None

    def check(self, modality: Modality) -> None:
        """Reject a modality that the processor does not support, or not by itself."""
        kind = type(self._processor).__name__
        if names := sorted(WHOLE_TEXT & self._names):
            raise ConfigError(
                f"{self.facts.source}: its {kind} computes {names[0]} from the whole text, but "
                f"here it gets one {modality} at a time: use a dataset of your own"
            )
        if modality in self.tokens:
            return
        if modality == "video" and (problem := torchvision_problem()):
            raise ConfigError(f"the data has videos, but {problem}: {install_command()}")
        raise ConfigError(f"{self.facts.source}: its {kind} does not support {modality}s")

    def blank(self, modality: Modality) -> Expansion:
        """Return the expansion of a white image or video."""
        if modality not in self._blanks:
            self._blanks[modality] = self._run(blank(modality))
        return self._blanks[modality]

    def _run(self, opened: Image.Image | Clip) -> Expansion:
        text = [self._text(opened)]
        inputs: dict[str, Any] = {"text": text, "return_tensors": "pt", "add_special_tokens": False}
        if isinstance(opened, Clip):
            metadata: dict[str, Any] = {"total_num_frames": opened.total, "fps": opened.fps}
            metadata |= {"frames_indices": opened.indices, "duration": opened.total / opened.fps}
            inputs |= {"videos": [opened.frames], "video_metadata": [metadata]}
            inputs["do_sample_frames"] = False
        else:
            inputs["images"] = [opened]
            if self._options.crop_to_patches is not None:
                inputs["crop_to_patches"] = self._options.crop_to_patches
        return self._to_expansion(self._processor(**inputs))

    def _text(self, opened: Image.Image | Clip) -> str:
        modality = "video" if isinstance(opened, Clip) else "image"
        return str(getattr(self._processor, f"{modality}_token"))

    def _to_expansion(self, found: Any) -> Expansion:
        """Split token types from media tensors; drop what is not a model input."""
        ids = np.asarray(found["input_ids"][0]).astype(np.int64)
        token_types: dict[str, Array] = {}
        tensors: dict[str, torch.Tensor] = {}
        for name in sorted(self._names & set(found)):
            value = torch.as_tensor(found[name])
            if name.endswith("token_type_ids"):
                token_types[name] = value[0].numpy().astype(np.int64)
            else:
                tensors[name] = value
        return Expansion(ids, token_types, tensors)

    def _describe(self) -> TokenizerFacts:
        processor = self._processor
        facts = facts_of(processor.tokenizer, self._options.model_name_or_path)
        template = getattr(processor, "chat_template", None) or facts.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        return replace(facts, chat_template=template)

    def _find_tokens(self) -> Iterator[tuple[Modality, int]]:
        modalities: tuple[Modality, ...] = ("image", "video")
        for modality in modalities:
            token = getattr(self._processor, f"{modality}_token", None)
            has_processor = getattr(self._processor, f"{modality}_processor", None) is not None
            if token is None or not has_processor:
                continue
            number = self._processor.tokenizer.convert_tokens_to_ids(str(token))
            if number is not None:
                self.facts.special.setdefault(str(token), number)
                yield modality, int(number)

    def _check_padding(self) -> None:
        """Reject a padding token that is also a media token."""
        for modality, number in self.tokens.items():
            if number == self.facts.pad_id:
                token = getattr(self._processor, f"{modality}_token")
                raise ConfigError(
                    f"{self.facts.source}: the pad token {token!r} of its tokenizer is also the "
                    f"{modality} token: set another pad_token in tokenizer_config.json"
                )


def load_processor(options: ProcessorOptions) -> Any:
    """Load the processor of a Hugging Face folder; nothing is downloaded."""
    import transformers

    folder = Path(options.model_name_or_path)
    if not folder.is_dir():
        raise ConfigError(f"model_name_or_path {folder} is not a folder: give that of the model")
    check_torchvision()
    _check_json(folder)
    known = getattr(transformers, _class_name(folder), None)
    has_videos = torchvision_problem() is None
    loaders = [transformers.AutoProcessor] if has_videos or known is None else []
    if known is not None:  # a folder that was saved without torchvision has no video processor
        loaders.append(_without_video(known))
    processor = _load_first(loaders, folder, options.trust_remote_code)
    if getattr(processor, "tokenizer", None) is None:
        raise ConfigError(
            f"model_name_or_path {folder} is not a multimodal model: its processor is a "
            f"{type(processor).__name__}"
        )
    return processor


def _check_json(folder: Path) -> None:
    """Name a damaged file: the errors of the loaders do not."""
    for name in ("config.json", *CLASS_FILES):
        path = folder / name
        if path.is_file():
            try:
                parse_json(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ConfigError(f"{path}: cannot be read ({error})") from None


def _load_first(loaders: Sequence[Any], folder: Path, trust_remote_code: bool) -> Any:
    """Load with the first class that succeeds; the error is that of the first class."""
    reasons = []
    for loader in loaders:
        try:
            return loader.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code
            )
        except Exception as error:  # for damaged files tokenizers raises an Exception of no class
            reasons.append(one_line(error))
    if "video_processor" in reasons[0] and (problem := torchvision_problem()):
        raise ConfigError(
            f"model_name_or_path {folder}: its {_class_name(folder)} does not load without "
            f"torchvision, not even for images, and {problem}: {install_command()}"
        )
    raise ConfigError(f"model_name_or_path {folder} has no processor: {reasons[0]}")


def _without_video(known: Any) -> Any:
    """Return a processor class without the video processor."""
    attributes = known.get_attributes() if hasattr(known, "get_attributes") else known.attributes
    kept = [name for name in attributes if name != "video_processor"]
    if kept == list(attributes):
        return known
    members: dict[str, Any] = {"get_attributes": classmethod(lambda cls: kept), "attributes": kept}
    members["__reduce__"] = lambda self: (_restore, (known, vars(self)))
    return type(known.__name__, (known,), members)


def _restore(known: Any, state: dict[str, Any]) -> Any:
    """Unpickle a processor without videos: its class exists in no module."""
    processor = object.__new__(_without_video(known))
    vars(processor).update(state)
    return processor


def _class_name(folder: Path) -> str:
    """Return the processor class that the files of the folder name, "" if none does."""
    for name in CLASS_FILES:
        try:
            found = parse_json((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict) and isinstance(found.get("processor_class"), str):
            return str(found["processor_class"])
    return ""


def _prefix(tokenizer: Any) -> list[int]:
    try:
        whole = tokenizer("a")["input_ids"]
    except Exception as error:  # a damaged tokenizer_config.json may cause anything
        raise ConfigError(f"the tokenizer of the processor fails: {one_line(error)}") from None
    text = tokenizer("a", add_special_tokens=False)["input_ids"]
    start = next((i for i in range(len(whole)) if whole[i : i + len(text)] == text), 0)
    return list(whole[:start])
