"""What cannot work is an error before anything is loaded: weights, sizes, parallel sizes."""

import math
from pathlib import Path
from typing import Any

import pytest

import mindspeed.megatron_adaptor  # noqa: F401
from mindspeed.config import ConfigError
from mindspeed_llm.models.config import MLAConfig, ModelConfig, MoEConfig
from mindspeed_llm.training import model, setup
from mindspeed_llm.training.model import make_config
from mindspeed_llm.training.model_shape import find_shape
from mindspeed_llm.training.options import TrainOptions
from mindspeed_llm.training.setup import parallel_dims

SHAPE = ModelConfig(
    family="llama",
    num_layers=4,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=8,
    vocab_size=99,
    max_position_embeddings=64,
    norm_epsilon=1e-6,
    tied=False,
)
ROUTED = MoEConfig(
    num_experts=4,
    topk=2,
    ffn_hidden_size=16,
    is_moe_layer=(True,) * 4,
    score_function="sigmoid",
    expert_bias=True,
)
EXPERTS = SHAPE.model_copy(update={"moe": ROUTED})
PADDED = {"moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": 1.5}


@pytest.mark.parametrize(
    ("world", "changes", "words"),
    [
        (
            4,
            {"tensor_model_parallel_size": 4},
            "4 does not divide --num-query-groups 2: use 1 or 2$",
        ),
        (
            1,
            {"tensor_model_parallel_size": 3},
            "--num-attention-heads 4: use 1, or another number of ranks with 2$",
        ),
        (3, {"tensor_model_parallel_size": 2}, "3 rank"),
        (4, {"pipeline_model_parallel_size": 4, "noop_layers": (1,)}, "does not divide"),
        (
            2,
            {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 3},
            "--num-layers-per-virtual-pipeline-stage 3 does not divide the 2 layers",
        ),
        (
            2,
            {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
            "micro-batches of a step are not a multiple",
        ),
        (
            2,
            {
                "pipeline_model_parallel_size": 2,
                "num_layers_per_virtual_pipeline_stage": 1,
                "global_batch_size": 3,
            },
            "the 3 micro-batches of a step are not a multiple",
        ),
        (2, {"global_batch_size": 3}, "--global-batch-size 3 is not a multiple of 2"),
    ],
)
def test_parallel_sizes(
    monkeypatch: pytest.MonkeyPatch, world: int, changes: dict[str, Any], words: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(ConfigError, match=words):
        parallel_dims(TrainOptions(**changes), SHAPE)


def cp(size: int, algo: str, **more: Any) -> dict[str, Any]:
    return {"context_parallel_size": size, "context_parallel_algo": f"{algo}_cp_algo"} | more


@pytest.mark.parametrize(
    ("world", "changes", "words"),
    [
        (3, cp(2, "megatron"), "3 rank.s. cannot hold --context-parallel-size 2 = 2 ranks"),
        (2, cp(0, "megatron"), "--context-parallel-size 0 is too small"),
        (4, cp(4, "hybrid"), "--ulysses-degree-in-cp is missing: .* use 2"),
        (4, cp(4, "ulysses", ulysses_degree_in_cp=2), "needs --context-parallel-algo hybrid"),
        (4, cp(4, "megatron", cp_window_size=3), "--cp-window-size 3 .* use 1 or 2"),
        (2, cp(2, "megatron", hidden_dropout=0.1), "--hidden-dropout 0.1 cannot be reproduced"),
        (
            2,
            cp(2, "megatron", lora_r=4, lora_dropout=0.1),
            "--lora-dropout 0.1 cannot be reproduced",
        ),
        (2, cp(2, "megatron", stage="other"), "--stage other needs whole sequences: use 1"),
    ],
)
def test_sequences_that_cannot_be_split(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    world: int,
    changes: dict[str, Any],
    words: str,
) -> None:
    """One line, before a process group or a model exists."""
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setattr(setup, "find_shape", lambda options: (SHAPE, None))
    options = TrainOptions(load=str(tmp_path), **changes)
    with pytest.raises(ConfigError, match=words) as caught:
        setup.prepare(options, splits_sequences=options.stage == "sft")
    assert "\n" not in str(caught.value)


LATENT = MLAConfig(
    q_lora_rank=None, kv_lora_rank=8, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8
)


def test_what_megatron_refuses_is_one_line() -> None:
    options = TrainOptions(recompute_granularity="full")
    dims = parallel_dims(TrainOptions(), SHAPE)
    with pytest.raises(ConfigError, match="Megatron refuses these options: .*recompute_method"):
        make_config(options, SHAPE, dims)


def test_groups_of_recomputed_layers_fill_a_stage() -> None:
    """Megatron ends in an IndexError."""
    dims = parallel_dims(TrainOptions(), SHAPE)
    values = {"recompute_granularity": "full", "recompute_method": "uniform"}
    assert make_config(TrainOptions(**values, recompute_num_layers=2), SHAPE, dims)
    with pytest.raises(ConfigError, match="--recompute-num-layers 3 does not divide the 4 layers"):
        make_config(TrainOptions(**values, recompute_num_layers=3), SHAPE, dims)


def test_fused_paths_of_layers_are_on_unless_switched_off() -> None:
    dims = parallel_dims(TrainOptions(), SHAPE)
    config = make_config(TrainOptions(), SHAPE, dims)
    assert config.bias_activation_fusion and config.bias_dropout_fusion
    unfused = TrainOptions(no_bias_swiglu_fusion=True, no_bias_dropout_fusion=True)
    config = make_config(unfused, SHAPE, dims)
    assert not config.bias_activation_fusion and not config.bias_dropout_fusion


def test_an_empty_load_is_an_error_unless_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no weights: looked for"):
        find_shape(TrainOptions(load=str(tmp_path)))
    with pytest.raises(ConfigError, match="there is no config.json"):
        find_shape(TrainOptions(load=str(tmp_path), from_scratch=True))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds no weights: .*; --from-scratch trains random"):
        find_shape(TrainOptions(load=str(tmp_path)))


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
            setup.check_experts(TrainOptions(load="m", **layout, **changes), EXPERTS)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("moe_pad_expert_input_to_capacity", "there is no capacity: add --moe-expert-capacity-f"),
        ("moe_shared_expert_overlap", "this llama model has no shared experts: drop it"),
    ],
)
def test_options_that_experts_have_no_use_for(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        setup.check_experts(TrainOptions(load="m", **{name: True}), EXPERTS)
    setup.check_experts(TrainOptions(load="m", **PADDED), EXPERTS)


def test_experts_are_not_padded_to_more_tokens_than_there_are() -> None:
    whole = PADDED | {"moe_expert_capacity_factor": 2.0}
    setup.check_experts(TrainOptions(load="m", **whole), EXPERTS)
    options = TrainOptions(load="m", **whole | {"moe_expert_capacity_factor": 2.01})
    with pytest.raises(ConfigError, match="4 experts, 2 a token, none gets more than 4/2 of its"):
        setup.check_experts(options, EXPERTS)
    unpadded = TrainOptions(load="m", moe_expert_capacity_factor=2.01)
    setup.check_experts(unpadded, EXPERTS)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_a_single_expert_has_its_score_as_its_weight(score_function: str) -> None:
    def config_of(topk: int, is_normalized: bool) -> Any:
        changes = {"topk": topk, "normalize_topk": is_normalized, "expert_bias": False}
        moe = ROUTED.model_copy(update=changes | {"score_function": score_function})
        shape = SHAPE.model_copy(update={"moe": moe})
        return make_config(TrainOptions(), shape, parallel_dims(TrainOptions(), shape))

    assert config_of(1, False).moe_router_topk == 1
    with pytest.raises(ConfigError, match="one expert a token with normalized weights"):
        config_of(1, True)
    if score_function == "sigmoid":
        with pytest.raises(ConfigError, match="Megatron normalizes the weights"):
            config_of(2, False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 0.25),
        ({"moe_aux_loss_coeff": 0.5, "moe_router_load_balancing_type": "aux_loss"}, 0.5),
        ({"moe_aux_loss_coeff": 0.0}, 0.0),
        ({"moe_router_load_balancing_type": "none"}, 0.0),
    ],
)
def test_the_auxiliary_loss_is_as_given_or_that_of_the_model(
    given: dict[str, Any], expected: float
) -> None:
    routed = ROUTED.model_copy(update={"aux_loss_coeff": 0.25})
    shape = SHAPE.model_copy(update={"moe": routed})
    options = TrainOptions(load="m", **given)
    config = make_config(options, shape, parallel_dims(options, shape))
    assert config.moe_aux_loss_coeff == expected
    assert config.moe_router_load_balancing_type == ("aux_loss" if expected else "none")


