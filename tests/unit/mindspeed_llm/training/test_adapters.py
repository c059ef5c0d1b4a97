"""Adapters before the first step, and those that a resumed run must have."""

from dataclasses import replace

import pytest
import torch

import mindspeed.megatron_adaptor  # noqa: F401
from mindspeed.config import ConfigError
from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.training.lora import LoraLinear
from mindspeed_llm.training.lora_plan import LoraPlan, adaptable_weights, check_same

SHAPE = ModelConfig(
    family="llama",
    num_layers=1,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=8,
    vocab_size=99,
    max_position_embeddings=64,
)
PLAN = LoraPlan(4, 8.0, 0.0, ("k_proj", "q_proj", "v_proj"), None)


@pytest.fixture
def one_rank():
    from megatron.core import parallel_state

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def test_adapters_add_nothing_at_first_and_none_is_like_another(one_rank):
    (weight,) = (w for w in adaptable_weights(SHAPE) if "linear_qkv" in w.name)

    def make(seed):
        return LoraLinear(torch.nn.Linear(32, 96, bias=False), weight, PLAN, seed)

    first, again, other = (dict(make(seed).named_parameters()) for seed in (1, 1, 2))
    downs = {name: value for name, value in first.items() if "lora_A" in name}
    assert len(downs) == 3 and len({tuple(a.flatten().tolist()) for a in downs.values()}) == 3
    for name, value in first.items():
        assert torch.equal(value, again[name])
        assert torch.equal(value, other[name]) == ("lora_B" in name)
        assert bool(value.any()) == ("lora_A" in name)
    assert not make(1)(torch.randn(5, 32), torch.zeros(5, 96)).any()


@pytest.mark.parametrize("modules", [("k_proj", "q_proj", "v_proj"), ("q_proj", "v_proj")])
def test_gradients_are_added_once_to_those_of_earlier_micro_batches(one_rank, modules):
    """In `main_grad`, which Megatron recognises by a flag, they are what autograd computes."""
    (weight,) = (w for w in adaptable_weights(SHAPE) if "linear_qkv" in w.name)
    x, start = torch.randn(5, 32), torch.randn(5, 96)
    found = {}
    for fused in (False, True):
        linear = torch.nn.Linear(32, 96, bias=False)
        linear.fuse_wgrad_accumulation = fused
        adapters = LoraLinear(linear, weight, replace(PLAN, modules=modules), 1)
        for name, factor in adapters.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(factor, generator=torch.Generator().manual_seed(len(name)))
            factor.main_grad = torch.full_like(factor, 3.0)
            factor.grad_added_to_main_grad = False
        for _ in range(2):
            adapters(x, start).square().sum().backward()
        found[fused] = dict(adapters.named_parameters())
    assert len(found[True]) == 2 * len(modules)
    for name, factor in found[True].items():
        assert factor.grad_added_to_main_grad and not found[False][name].grad_added_to_main_grad
        expected = found[False][name].grad + 3.0
        torch.testing.assert_close(factor.main_grad, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"r": 8}, "--lora-r 4"),
        ({"lora_alpha": 16.0}, "--lora-alpha 8.0"),
        ({"target_modules": ["q_proj"]}, "--lora-target-modules"),
    ],
)
def test_a_resumed_run_has_the_adapters_it_had(change, flag):
    check_same(PLAN, PLAN.as_peft())
    check_same(None, {})
    with pytest.raises(ConfigError, match=flag):
        check_same(PLAN, PLAN.as_peft() | change)
    with pytest.raises(ConfigError, match="is not given"):
        check_same(None, PLAN.as_peft())
    trained = replace(PLAN, routers=("gate",))
    with pytest.raises(ConfigError, match="^--lora-train-router: .* was trained without it"):
        check_same(trained, PLAN.as_peft())
    with pytest.raises(ConfigError, match="--lora-train-router is not given: .* trained with it"):
        check_same(PLAN, trained.as_peft())
