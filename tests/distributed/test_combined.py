"""The features together: one training, however it is cut."""

from typing import Any

import pytest

from tests.gpt.layout import Layout
from tests.gpt.runs import assert_same_training

_OVERLAP: dict[str, Any] = {
    "distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "bucket_size": 8000,
}


@pytest.mark.parametrize("spec", ["local", "te"])
@pytest.mark.parametrize(
    "cut",
    [
        {"tp": 2, "pp": 2, "sequence_parallel": True, "distributed_optimizer": True},
        {"tp": 2, "dp": 2, "sequence_parallel": True, "recompute": ("full", "uniform", 1)}
        | _OVERLAP,
        # Untied: around a tied embedding megatron-core 0.12.1 lets such small buckets overlap.
        {"family": "llama", "pp": 2, "dp": 2, "layers_per_virtual_stage": 1}
        | {"recompute": ("full", "block", 1)}
        | _OVERLAP,
    ],
    ids=["tensor-pipeline", "tensor-data", "virtual-pipeline-data"],
)
def test_four_ranks_train_like_one(cut: dict[str, Any], spec: str) -> None:
    assert_same_training(Layout(**cut, spec=spec))
