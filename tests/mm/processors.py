"""Small processors of transformers' own classes, and tiny models that fit them."""

import copy
from pathlib import Path

import torch

from tests.mm import tiny
from tests.small_tokenizers import byte_level

VISION = {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
VISION |= {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
CHATML = (
    "{%% for m in messages %%}<|im_start|>{{ m.role }}\n"
    "{%% if m.content is string %%}{{ m.content }}{%% else %%}{%% for c in m.content %%}"
    "{%% if c.type == 'image' %%}%s{%% elif c.type == 'video' %%}%s"
    "{%% else %%}{{ c.text }}{%% endif %%}{%% endfor %%}{%% endif %%}<|im_end|>\n{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"
)
QWEN_TEMPLATE = CHATML % (
    "<|vision_start|><|image_pad|><|vision_end|>",
    "<|vision_start|><|video_pad|><|vision_end|>",
)
INTERNVL_TEMPLATE = CHATML % ("<IMG_CONTEXT>\n", "<video>\n")
LLAVA_TEMPLATE = (
    "{% for m in messages %}{{ 'USER: ' if m.role == 'user' else 'ASSISTANT: ' }}"
    "{% for c in m.content if c.type == 'image' %}<image>\n{% endfor %}"
    "{% for c in m.content if c.type == 'text' %}{{ c.text }}{% endfor %}"
    "{{ ' ' if m.role == 'user' else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
PATCH = 4
"""Pixels a side of a patch; the Qwen processor merges 2 x 2 of them."""
LLAVA = {
    "patch_size": PATCH,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
    "chat_template": LLAVA_TEMPLATE,
}
TILES = {
    "size": {"height": 16, "width": 16},
    "crop_to_patches": True,
    "min_patches": 1,
    "max_patches": 2,
}
VOCABULARY = 448
"""A few more than the tokenizers have."""


def tokenizer(bos=None, **special):
    """Return a small tokenizer with more special tokens, by the names that processors use.

    One with a `bos` puts it in front of every text.
    """
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    plain = byte_level()
    made = copy.deepcopy(plain.backend_tokenizer)
    if bos is not None:
        numbers = [(bos, made.token_to_id(bos))]
        made.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=numbers)
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=bos,
        eos_token=plain.eos_token,
        pad_token=plain.pad_token,
        extra_special_tokens=special,
    )


def qwen2_5_vl():
    """Return a processor whose images have a token for every 8 x 8 pixels."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    images = Qwen2VLImageProcessorPil(
        patch_size=PATCH, temporal_patch_size=1, merge_size=2, min_pixels=64, max_pixels=1024
    )
    return qwen2_5_vl_class()(images, tokenizer(**VISION), chat_template=QWEN_TEMPLATE)


def qwen2_5_vl_class():
    """Return the class of Qwen2.5-VL's processors, for images and text."""
    from transformers import Qwen2_5_VLProcessor

    return _without_video(Qwen2_5_VLProcessor)


def internvl(images=None, *videos):
    """Return a processor whose tiles of 16 x 16 pixels have 4 tokens each."""
    from transformers import InternVLProcessor
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    names = {"start_image_token": "<img>", "end_image_token": "</img>"}
    names |= {"context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"}
    words = tokenizer(**names)
    made = InternVLProcessor if videos else _without_video(InternVLProcessor)
    images = images or GotOcr2ImageProcessorPil(**TILES)
    return made(images, words, *videos, image_seq_length=4, chat_template=INTERNVL_TEMPLATE)


def llava():
    """Return a processor whose images have 16 tokens; its template renders images first."""
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    side = {"height": 4 * PATCH, "width": 4 * PATCH}
    images = CLIPImageProcessorPil(size={"shortest_edge": 4 * PATCH}, crop_size=side)
    return LlavaProcessor(images, tokenizer("<s>", image_token="<image>"), **LLAVA)


def llava_next():
    """Return a processor that splits images into tiles, more for larger aspect ratios."""
    from transformers import LlavaNextProcessor
    from transformers.models.llava_next.image_processing_pil_llava_next import (
        LlavaNextImageProcessorPil,
    )

    side = {"height": 4 * PATCH, "width": 4 * PATCH}
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 4 * PATCH},
        crop_size=side,
        image_grid_pinpoints=[[16, 16], [16, 32], [32, 16], [32, 32]],
    )
    return LlavaNextProcessor(images, tokenizer("<s>", image_token="<image>"), **LLAVA)


def paligemma():
    """Return a processor that computes labels of a whole prompt and its answer."""
    from transformers import PaliGemmaProcessor
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    images = SiglipImageProcessorPil(size={"height": 16, "width": 16})
    images.image_seq_length = 16
    return PaliGemmaProcessor(images, tokenizer("<s>", image_token="<image>"))


MAKERS = {
    "qwen2_5_vl": qwen2_5_vl,
    "internvl": internvl,
    "llava": llava,
    "llava_next": llava_next,
}


def save(name, folder):
    """Write the files of a processor."""
    MAKERS[name]().save_pretrained(Path(folder))


def new_model(name, **vision_values):
    """Build the model that fits the Qwen or the InternVL processor, the same every time."""
    import transformers

    class_name, values, text, vision = tiny.CONFIGS[name]
    words = MAKERS.get(name, qwen2_5_vl)().tokenizer
    tokens = {"vision_start_token_id": "<|vision_start|>", "video_token_id": "<|video_pad|>"}
    tokens["image_token_id"] = "<IMG_CONTEXT>" if name == "internvl" else "<|image_pad|>"
    ids = {key: words.convert_tokens_to_ids(tokens[key]) for key in tokens.keys() & values.keys()}
    vision = {**vision, **vision_values}
    text = {**text, "vocab_size": VOCABULARY, "max_position_embeddings": 512}
    model_class = getattr(transformers, class_name)
    config = model_class.config_class(**values | ids, text_config=text, vision_config=vision)
    config.architectures = [class_name]
    torch.manual_seed(0)
    return model_class(config)


def _without_video(known):
    """Return the class without its video processor, which needs torchvision."""
    kept = ["image_processor", "tokenizer"]
    return type(known.__name__, (known,), {"get_attributes": classmethod(lambda cls: kept)})
