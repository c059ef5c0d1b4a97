"""What a mixture of experts cannot be trained with is an error before a model is built."""

import math
from typing import Any

import pytest

import mindspeed.megatron_adaptor  # noqa: F401
from mindspeed.config import ConfigError
from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.training import model
from mindspeed_llm.training.expert_checks import check_experts
from mindspeed_llm.training.model import make_config
from mindspeed_llm.training.options import TrainOptions
from mindspeed_llm.training.setup import parallel_dims
from tests.unit.mindspeed_llm.training.shapes import DENSE, EXPERTS, ROUTED

PADDED = {"moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": 1.5}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"moe_token_dispatcher_type": "allgather", "variable_seq_lengths": True}, "use alltoall"),
        ({"moe_token_dispatcher_type": "allgather", "stage": "grpo"}, "--stage grpo ranks have"),
        (PADDED | {"stage": "trl_ppo"}, "different numbers of"),
        ({"moe_expert_capacity_factor": 1.5, "stage": "grpo"}, "depend on those sampled beside"),
    ],
)
def test_ranks_with_different_numbers_of_tokens(changes: dict[str, Any], words: str) -> None:
    for layout in ({"expert_model_parallel_size": 2}, {"expert_tensor_parallel_size": 2}):
        with pytest.raises(ConfigError, match=words):
            check_experts(TrainOptions(load="m", **layout, **changes), EXPERTS)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("moe_pad_expert_input_to_capacity", "there is no capacity: add --moe-expert-capacity-f"),
        ("moe_shared_expert_overlap", "this llama model has no shared experts: drop it"),
    ],
)
def test_options_that_experts_have_no_use_for(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_experts(TrainOptions(load="m", **{name: True}), EXPERTS)
    check_experts(TrainOptions(load="m", **PADDED), EXPERTS)


def test_experts_are_not_padded_to_more_tokens_than_there_are() -> None:
    whole = PADDED | {"moe_expert_capacity_factor": 2.0}
    check_experts(TrainOptions(load="m", **whole), EXPERTS)
    options = TrainOptions(load="m", **whole | {"moe_expert_capacity_factor": 2.01})
    with pytest.raises(ConfigError, match="4 experts, 2 a token, none gets more than 4/2 of its"):
        check_experts(options, EXPERTS)
    unpadded = TrainOptions(load="m", moe_expert_capacity_factor=2.01)
    check_experts(unpadded, EXPERTS)


def test_a_factor_of_no_loss_is_refused() -> None:
    given = {"moe_aux_loss_coeff": 0.5, "moe_router_load_balancing_type": "none"}
    with pytest.raises(ConfigError, match="--moe-aux-loss-coeff 0.5: with .* drop one of the two"):
        check_experts(TrainOptions(load="m", **given), EXPERTS)


TURNS = {"overlap_moe_expert_parallel_comm": True, "expert_model_parallel_size": 2, "bf16": True}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stage": "dpo"}, "is for pretraining and --stage sft, not dpo"),
        ({"lora_r": 4}, "which is frozen beside adapters"),
        ({"bf16": False}, "for --bf16 and --fp16: add one"),
        ({"expert_model_parallel_size": 1}, "no rank sends tokens to another"),
        ({"pipeline_model_parallel_size": 2}, "add --num-layers-per-virtual-pipeline-stage"),
        ({"delay_wgrad_compute": True, "transformer_impl": "local"}, "-impl transformer_engine"),
        (
            {"delay_wgrad_compute": True, "overlap_moe_expert_parallel_comm": False},
            "--delay-wgrad-compute: is for --overlap-moe-expert-parallel-comm: add that",
        ),
    ],
)
def test_micro_batches_take_turns_where_megatron_can(changes: dict[str, Any], words: str) -> None:
    check_experts(TrainOptions(load="m", **TURNS), EXPERTS)
    with pytest.raises(ConfigError, match=words):
        check_experts(TrainOptions(load="m", **TURNS | changes), EXPERTS)


def test_shared_experts_overlap_with_the_alltoall_dispatcher_only() -> None:
    shared = ROUTED.model_copy(update={"shared_ffn_hidden_size": ROUTED.ffn_hidden_size})
    shape = DENSE.model_copy(update={"moe": shared})
    given = {"load": "m", "moe_shared_expert_overlap": True}
    check_experts(TrainOptions(**given), shape)
    with pytest.raises(ConfigError, match="dispatcher-type allgather has no .*: use alltoall, or"):
        check_experts(TrainOptions(**given, moe_token_dispatcher_type="allgather"), shape)


@pytest.mark.parametrize("name", ["moe_load_interval", "moe_z_loss_coeff"])
def test_a_dense_model_has_no_options_of_experts(name: str) -> None:
    options = TrainOptions(load="m", **{name: 5})
    words = f"--{name.replace('_', '-')}: the model has no experts: drop it"
    with pytest.raises(ConfigError, match=words):
        check_experts(options, DENSE)
    check_experts(TrainOptions(load="m"), DENSE)


