"""Tiny vision-language models of transformers' own classes, their folders and their batches."""

from pathlib import Path
from typing import Any

import torch

VOCABULARY, IMAGE, VIDEO = 64, 60, 61
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
    "in_channels": 3,
}
CLIP_VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "projection_dim": 32,
}
INTERNVL_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": [16, 16],
    "patch_size": [4, 4],
}
MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
QWEN_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": 62}
THIRD = {"intermediate_size": 48, "out_hidden_size": 32}

CONFIGS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # Name: class, config, text config, vision config.
    "internvl": (
        "InternVLForConditionalGeneration",
        {"image_token_id": IMAGE, "image_seq_length": 4},
        {**TEXT, "model_type": "qwen2"},
        INTERNVL_VISION,
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        {"image_token_index": IMAGE, "image_seq_length": 4},
        {**TEXT, "model_type": "llama"},
        CLIP_VISION,
    ),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        QWEN_IDS,
        {**TEXT, "rope_parameters": MROPE},
        {**QWEN_VISION, "embed_dim": 32, "mlp_ratio": 2},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        QWEN_IDS,
        {**TEXT, "rope_parameters": MROPE},
        {**QWEN_VISION, **THIRD, "window_size": 8, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        QWEN_IDS,
        {**TEXT, "head_dim": 8, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        {
            **QWEN_VISION,
            **THIRD,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
    ),
}


def new_model(name: str, tied: bool = False) -> Any:
    """Build a model of transformers, the same every time."""
    import transformers

    class_name, values, text, vision = CONFIGS[name]
    model_class = getattr(transformers, class_name)
    text = {**text, "tie_word_embeddings": tied}
    config = model_class.config_class(
        **values, text_config=text, vision_config=vision, tie_word_embeddings=tied
    )
    torch.manual_seed(11)
    return model_class(config)


def save(name: str, folder: Path, tied: bool = False, **options: Any) -> str:
    """Write a model as Hugging Face does and return the folder."""
    new_model(name, tied).save_pretrained(folder, **options)
    return str(folder)


def batch(name: str, rows: int = 2, length: int = 16, seed: int = 3) -> dict[str, torch.Tensor]:
    """Make a batch: every row begins with an image of four tokens, some labels are ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 60, (rows, length), generator=generator)
    tokens[:, 1:5] = IMAGE
    labels = tokens.clone()
    labels[:, :6] = -100
    found = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    if name.startswith("qwen"):
        found["pixel_values"] = torch.randn(rows * 16, 3 * 4 * 4, generator=generator)
        found["image_grid_thw"] = torch.tensor([[1, 4, 4]] * rows)
        found["mm_token_type_ids"] = (tokens == IMAGE).int()
    else:
        size = 8 if name == "llava" else 16
        found["pixel_values"] = torch.randn(rows, 3, size, size, generator=generator)
    return found


def save_text(class_name: str, folder: Path, **values: Any) -> Any:
    """Write a text model, and return it; values replace those of TEXT."""
    import transformers

    model_class = getattr(transformers, class_name)
    torch.manual_seed(11)
    model = model_class(model_class.config_class(**{**TEXT, **values}))
    model.save_pretrained(folder)
    return model.train()


def text_batch(rows: int = 2, length: int = 16, padding: int = 3) -> dict[str, torch.Tensor]:
    """Make a batch without images, with padding at the end of its last row."""
    found = batch("text", rows, length)
    found["input_ids"][:, 1:5] = 7
    found["attention_mask"][-1, length - padding :] = 0
    found["labels"][-1, length - padding :] = -100
    return found
