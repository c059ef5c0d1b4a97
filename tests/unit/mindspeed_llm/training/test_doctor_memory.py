"""What `mindspeed doctor --memory` knows of runs of this suite is what they do."""

from pathlib import Path

import pytest

import mindspeed.megatron_adaptor  # noqa: F401
from mindspeed.config import ConfigError
from mindspeed.doctor.memory import examine
from mindspeed.training.stages import OPTIONS, STAGES
from mindspeed.tune.memory_model import GIB
from mindspeed.tune.run_sizes import RunSizes
from mindspeed_llm.models.config import ModelConfig, MoEConfig
from mindspeed_llm.models.weight_table import TPSplit
from mindspeed_llm.tasks.posttrain.launcher import TRAINERS, get_trainer
from mindspeed_llm.tasks.posttrain.pairwise import PairwiseTrainer
from mindspeed_llm.tasks.posttrain.reference import ReferenceTrainer
from mindspeed_llm.tasks.posttrain.sampling import SamplingTrainer
from mindspeed_llm.training.expert_checks import check_experts
from mindspeed_llm.training.lora_plan import adaptable_weights, projections
from mindspeed_llm.training.options import TrainOptions, check
from mindspeed_llm.training.preference_options import PREFERENCE_SECTIONS
from mindspeed_llm.training.rollout_options import ROLLOUT_SECTIONS

DENSE = ModelConfig(
    family="llama",
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=8,
    vocab_size=128,
    max_position_embeddings=64,
)
EXPERTS = DENSE.model_copy(
    update={
        "family": "mixtral",
        "moe": MoEConfig(num_experts=4, topk=2, ffn_hidden_size=16, is_moe_layer=(True, True)),
    }
)
FLAGS = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --vocab-size 128 "
    "--group-query-attention --num-query-groups 2 --swiglu --seq-length 64"
).split()


@pytest.mark.parametrize("shape", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("tp", [1, 2])
def test_adapters_are_those_that_a_run_makes(shape: ModelConfig, tp: int) -> None:
    expected = 0
    for weight in adaptable_weights(shape):
        for rows, columns in projections(weight).values():
            is_row = weight.split is TPSplit.COLUMNS
            expected += 8 * (rows + columns // tp if is_row else rows // tp + columns)
    moe = shape.moe
    sizes = RunSizes(
        **shape.model_dump(include={"num_layers", "hidden_size", "ffn_hidden_size", "kv_channels"}),
        num_attention_heads=4,
        num_query_groups=2,
        group_query_attention=True,
        swiglu=True,
        num_experts=moe.num_experts if moe else None,
        moe_ffn_hidden_size=moe.ffn_hidden_size if moe else None,
        tensor_model_parallel_size=tp,
    )
    assert sizes.adapter_parameters(8) == expected


def test_stages_are_those_of_the_trainers() -> None:
    assert list(STAGES) == list(TRAINERS)
    for name, trainer in TRAINERS.items():
        stage, samples = STAGES[name], issubclass(trainer, SamplingTrainer)
        assert bool(stage.uncounted) == samples
        assert (stage.sequences == 2) == issubclass(trainer, PairwiseTrainer)
        assert (stage.has_reference or samples) == issubclass(trainer, ReferenceTrainer)


@pytest.mark.parametrize("flag", ["moe_grouped_gemm", "moe_shared_expert_overlap", "freeze_router"])
def test_the_error_for_a_dense_model_is_that_of_the_run(flag: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_experts(TrainOptions(load="m", **{flag: True}), DENSE)
    with pytest.raises(ConfigError) as examined:
        examine([*FLAGS, f"--{flag.replace('_', '-')}"], GIB)
    assert str(examined.value) == str(refused.value)


def test_the_error_for_an_unknown_stage_is_that_of_the_run() -> None:
    with pytest.raises(ConfigError) as refused:
        get_trainer("dop", TrainOptions(load="m"))
    with pytest.raises(ConfigError) as examined:
        examine([*FLAGS, "--stage", "dop"], GIB)
    assert str(examined.value) == str(refused.value)


@pytest.mark.parametrize(("name", "meant"), [("ppo", "trl_ppo"), ("RM", "orm"), ("dapo", "grpo")])
def test_stages_of_other_trainers_have_names_here(name: str, meant: str) -> None:
    """Their letters are nearer to dpo and prm."""
    with pytest.raises(ConfigError, match=f"--stage {name} is not known; did you mean {meant}"):
        get_trainer(name, TrainOptions(load="m"))


def test_options_of_stages_are_those_of_the_sections() -> None:
    sections = [*PREFERENCE_SECTIONS, *ROLLOUT_SECTIONS]
    fields = {n: f.default for one in sections for n, f in one.model_fields.items()}
    listed = [name for defaults in OPTIONS.values() for name in defaults]
    assert sorted(listed) == sorted(fields)
    assert {n: d for defaults in OPTIONS.values() for n, d in defaults.items()} == fields
    assert all(set(stages) <= set(STAGES) for stages in OPTIONS)


@pytest.mark.parametrize(
    ("stage", "name", "value"),
    [
        ("orm", "dpo_beta", 0.2),
        ("kto", "pref_ftx", 0.5),
        ("simpo", "ref_model", "m"),
        ("sft", "reward_fn", "rewards.py:score"),
        ("prm", "no_share_prompts", True),
        ("trl_ppo", "num_generations", 4),
    ],
)
def test_the_error_for_an_option_of_another_stage_is_that_of_the_run(
    tmp_path: Path, stage: str, name: str, value: object
) -> None:
    run = {"load": "m", "data_path": ("d",), "train_iters": 1, "lr": 1e-5, "stage": stage}
    with pytest.raises(ConfigError, match=f"not {stage}: drop it") as refused:
        check(TrainOptions(**run, **{name: value}))
    flag = f"--{name.replace('_', '-')}"
    given = [flag] if value is True else [flag, str(value)]
    with pytest.raises(ConfigError) as examined:
        examine([*FLAGS, "--stage", stage, *given], GIB)
    assert str(examined.value) == str(refused.value)
    file = tmp_path / "run.yaml"
    file.write_text(f"stage: {stage}\n{name}: {str(value).lower() if value is True else value}\n")
    with pytest.raises(ConfigError) as examined:
        examine([str(file), *FLAGS], GIB)
    assert str(examined.value) == str(refused.value)


def test_options_of_the_stage_and_defaults_of_others_are_no_error(tmp_path: Path) -> None:
    """The config.yaml of a run has the defaults of all stages."""
    file = tmp_path / "config.yaml"
    defaults = {n: d for each in OPTIONS.values() for n, d in each.items() if d is not None}
    file.write_text("".join(f"{name}: {value}\n" for name, value in defaults.items()))
    for stage in STAGES:
        examine([str(file), *FLAGS, "--stage", stage], GIB)
    examine([*FLAGS, "--stage", "grpo", "--num-generations", "4"], GIB)
    with pytest.raises(ConfigError, match="--dpo-betta is not known: did you mean --dpo-beta"):
        examine([*FLAGS, "--stage", "dpo", "--dpo-betta", "0.2"], GIB)
