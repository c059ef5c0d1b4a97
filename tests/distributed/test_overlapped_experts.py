"""--overlap-moe-expert-parallel-comm: two micro-batches in turns take the steps of each alone."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.llm import tiny
from tests.ranks import run_ranks
from tests.unit.mindspeed_llm.checkpoint.test_round_trip import mtp_model
from tests.unit.mindspeed_llm.training.tiny_run import (
    make_mixtral,
    make_samples,
    settings,
    write_samples,
)

STEPS, BATCHES = 2, 4
SWITCH = {"overlap_moe_expert_parallel_comm": True}
DELAYED = SWITCH | {"delay_wgrad_compute": True}
SHARED = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}
INTERLEAVED = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}
# By name: ranks, the model, and what both runs have in common.
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "EP2": (2, "mixtral", {}),
    "packed": (2, "mixtral", {"neat_pack": True}),
    "linear loss": (2, "mixtral", {"linear_cross_entropy": True, "moe_fused_experts": True}),
    "distributed optimizer": (2, "mixtral", SHARED),
    "shared experts": (2, "deepseek3", {}),
    "one expert a rank": (4, "mixtral", {"expert_model_parallel_size": 4}),
    "interleaved": (4, "mixtral", INTERLEAVED),
    "multi-token prediction": (4, "mtp", INTERLEAVED),
    "TP2": (4, "mixtral", {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "CP2": (4, "mixtral", {"context_parallel_size": 2}),
}


def train_all(runs: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Train each; return how many micro-batches were planned, and had a loss without logits."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel

    from mindspeed.ops.linear_cross_entropy.megatron import PendingLogits
    from mindspeed_llm.tasks.posttrain.sft import SFTTrainer
    from mindspeed_llm.training.options import TrainOptions

    counts = []
    plan, loss = counted(GPTModel, "build_schedule_plan"), counted(PendingLogits, "loss")
    with plan as plans, loss as losses:
        for values in runs:
            plans.clear()
            losses.clear()
            SFTTrainer(TrainOptions(**values)).train()
            parallel_state.destroy_model_parallel()
            counts.append((len(plans), len(losses)))
    return counts


@contextmanager
def counted(owner: type, name: str) -> Iterator[list[None]]:
    """Append to a list at each call of a method."""
    calls: list[None] = []
    original = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return original(self, *args, **kwargs)

    setattr(owner, name, method)
    yield calls
    setattr(owner, name, original)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("overlapped")
    make_mixtral(folder / "mixtral", num_hidden_layers=4)
    mtp_model(tiny.save("deepseek3", folder), folder / "mtp")
    samples = make_samples(48)
    write_samples(folder / "data", samples)
    write_samples(folder / "packed", samples, [[n, n + 1] for n in range(0, 48, 2)])
    return folder


def runs_of(inputs: Path, name: str) -> list[dict[str, Any]]:
    _, model, values = CASES[name]
    data = str(inputs / ("packed" if "neat_pack" in values else "data"))
    common = {"expert_model_parallel_size": 2, "bf16": True, "train_iters": STEPS}
    common |= {"global_batch_size": 2 * BATCHES, "micro_batch_size": 1} | values
    logs = [str(inputs / f"{name} {number}.jsonl") for number in range(3)]
    return [
        settings(str(inputs / model), data, inputs, **common | how, log_file=log)
        for log, how in zip(logs, ({}, SWITCH, DELAYED), strict=True)
    ]


@pytest.mark.parametrize("world", [2, 4])
def test_steps_are_those_of_one_micro_batch_after_the_other(inputs: Path, world: int) -> None:
    chosen = [name for name, (ranks, *_) in CASES.items() if ranks == world]
    runs = [run for name in chosen for run in runs_of(inputs, name)]
    counts = run_ranks(train_all, world, runs, timeout=600)[0]
    logs = [
        [json.loads(line) for line in Path(run["log_file"]).read_text().splitlines()]
        for run in runs
    ]
    keys = ("lm loss", "grad norm")
    steps = [[tuple(x[k] for k in keys) for x in log if "lm loss" in x] for log in logs]
    for number, name in enumerate(chosen):
        plain, *turns = steps[3 * number : 3 * number + 3]
        assert len(plain) == STEPS
        assert turns == [plain, plain], name
        plans, losses = zip(*counts[3 * number : 3 * number + 3])
        assert plans[0] == 0 and min(plans[1:]) >= STEPS * BATCHES // 2, name
        assert len(set(losses)) == 1 and bool(losses[0]) == (name == "linear loss"), name