def test_a_factor_of_no_loss_is_refused() -> None:
    given = {"moe_aux_loss_coeff": 0.5, "moe_router_load_balancing_type": "none"}
    with pytest.raises(ConfigError, match="--moe-aux-loss-coeff 0.5: with .* drop one of the two"):
        setup.check_experts(TrainOptions(load="m", **given), EXPERTS)


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
    setup.check_experts(TrainOptions(load="m", **TURNS), EXPERTS)
    with pytest.raises(ConfigError, match=words):
        setup.check_experts(TrainOptions(load="m", **TURNS | changes), EXPERTS)


def test_shared_experts_overlap_with_the_alltoall_dispatcher_only() -> None:
    shared = ROUTED.model_copy(update={"shared_ffn_hidden_size": ROUTED.ffn_hidden_size})
    shape = SHAPE.model_copy(update={"moe": shared})
    given = {"load": "m", "moe_shared_expert_overlap": True}
    setup.check_experts(TrainOptions(**given), shape)
    with pytest.raises(ConfigError, match="dispatcher-type allgather has no .*: use alltoall, or"):
        setup.check_experts(TrainOptions(**given, moe_token_dispatcher_type="allgather"), shape)


@pytest.mark.parametrize(("stage", "factor"), [("sft", 0.1), ("dpo", 0.0), ("grpo", 0.0)])
def test_multi_token_prediction_is_no_part_of_other_losses(stage: str, factor: float) -> None:
    options = TrainOptions(load="m", stage=stage)
    config = make_config(options, EXPERTS, parallel_dims(options, EXPERTS))
    assert config.mtp_loss_scaling_factor == factor


