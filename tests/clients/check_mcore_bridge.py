"""mcore-bridge: the library under ms-swift that builds, loads and exports Megatron models."""

from typing import Any

import torch

from tests.clients import tiny_models
from tests.clients.bridges import Built, Layout, cases
from tests.clients.cases import OwnFailure

OWN: list[OwnFailure] = []


def build(path: str, layout: Layout) -> Built:
    """Do what the client's README does."""
    from mcore_bridge import ModelConfig, get_mcore_model, hf_to_mcore_config
    from transformers import AutoConfig

    values: dict[str, Any] = hf_to_mcore_config(AutoConfig.from_pretrained(path))
    # transformers balances no experts.
    values |= {"moe_aux_loss_coeff": 0.0, "moe_router_bias_update_rate": 0.0}
    config = ModelConfig(
        params_dtype=torch.float32,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.tp,
        sequence_parallel=layout.tp > 1,  # experts with TP need it
        overlap_p2p_comm=False,  # its default is for virtual stages; ms-swift sets it like this
        batch_p2p_comm=True,
        **values,
    )
    chunks = get_mcore_model(config)
    config.bridge.load_weights(chunks, path)
    return Built(chunks, lambda: config.bridge.export_weights(chunks))


CASES = cases(f"{__name__}:build", [*tiny_models.DENSE, *tiny_models.SPARSE])
