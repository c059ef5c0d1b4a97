"""Fine-tuning mixtures of experts: the steps and the reported load of one rank, in every layout."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_llm.checkpoint import ConvertOptions
from mindspeed_llm.checkpoint.conversion import convert
from tests.budget import steps
from tests.ranks import run_ranks
from tests.unit.mindspeed_llm.training.tiny_run import (
    make_mixtral,
    make_samples,
    settings,
    write_samples,
)

STEPS = steps(3, deep=20)
ASYNC = {"moe_permutation_async_comm": True}
ALL_GATHER = ASYNC | {"moe_token_dispatcher_type": "allgather"}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2}
# By number of ranks: what must not change the steps.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "recompute": (1, {"moe_adaptive_recompute_activation": True}),
    "allgather, TP2 EP2": (4, ALL_GATHER | TP2 | EP2),
    "EP4": (4, {"expert_model_parallel_size": 4}),
    "alltoall, TP-extend-EP": (4, ASYNC | TP2 | EP2 | {"moe_tp_extend_ep": True}),
    "TP2, whole experts": (4, TP2 | {"expert_tensor_parallel_size": 1}),
    "TP2 EP2, whole experts": (4, TP2 | EP2 | {"expert_tensor_parallel_size": 1}),
    "EP2, split experts": (4, EP2 | {"expert_tensor_parallel_size": 2}),
    "split experts": (4, {"expert_tensor_parallel_size": 2, "moe_grouped_gemm": True}),
    "alltoall, PP2 EP2": (4, ASYNC | EP2 | {"pipeline_model_parallel_size": 2}),
}
LAYOUTS: dict[int, dict[str, Any]] = {1: {}, 2: EP2}


def train_all(runs: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    from megatron.core import parallel_state

    from mindspeed_llm.tasks.posttrain.sft import SFTTrainer
    from mindspeed_llm.training.options import TrainOptions

    for values in runs.values():
        SFTTrainer(TrainOptions(**values)).train()
        parallel_state.destroy_model_parallel()
    return {
        name: [json.loads(line) for line in Path(values["log_file"]).read_text().splitlines()]
        for name, values in runs.items()
    }


def routers_stay(values: dict[str, Any]) -> bool:
    """Train with frozen routers; return whether nothing but the routers stayed."""
    from mindspeed_llm.tasks.posttrain.sft import SFTTrainer
    from mindspeed_llm.training.options import TrainOptions

    trainer = SFTTrainer(TrainOptions(**values, freeze_router=True))
    named = [pair for chunk in trainer.primary.chunks for pair in chunk.named_parameters()]
    before = {name: parameter.detach().clone() for name, parameter in named}
    trainer.train()
    stayed = {name for name, parameter in named if torch.equal(parameter, before[name])}
    return stayed == {name for name in before if ".router." in name} != set()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    folder = tmp_path_factory.mktemp("experts")
    make_mixtral(folder / "hf", router_aux_loss_coef=0.0)
    return folder, str(folder / "hf"), write_samples(folder / "data", make_samples(24))


def run_of(inputs: tuple[Path, str, str], name: str, **values: Any) -> dict[str, Any]:
    folder, model, data = inputs
    log = str(folder / f"{name}.jsonl")
    given = {"train_iters": STEPS, "global_batch_size": 4, "log_file": log} | values
    return settings(model, data, folder, **given)


def test_steps_and_loads_are_those_of_one_rank(inputs: tuple[Path, str, str]) -> None:
    logs = {}
    for world in (1, 4):
        chosen = {name: values for name, (ranks, values) in CASES.items() if ranks == world}
        runs = {name: run_of(inputs, name, **values) for name, values in chosen.items()}
        logs |= run_ranks(train_all, world, runs, timeout=300)[0]
    for name, lines in logs.items():
        steps, expected = ([x for x in y if "lm loss" in x] for y in (lines, logs["plain"]))
        assert len(steps) == STEPS
        for found, want in zip(steps, expected, strict=True):
            for key in ("lm loss", "grad norm"):
                assert found[key] == pytest.approx(want[key], rel=1e-6), (name, key)
        loads, expected = ([x for x in y if "moe load" in x] for y in (lines, logs["plain"]))
        assert len(loads) == STEPS and loads[0]["moe layers"] == [1, 2]
        # Samples are padded to other lengths where ranks share a sequence.
        if "TP" not in name:
            assert [x["moe load"] for x in loads] == [x["moe load"] for x in expected], name
        assert all(x["moe drop rate"] == 0 for x in loads)


def test_a_conversion_for_whole_experts_trains_with_split_ones(
    inputs: tuple[Path, str, str],
) -> None:
    folder, model, _ = inputs
    target = {"target_tensor_parallel_size": 2, "target_expert_parallel_size": 2}
    target |= {"expert_tensor_parallel_size": 1}
    convert(ConvertOptions(load_dir=model, save_dir=str(folder / "mg"), **target))
    split = {"expert_tensor_parallel_size": 2, "train_iters": 1}
    runs = {
        name: run_of(inputs, name, **split, load=load)
        for name, load in (("from hf", model), ("from mg", str(folder / "mg")))
    }
    logs = run_ranks(train_all, 2, runs, timeout=300)[0]
    assert logs["from mg"][0]["lm loss"] == logs["from hf"][0]["lm loss"]


def test_frozen_routers_stay(inputs: tuple[Path, str, str]) -> None:
    assert run_ranks(routers_stay, 1, run_of(inputs, "frozen")) == [True]


def test_a_run_resumes_with_and_without_expert_parallelism(inputs: tuple[Path, str, str]) -> None:
    folder = inputs[0]
    optimizers = {"plain": {}, "shared": {"use_distributed_optimizer": True}}

    def first(ranks: int, kind: str) -> dict[str, Any]:
        save = str(folder / f"first {ranks} {kind}")
        given = {"train_iters": 4, "save": save, "save_interval": 2, "load": inputs[1]}
        return run_of(inputs, f"{ranks} {kind}", **given, **LAYOUTS[ranks], **optimizers[kind])

    def resumed(ranks: int, kind: str) -> dict[str, Any]:
        """Continue at step 2 of the run of the other layout."""
        copy = folder / f"resumed {ranks} {kind}"
        shutil.copytree(folder / f"first {3 - ranks} {kind}", copy)
        (copy / "latest_checkpointed_iteration.txt").write_text("2")
        given = {"train_iters": 4, "save": str(copy), "load": str(copy)}
        return run_of(inputs, copy.name, **given, **LAYOUTS[ranks], **optimizers[kind])

    logs = run_ranks(train_all, 1, {f"1 {kind}": first(1, kind) for kind in optimizers})[0]
    runs = {f"2 {kind}": first(2, kind) for kind in optimizers}
    runs |= {f"resumed 2 {kind}": resumed(2, kind) for kind in optimizers}
    logs |= run_ranks(train_all, 2, runs, timeout=300)[0]
    runs = {f"resumed 1 {kind}": resumed(1, kind) for kind in optimizers}
    logs |= run_ranks(train_all, 1, runs)[0]
    for name, lines in logs.items():
        steps = [line for line in lines if "lm loss" in line]
        expected = [line for line in logs["1 plain"] if "lm loss" in line][-len(steps) :]
        assert len(steps) == (2 if "resumed" in name else 4), name
        for found, want in zip(steps, expected, strict=True):
            for key in ("lm loss", "grad norm"):
                assert found[key] == pytest.approx(want[key], rel=1e-6), (name, key)