@pytest.mark.parametrize("name", ["moe_load_interval", "moe_z_loss_coeff"])
def test_a_dense_model_has_no_options_of_experts(name: str) -> None:
    options = TrainOptions(load="m", **{name: 5})
    words = f"--{name.replace('_', '-')}: the model has no experts: drop it"
    with pytest.raises(ConfigError, match=words):
        setup.check_experts(options, SHAPE)
    setup.check_experts(TrainOptions(load="m"), SHAPE)


def test_a_router_without_a_bias_has_no_rate_of_it() -> None:
    options = TrainOptions(load="m", moe_router_bias_update_rate=0.0)
    words = "--moe-router-bias-update-rate 0: .* choose experts without a bias: drop it"
    unbiased = SHAPE.model_copy(update={"moe": ROUTED.model_copy(update={"expert_bias": False})})
    setup.check_experts(options, EXPERTS)
    with pytest.raises(ConfigError, match=words):
        setup.check_experts(options, unbiased)


@pytest.mark.parametrize("changes", [{"moe_expert_capacity_factor": 1.5}, {"fix_router": True}])
def test_what_depends_on_a_micro_batch_is_not_kept(changes: dict[str, Any]) -> None:
    options = TrainOptions(load="m", stage="dpo", **changes)
    setup.check_experts(options, EXPERTS)
    kept = options.model_copy(update={"precompute_ref_log_probs": True})
    with pytest.raises(ConfigError, match="keeps it for all later ones: drop one$"):
        setup.check_experts(kept, EXPERTS)


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
        setup.check_experts(options, EXPERTS)
        config = make_config(options, EXPERTS, parallel_dims(options, EXPERTS))
        assert config.moe_router_fusion is expected
    elif given:
        with pytest.raises(ConfigError, match="has no fused router: use 0.16, or drop it"):
            setup.check_experts(options, EXPERTS)
    else:  # nothing to switch, and no complaint
        setup.check_experts(options, EXPERTS)
        make_config(options, EXPERTS, parallel_dims(options, EXPERTS))


