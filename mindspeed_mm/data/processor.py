"""The processor of a transformers model: what it makes of one image or video, and its tokens."""

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
from mindspeed_mm.data.media import Clip, Kind, Medium, blank, open_image, open_video
from mindspeed_mm.data.options import ProcessorOptions
from mindspeed_mm.packages import check_torchvision, how_to_install, torchvision_problem
from mindspeed_mm.refusals import reason

CLASS_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
TOKENS = ("input_ids", "attention_mask")


@dataclass(frozen=True)
class Expansion:
    """What a medium becomes: tokens in its place, marks of these tokens, tensors for the model."""

    ids: Array
    marks: dict[str, Array] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


class MediaProcessor:
    """Runs a processor of transformers on one medium at a time."""

    def __init__(self, processor: Any, options: ProcessorOptions) -> None:
        self._processor, self._options = processor, options
        self._names = set(processor.model_input_names) - set(TOKENS)
        self.facts = self._describe()
        self.tokens: dict[Kind, int] = dict(self._find_tokens())
        self._check_padding()
        self.lead = _lead(processor.tokenizer)
        """Tokens that the tokenizer puts in front of every text."""
        self._blanks: dict[Kind, Expansion] = {}

    def expand(self, medium: Medium) -> Expansion:
        """Open a medium and let the processor see it."""
        self.check(medium.kind)
        opened = (open_image if medium.kind == "image" else open_video)(medium, self._options)
        try:
            return self._run(opened)
        except Exception as error:  # it is code of others, and its files may be damaged
            raise MalformedRecord(
                f"the processor refuses the {medium.kind} {medium}: {reason(error)}"
            ) from None

    def check(self, kind: Kind) -> None:
        """Refuse a kind of medium that the processor does not know."""
        if kind in self.tokens:
            return
        if kind == "video" and (problem := torchvision_problem()):
            raise ConfigError(f"there are videos, but {problem}: {how_to_install()}")
        raise ConfigError(
            f"{self.facts.source}: its {type(self._processor).__name__} takes no {kind}s"
        )

    def blank(self, kind: Kind) -> Expansion:
        """Return what a white medium becomes."""
        if kind not in self._blanks:
            self._blanks[kind] = self._run(blank(kind))
        return self._blanks[kind]

    def _run(self, opened: Image.Image | Clip) -> Expansion:
        text = [self._text(opened)]
        given: dict[str, Any] = {"text": text, "return_tensors": "pt", "add_special_tokens": False}
        if isinstance(opened, Clip):
            facts: dict[str, Any] = {"total_num_frames": opened.total, "fps": opened.fps}
            facts |= {"frames_indices": opened.indices, "duration": opened.total / opened.fps}
            given |= {"videos": [opened.frames], "video_metadata": [facts]}
            given["do_sample_frames"] = False
        else:
            given["images"] = [opened]
            if self._options.crop_to_patches is not None:
                given["crop_to_patches"] = self._options.crop_to_patches
        return self._sort(self._processor(**given))

    def _text(self, opened: Image.Image | Clip) -> str:
        kind = "video" if isinstance(opened, Clip) else "image"
        return str(getattr(self._processor, f"{kind}_token"))

    def _sort(self, found: Any) -> Expansion:
        """Tell marks of tokens from tensors of media; what the model does not take is left out."""
        ids = np.asarray(found["input_ids"][0]).astype(np.int64)
        marks: dict[str, Array] = {}
        tensors: dict[str, torch.Tensor] = {}
        for name in sorted(self._names & set(found)):
            value = torch.as_tensor(found[name])
            if name.endswith("token_type_ids"):
                marks[name] = value[0].numpy().astype(np.int64)
            else:
                tensors[name] = value
        return Expansion(ids, marks, tensors)

    def _describe(self) -> TokenizerFacts:
        processor = self._processor
        facts = facts_of(processor.tokenizer, self._options.model_name_or_path)
        template = getattr(processor, "chat_template", None) or facts.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        return replace(facts, chat_template=template)

    def _find_tokens(self) -> Iterator[tuple[Kind, int]]:
        kinds: tuple[Kind, ...] = ("image", "video")
        for kind in kinds:
            token = getattr(self._processor, f"{kind}_token", None)
            has_processor = getattr(self._processor, f"{kind}_processor", None) is not None
            if token is None or not has_processor:
                continue
            number = self._processor.tokenizer.convert_tokens_to_ids(str(token))
            if number is not None:
                self.facts.special.setdefault(str(token), number)
                yield kind, int(number)

    def _check_padding(self) -> None:
        """Refuse a padding token that a model would take for a part of an image or a video."""
        for kind, number in self.tokens.items():
            if number == self.facts.pad_id:
                token = getattr(self._processor, f"{kind}_token")
                raise ConfigError(
                    f"{self.facts.source}: the pad token {token!r} of its tokenizer is also the "
                    f"token of {kind}s: give pad_token another value in tokenizer_config.json"
                )


