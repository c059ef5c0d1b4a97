"""mbridge: what verl builds, loads and exports Megatron models with."""

import torch

from tests.clients import tiny_models
from tests.clients.bridges import Built, Layout, cases
from tests.clients.cases import OwnFailure

OWN = [
    OwnFailure(
        model="deepseek_v3",
        layout="*",
        says="unexpected keyword argument 'max_position_embeddings'",
        reason="mbridge/models/deepseek_v3.py gives MLATransformerConfig max_position_embeddings, "
        "a field that megatron-core has renamed to original_max_position_embeddings",
    )
]


def build(path: str, layout: Layout) -> Built:
    """Do what the client's README does, in float32."""
    from mbridge import AutoBridge

    bridge = AutoBridge.from_pretrained(path, dtype=torch.float32)
    chunks = bridge.get_model(weight_path=path, bf16=False)
    return Built(chunks, lambda: bridge.export_weights(chunks))


CASES = cases(f"{__name__}:build", [*tiny_models.DENSE, *tiny_models.SPARSE])