@pytest.mark.parametrize(
    ("changes", "shape", "expected"),
    [
        ({}, EXPERTS, True),
        ({"transformer_impl": "local"}, EXPERTS, False),
        ({"moe_grouped_gemm": False}, EXPERTS, False),
        ({"moe_grouped_gemm": True, "transformer_impl": "local"}, EXPERTS, True),
        ({}, SHAPE, None),  # given, the flag would be refused
    ],
)
def test_experts_are_grouped_unless_they_are_local(
    changes: dict[str, Any], shape: ModelConfig, expected: bool | None
) -> None:
    options = model.with_grouped_experts(TrainOptions(load="m", **changes), shape)
    assert options.moe_grouped_gemm is expected


def test_a_model_without_experts_takes_what_switches_them_off() -> None:
    setup.check_experts(TrainOptions(load="m", moe_grouped_gemm=False), SHAPE)
    with pytest.raises(ConfigError, match="--moe-grouped-gemm: the model has no experts: drop it"):
        setup.check_experts(TrainOptions(load="m", moe_grouped_gemm=True), SHAPE)


def test_local_experts_are_grouped_in_bf16_only() -> None:
    given = {"load": "m", "moe_grouped_gemm": True, "transformer_impl": "local"}
    setup.check_experts(TrainOptions(**given, bf16=True), EXPERTS)
    with pytest.raises(ConfigError, match="with --transformer-impl local .* for --bf16 only"):
        setup.check_experts(TrainOptions(**given), EXPERTS)


def test_a_reward_model_with_experts_has_grouped_ones_beside_a_dense_policy() -> None:
    options = TrainOptions(load="m")
    assert make_config(options, EXPERTS, parallel_dims(options, SHAPE)).moe_grouped_gemm


def test_the_number_of_shared_experts_is_that_of_the_model() -> None:
    with pytest.raises(ConfigError, match="--n-shared-experts 2: this llama model has 0, which"):
        setup.check_experts(TrainOptions(load="m", n_shared_experts=2), EXPERTS)
    shared = ROUTED.model_copy(update={"shared_ffn_hidden_size": 2 * ROUTED.ffn_hidden_size})
    shape = SHAPE.model_copy(update={"moe": shared})
    setup.check_experts(TrainOptions(load="m", n_shared_experts=2), shape)
    with pytest.raises(ConfigError, match="--n-shared-experts 1: this llama model has 2, which"):
        setup.check_experts(TrainOptions(load="m", n_shared_experts=1), shape)


@pytest.mark.parametrize(
    ("stage", "given", "expected"), [("sft", None, 0.1), ("sft", 0.3, 0.3), ("dpo", None, 0.0)]
)
def test_the_factor_of_multi_token_prediction(
    stage: str, given: float | None, expected: float
) -> None:
    shape = SHAPE.model_copy(update={"mtp_num_layers": 1})
    options = TrainOptions(load="m", stage=stage, mtp_loss_scaling_factor=given)
    setup.check_further_tokens(options, shape)
    config = make_config(options, shape, parallel_dims(options, shape))
    assert config.mtp_loss_scaling_factor == expected


@pytest.mark.parametrize(
    ("stage", "layers", "words"),
    [("sft", 0, "this llama model has no such layers"), ("dpo", 1, "--stage dpo keeps those")],
)
def test_a_factor_without_multi_token_prediction(stage: str, layers: int, words: str) -> None:
    shape = SHAPE.model_copy(update={"mtp_num_layers": layers})
    options = TrainOptions(load="m", stage=stage, mtp_loss_scaling_factor=0.0)
    with pytest.raises(ConfigError, match=f"--mtp-loss-scaling-factor 0: {words}"):
        setup.check_further_tokens(options, shape)


def test_flags_that_describe_the_model_leave_its_config_alone() -> None:
    """The frozen reward model of PPO may be another than the policy that they describe."""
    latent = SHAPE.model_copy(update={"mla": LATENT, "moe": ROUTED})
    given = {"q_lora_rank": 3, "moe_router_num_groups": 1, "moe_router_score_function": "sigmoid"}
    plain, described = TrainOptions(load="m"), TrainOptions(load="m", **given)
    for shape in (SHAPE, latent):
        dims = parallel_dims(plain, shape)
        config = make_config(plain, shape, dims)
        assert config.multi_latent_attention == (shape is latent)
        assert values(make_config(described, shape, dims)) == values(config)


def values(config: Any) -> dict[str, Any]:
    """Return what can be compared: functions that initialise weights are new ones each time."""
    return {name: value for name, value in vars(config).items() if not callable(value)}
