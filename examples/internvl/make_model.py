"""Write a tiny untrained InternVL as a Hugging Face folder, to run the example offline."""

import sys

import torch
from colours import IMAGE, IMAGE_TOKENS, SIDE, VOCABULARY
from transformers import InternVLConfig, InternVLForConditionalGeneration

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
TEXT = {"model_type": "qwen2", "vocab_size": VOCABULARY, "max_position_embeddings": 64}
VISION = {"image_size": [SIDE, SIDE], "patch_size": [SIDE // 4, SIDE // 4]}


def main(folder: str) -> None:
    """Build and save the model."""
    torch.manual_seed(0)
    config = InternVLConfig(
        text_config={**SIZES, **TEXT, "num_attention_heads": 4, "num_key_value_heads": 2},
        vision_config={**SIZES, **VISION, "num_attention_heads": 4},
        image_token_id=IMAGE,
        image_seq_length=IMAGE_TOKENS,
        tie_word_embeddings=False,
    )
    InternVLForConditionalGeneration(config).save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])