def load_processor(options: ProcessorOptions) -> Any:
    """Load the processor of a Hugging Face folder; nothing is downloaded."""
    import transformers

    folder = Path(options.model_name_or_path)
    if not folder.is_dir():
        raise ConfigError(f"model_name_or_path {folder} is no folder: give that of the model")
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
            f"model_name_or_path {folder} is of a model without images: its processor is a "
            f"{type(processor).__name__}"
        )
    return processor


def _check_json(folder: Path) -> None:
    """Name the file that is damaged: the errors of the loaders do not."""
    for name in ("config.json", *CLASS_FILES):
        path = folder / name
        if path.is_file():
            try:
                parse_json(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ConfigError(f"{path}: cannot be read ({error})") from None


def _load_first(loaders: Sequence[Any], folder: Path, trust_remote_code: bool) -> Any:
    """Load with the first class that can; if none can, say why the first one cannot."""
    reasons = []
    for loader in loaders:
        try:
            return loader.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code
            )
        except Exception as error:  # for damaged files tokenizers raises an Exception of no class
            reasons.append(reason(error))
    if "video_processor" in reasons[0] and (problem := torchvision_problem()):
        raise ConfigError(
            f"model_name_or_path {folder}: its {_class_name(folder)} does not load without "
            f"torchvision, for images neither, and {problem}: {how_to_install()}"
        )
    raise ConfigError(f"model_name_or_path {folder} holds no processor: {reasons[0]}")


def _without_video(known: Any) -> Any:
    """Return a processor class that does without the video processor."""
    attributes = known.get_attributes() if hasattr(known, "get_attributes") else known.attributes
    kept = [name for name in attributes if name != "video_processor"]
    if kept == list(attributes):
        return known
    members: dict[str, Any] = {"get_attributes": classmethod(lambda cls: kept), "attributes": kept}
    members["__reduce__"] = lambda self: (_made_again, (known, vars(self)))
    return type(known.__name__, (known,), members)


def _made_again(known: Any, state: dict[str, Any]) -> Any:
    """Return a processor without videos in another process, where its class is not known."""
    made = object.__new__(_without_video(known))
    vars(made).update(state)
    return made


def _class_name(folder: Path) -> str:
    """Return the class of the processor as the files of the folder name it, "" if none does."""
    for name in CLASS_FILES:
        try:
            found = parse_json((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict) and isinstance(found.get("processor_class"), str):
            return str(found["processor_class"])
    return ""


def _lead(tokenizer: Any) -> list[int]:
    try:
        whole = tokenizer("a")["input_ids"]
    except Exception as error:  # a damaged tokenizer_config.json may cause anything
        raise ConfigError(f"the tokenizer of the processor fails: {reason(error)}") from None
    text = tokenizer("a", add_special_tokens=False)["input_ids"]
    place = next((i for i in range(len(whole)) if whole[i : i + len(text)] == text), 0)
    return list(whole[:place])
