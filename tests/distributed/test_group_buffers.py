"""The buffers that are planned for communicators against the messages that real runs send."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.test_llm_context_parallel import write_documents
from tests.ranks import run_ranks
from tests.unit.mindspeed_llm.training.tiny_run import make_mixtral, make_model, settings

TP2 = {"tensor_model_parallel_size": 2}
SP2 = TP2 | {"sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
BF16 = {"bf16": True}
SEQUENCE, BATCH = 32, 2
FACTOR = 2.0
"""Half of the experts on each of two ranks: no rank can get more than twice its balanced share."""


def cp(algo: str) -> dict[str, Any]:
    return {"context_parallel_size": 2, "context_parallel_algo": f"{algo}_cp_algo"}


def ep(dispatcher: str) -> dict[str, Any]:
    chosen = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": dispatcher}
    return chosen | {"hccl_ep_group_buffer_adaptive_factor": FACTOR}


# By number of ranks: model, layout, and the groups whose largest message is the planned one.
CASES: dict[str, tuple[int, str, dict[str, Any], tuple[str, ...]]] = {
    "tp": (2, "dense", TP2 | BF16, ("tp",)),
    "tp, sequence parallel": (2, "dense", SP2 | BF16, ("tp",)),
    "pp": (2, "dense", PP2 | BF16, ("pp",)),
    "ring": (2, "dense", cp("megatron") | BF16, ("cp",)),
    "ulysses": (2, "dense", cp("ulysses"), ("cp",)),
    "all-gather": (2, "dense", cp("kvallgather") | BF16, ("cp",)),
    "allgather dispatcher": (2, "experts", ep("allgather"), ("tp_ep_mp",)),
    "alltoall": (2, "experts", ep("alltoall"), ("ep",)),
    "tp, pp": (4, "dense", SP2 | PP2 | BF16, ("tp", "pp")),
    "tp, ring, float32": (4, "dense", SP2 | cp("megatron"), ("tp", "cp")),
    "alltoall, tp": (4, "experts", SP2 | ep("alltoall"), ("tp", "ep", "ep_tp")),
}


class Recorder(TorchDispatchMode):
    """The largest message of each process group, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            groups = [g for a in args if (g := _group(a)) is not None]
            size = max(map(_bytes, args))
            for name in groups:
                self.largest[name] = max(size, self.largest.get(name, 0))
        return func(*args, **(kwargs or {}))


def _group(argument: Any) -> str | None:
    is_group = isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type())
    return torch.distributed.ProcessGroup.unbox(argument).group_name if is_group else None


def _bytes(argument: Any) -> int:
    """Return the bytes of a tensor, or of all tensors of a list: one message in parts."""
    if isinstance(argument, torch.Tensor):
        return argument.nbytes
    return sum(map(_bytes, argument)) if isinstance(argument, (list, tuple)) else 0


def record_all(runs: dict[str, dict[str, Any]]) -> dict[str, tuple[dict[str, int], ...]]:
    """Train; return what was planned and what was sent, in bytes by group."""
    from megatron.core import parallel_state as state

    from mindspeed.features.activation import current
    from mindspeed.features.comm.group_buffers import messages_of
    from mindspeed_llm.tasks.pretrain import PretrainTrainer
    from mindspeed_llm.training.options import TrainOptions

    found = {}
    for name, values in runs.items():
        trainer = PretrainTrainer(TrainOptions(**values))
        groups = {
            "tp": state.get_tensor_model_parallel_group(),
            "pp": state.get_pipeline_model_parallel_group(),
            "cp": state.get_context_parallel_group(),
            "ep": state.get_expert_model_parallel_group(),
            "ep_tp": state.get_expert_tensor_parallel_group(),
            "tp_ep_mp": state.get_expert_tensor_and_model_parallel_group(),
        }
        with Recorder() as recorder:
            trainer.train()
        sent = {key: recorder.largest.get(group.group_name, 0) for key, group in groups.items()}
        messages = messages_of(current().options, current().context)
        found[name] = messages.largest(), sent
        state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Every case on all its ranks; a world is started once."""
    folder: Path = tmp_path_factory.mktemp("buffers")
    models = {"dense": make_model(folder / "hf"), "experts": make_mixtral(folder / "experts")}
    data, by_name = write_documents(folder), {}
    common = {"hccl_group_buffer_adaptive": True, "seq_length": SEQUENCE, "train_iters": 1}
    common |= {"micro_batch_size": BATCH, "global_batch_size": 2 * BATCH}
    for world in (2, 4):
        runs = {
            name: settings(models[model], data, folder, **common | layout)
            for name, (ranks, model, layout, _) in CASES.items()
            if ranks == world
        }
        ranks = run_ranks(record_all, world, runs, timeout=300)
        by_name |= {name: [rank[name] for rank in ranks] for name in runs}
    return by_name


@pytest.mark.parametrize("name", CASES)
def test_largest_messages_are_the_planned_ones(found: dict[str, list[Any]], name: str) -> None:
    for group in CASES[name][3]:
        planned = {plan[group] for plan, _ in found[name]}
        sent = max(messages[group] for _, messages in found[name])
        print(f"{name}, {group}: planned {planned}, sent {sent} bytes")
        assert len(planned) == 1
        if group in ("ep", "ep_tp"):  # what the busiest rank got depends on the router
            assert max(planned) / FACTOR <= sent <= max(planned)
        else:
            assert planned == {sent}