def test_a_router_without_a_bias_has_no_rate_of_it() -> None:
    options = TrainOptions(load="m", moe_router_bias_update_rate=0.0)
    words = "--moe-router-bias-update-rate 0: .* choose experts without a bias: drop it"
    unbiased = DENSE.model_copy(update={"moe": ROUTED.model_copy(update={"expert_bias": False})})
    check_experts(options, EXPERTS)
    with pytest.raises(ConfigError, match=words):
        check_experts(options, unbiased)


@pytest.mark.parametrize("changes", [{"moe_expert_capacity_factor": 1.5}, {"fix_router": True}])
def test_what_depends_on_a_micro_batch_is_not_kept(changes: dict[str, Any]) -> None:
    options = TrainOptions(load="m", stage="dpo", **changes)
    check_experts(options, EXPERTS)
    kept = options.model_copy(update={"precompute_ref_log_probs": True})
    with pytest.raises(ConfigError, match="keeps it for all later ones: drop one$"):
        check_experts(kept, EXPERTS)


@pytest.mark.parametrize(
    "name", ["moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_expert_capacity_factor"]
)
@pytest.mark.parametrize("value", [-0.5, math.inf, math.nan])
def test_factors_of_experts_are_finite_and_not_negative(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name}\n.* (a finite number|greater than)"):
        TrainOptions(load="m", **{name: value})


@pytest.mark.parametrize(
    ("given", "devices", "expected"),
    [(None, (), False), (True, (), True), (None, ("cpu",), True), (False, ("cpu",), False)],
)
def test_the_router_is_fused_where_asked_for_or_by_default(
    monkeypatch: pytest.MonkeyPatch, given: bool | None, devices: tuple[str, ...], expected: bool
) -> None:
    monkeypatch.setattr(model, "FUSED_ROUTER_DEVICES", devices)
    options = TrainOptions(load="m", moe_router_fusion=given)
    if model.has_fused_router():
        check_experts(options, EXPERTS)
        config = make_config(options, EXPERTS, parallel_dims(options, EXPERTS))
        assert config.moe_router_fusion is expected
    elif given:
        with pytest.raises(ConfigError, match="has no fused router: use 0.16, or drop it"):
            check_experts(options, EXPERTS)
    else:  # nothing to switch, and no complaint
        check_experts(options, EXPERTS)
        make_config(options, EXPERTS, parallel_dims(options, EXPERTS))


@pytest.mark.parametrize(
    ("changes", "shape", "expected"),
    [
        ({}, EXPERTS, True),
        ({"transformer_impl": "local"}, EXPERTS, False),
        ({"moe_grouped_gemm": False}, EXPERTS, False),
        ({"moe_grouped_gemm": True, "transformer_impl": "local"}, EXPERTS, True),
        ({}, DENSE, None),  # given, the flag would be refused
    ],
)
def test_experts_are_grouped_unless_they_are_local(
    changes: dict[str, Any], shape: ModelConfig, expected: bool | None
) -> None:
    options = model.with_grouped_experts(TrainOptions(load="m", **changes), shape)
    assert options.moe_grouped_gemm is expected


def test_a_model_without_experts_takes_what_switches_them_off() -> None:
    check_experts(TrainOptions(load="m", moe_grouped_gemm=False), DENSE)
    with pytest.raises(ConfigError, match="--moe-grouped-gemm: the model has no experts: drop it"):
        check_experts(TrainOptions(load="m", moe_grouped_gemm=True), DENSE)


def test_local_experts_are_grouped_in_bf16_only() -> None:
    given = {"load": "m", "moe_grouped_gemm": True, "transformer_impl": "local"}
    check_experts(TrainOptions(**given, bf16=True), EXPERTS)
    with pytest.raises(ConfigError, match="with --transformer-impl local .* for --bf16 only"):
        check_experts(TrainOptions(**given), EXPERTS)


def test_the_number_of_shared_experts_is_that_of_the_model() -> None:
    with pytest.raises(ConfigError, match="--n-shared-experts 2: this llama model has 0, which"):
        check_experts(TrainOptions(load="m", n_shared_experts=2), EXPERTS)
    shared = ROUTED.model_copy(update={"shared_ffn_hidden_size": 2 * ROUTED.ffn_hidden_size})
    shape = DENSE.model_copy(update={"moe": shared})
    check_experts(TrainOptions(load="m", n_shared_experts=2), shape)
    with pytest.raises(ConfigError, match="--n-shared-experts 1: this llama model has 2, which"):
        check_experts(TrainOptions(load="m", n_shared_experts=1), shape)
