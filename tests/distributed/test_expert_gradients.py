"""Experts with a tensor parallelism of their own learn what they learn on one rank."""

import inspect

import pytest
import torch

from tests.distributed.te_model import load, save, step
from tests.ranks import run_ranks

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
DISPATCH = {"moe_token_dispatcher_type": "alltoall"}
SHARED = {"tp": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1}


def trained(folder, spec, distributed, options):
    """Take one step of Adam; return norm, gradients of the experts and experts after the step."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    parallel_state.initialize_model_parallel(
        options.get("tp", 1),
        expert_tensor_parallel_size=options.get("expert_tensor_parallel_size"),
    )
    model = load(folder, spec, "gated experts", **DISPATCH, **options)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
    wrapped = DistributedDataParallel(model.config, ddp_config, model)
    config = OptimizerConfig(
        lr=0.1,
        adam_eps=1.0,  # a step in proportion to the gradient, rounding included
        weight_decay=0.0,
        clip_grad=0.1,
        use_distributed_optimizer=distributed,
    )
    optimizer = get_megatron_optimizer(config, [wrapped])
    wrapped.zero_grad_buffer()
    step(wrapped)
    finalize_model_grads([wrapped])
    experts = [(name, param) for name, param in model.named_parameters() if ".experts." in name]
    grads = {name: param.main_grad.clone() for name, param in experts}
    _, norm, _ = optimizer.step()
    return norm, grads, {name: param.detach().clone() for name, param in experts}


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("spec", ["te grouped", "local"])
def test_experts_of_both_ranks_learn_from_all_tokens(tmp_path, spec, distributed):
    from megatron.core.tensor_parallel import RowParallelLinear

    if spec == "local" and "tp_group" not in inspect.signature(RowParallelLinear).parameters:
        pytest.skip("megatron-core 0.12 stops: its local experts have no group of their own")
    run_ranks(save, 1, tmp_path, spec, "gated experts", DISPATCH)
    [(norm, grads, weights)] = run_ranks(trained, 1, tmp_path, spec, False, {})
    for found in run_ranks(trained, 2, tmp_path, spec, distributed, SHARED):
        assert found[0] == pytest.approx(norm, rel=1e-5)
        for name, grad in grads.items():
            assert grad.any()
            torch.testing.assert_close(found[2][name], weights[name], **CLOSE, msg=name)
            if not distributed:  # else each rank has a part of the sums
                torch.testing.assert_close(found[1][name], grad, **CLOSE, msg=name)
