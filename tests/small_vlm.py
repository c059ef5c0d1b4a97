"""Vision-language models of transformers, small enough to train in a moment."""

import torch

from tests import small_processors

TEXT = {
    "vocab_size": 448,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def qwen2_5_vl(**more):
    """Return the model that fits the processor of the same name."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48}
    vision |= {"patch_size": small_processors.PATCH, "out_hidden_size": 32, "window_size": 32}
    vision |= {"fullatt_block_indexes": [1]}
    words = small_processors.tokenizer(**small_processors.VISION)
    ids = {f"{name}_id": words.convert_tokens_to_ids(t) for name, t in words_of(words).items()}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    config = Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope}, vision_config=vision, **ids, **more
    )
    return _seeded(Qwen2_5_VLForConditionalGeneration, config)


def internvl(**more):
    """Return the model that fits the processor of the same name."""
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    vision = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"intermediate_size": 48, "image_size": [16, 16], "patch_size": [4, 4]}
    image = small_processors.internvl().image_token_id
    config = InternVLConfig(
        text_config={**TEXT, "model_type": "qwen2"},
        vision_config=vision,
        image_token_id=image,
        downsample_ratio=0.5,
        **more,
    )
    return _seeded(InternVLForConditionalGeneration, config)


def words_of(words):
    """Return the special tokens of the Qwen processor by name."""
    return {name: getattr(words, name) for name in small_processors.VISION}


def _seeded(model_class, config):
    torch.manual_seed(0)
    return model_class(config)
