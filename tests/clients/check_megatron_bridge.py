"""megatron-bridge: NVIDIA's own bridge between transformers and Megatron."""

import torch

from tests.clients import tiny_models
from tests.clients.bridges import Built, Layout, cases
from tests.clients.cases import OwnFailure

OWN: list[OwnFailure] = []


def build(path: str, layout: Layout) -> Built:
    """Do what the client's README does, in float32."""
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(path, dtype=torch.float32)
    provider = bridge.to_megatron_provider()
    provider.tensor_model_parallel_size = layout.tp
    provider.pipeline_model_parallel_size = layout.pp
    provider.expert_model_parallel_size = layout.ep
    provider.expert_tensor_parallel_size = layout.tp
    provider.sequence_parallel = layout.tp > 1  # experts with TP need it
    provider.params_dtype = provider.pipeline_dtype = torch.float32
    provider.bf16 = provider.fp16 = False
    # transformers balances no experts.
    provider.moe_aux_loss_coeff = provider.moe_router_bias_update_rate = 0.0
    provider.finalize()
    chunks = provider.provide_distributed_model(wrap_with_ddp=False, bf16=False, fp16=False)
    return Built(chunks, lambda: bridge.export_hf_weights(chunks, cpu=True, show_progress=False))


CASES = cases(f"{__name__}:build", [*tiny_models.DENSE, *tiny_models.SPARSE])
