"""What cannot work is an error before anything is loaded: weights, sizes, parallel sizes."""

from pathlib import Path
from typing import Any

import pytest

import mindspeed.megatron_adaptor  # noqa: F401
from mindspeed.config import ConfigError
from mindspeed_llm.training import setup
from mindspeed_llm.training.model import make_config
from mindspeed_llm.training.model_shape import find_shape
from mindspeed_llm.training.options import TrainOptions
from mindspeed_llm.training.setup import parallel_dims
from tests.unit.mindspeed_llm.training.shapes import DENSE, EXPERTS, LATENT, ROUTED


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
        parallel_dims(TrainOptions(**changes), DENSE)


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
    monkeypatch.setattr(setup, "find_shape", lambda options: (DENSE, None))
    options = TrainOptions(load=str(tmp_path), **changes)
    with pytest.raises(ConfigError, match=words) as caught:
        setup.prepare(options, splits_sequences=options.stage == "sft")
    assert "\n" not in str(caught.value)


def test_what_megatron_refuses_is_one_line() -> None:
    options = TrainOptions(recompute_granularity="full")
    dims = parallel_dims(TrainOptions(), DENSE)
    with pytest.raises(ConfigError, match="Megatron refuses these options: .*recompute_method"):
        make_config(options, DENSE, dims)


def test_groups_of_recomputed_layers_fill_a_stage() -> None:
    """Megatron ends in an IndexError."""
    dims = parallel_dims(TrainOptions(), DENSE)
    values = {"recompute_granularity": "full", "recompute_method": "uniform"}
    assert make_config(TrainOptions(**values, recompute_num_layers=2), DENSE, dims)
    with pytest.raises(ConfigError, match="--recompute-num-layers 3 does not divide the 4 layers"):
        make_config(TrainOptions(**values, recompute_num_layers=3), DENSE, dims)


def test_fused_paths_of_layers_are_on_unless_switched_off() -> None:
    dims = parallel_dims(TrainOptions(), DENSE)
    config = make_config(TrainOptions(), DENSE, dims)
    assert config.bias_activation_fusion and config.bias_dropout_fusion
    unfused = TrainOptions(no_bias_swiglu_fusion=True, no_bias_dropout_fusion=True)
    config = make_config(unfused, DENSE, dims)
    assert not config.bias_activation_fusion and not config.bias_dropout_fusion


def test_an_empty_load_is_an_error_unless_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no weights: looked for"):
        find_shape(TrainOptions(load=str(tmp_path)))
    with pytest.raises(ConfigError, match="there is no config.json"):
        find_shape(TrainOptions(load=str(tmp_path), from_scratch=True))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds no weights: .*; --from-scratch trains random"):
        find_shape(TrainOptions(load=str(tmp_path)))


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_a_single_expert_has_its_score_as_its_weight(score_function: str) -> None:
    def config_of(topk: int, is_normalized: bool) -> Any:
        changes = {"topk": topk, "normalize_topk": is_normalized, "expert_bias": False}
        moe = ROUTED.model_copy(update=changes | {"score_function": score_function})
        shape = DENSE.model_copy(update={"moe": moe})
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
    shape = DENSE.model_copy(update={"moe": routed})
    options = TrainOptions(load="m", **given)
    config = make_config(options, shape, parallel_dims(options, shape))
    assert config.moe_aux_loss_coeff == expected
    assert config.moe_router_load_balancing_type == ("aux_loss" if expected else "none")


@pytest.mark.parametrize(("stage", "factor"), [("sft", 0.1), ("dpo", 0.0), ("grpo", 0.0)])
def test_multi_token_prediction_is_no_part_of_other_losses(stage: str, factor: float) -> None:
    options = TrainOptions(load="m", stage=stage)
    config = make_config(options, EXPERTS, parallel_dims(options, EXPERTS))
    assert config.mtp_loss_scaling_factor == factor


def test_a_reward_model_with_experts_has_grouped_ones_beside_a_dense_policy() -> None:
    options = TrainOptions(load="m")
    assert make_config(options, EXPERTS, parallel_dims(options, DENSE)).moe_grouped_gemm


@pytest.mark.parametrize(
    ("stage", "given", "expected"), [("sft", None, 0.1), ("sft", 0.3, 0.3), ("dpo", None, 0.0)]
)
def test_the_factor_of_multi_token_prediction(
    stage: str, given: float | None, expected: float
) -> None:
    shape = DENSE.model_copy(update={"mtp_num_layers": 1})
    options = TrainOptions(load="m", stage=stage, mtp_loss_scaling_factor=given)
    setup.check_further_tokens(options, shape)
    config = make_config(options, shape, parallel_dims(options, shape))
    assert config.mtp_loss_scaling_factor == expected


@pytest.mark.parametrize(
    ("stage", "layers", "words"),
    [("sft", 0, "this llama model has no such layers"), ("dpo", 1, "--stage dpo keeps those")],
)
def test_a_factor_without_multi_token_prediction(stage: str, layers: int, words: str) -> None:
    shape = DENSE.model_copy(update={"mtp_num_layers": layers})
    options = TrainOptions(load="m", stage=stage, mtp_loss_scaling_factor=0.0)
    with pytest.raises(ConfigError, match=f"--mtp-loss-scaling-factor 0: {words}"):
        setup.check_further_tokens(options, shape)


def test_flags_that_describe_the_model_leave_its_config_alone() -> None:
    """The frozen reward model of PPO may be another than the policy that they describe."""
    latent = DENSE.model_copy(update={"mla": LATENT, "moe": ROUTED})
    given = {"q_lora_rank": 3, "moe_router_num_groups": 1, "moe_router_score_function": "sigmoid"}
    plain, described = TrainOptions(load="m"), TrainOptions(load="m", **given)
    for shape in (DENSE, latent):
        dims = parallel_dims(plain, shape)
        config = make_config(plain, shape, dims)
        assert config.multi_latent_attention == (shape is latent)
        assert values(make_config(described, shape, dims)) == values(config)


def values(config: Any) -> dict[str, Any]:
    """Return what can be compared: functions that initialise weights are new ones each time."""
    return {name: value for name, value in vars(config).items() if not callable(value)}
