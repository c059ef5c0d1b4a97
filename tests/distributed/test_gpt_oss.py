"""gpt-oss: fine-tuned as transformers and torch train it, in every layout."""

import json
from pathlib import Path
from typing import Any

import pytest

from mindspeed.compat import megatron
from mindspeed.config import ConfigError
from mindspeed_llm.models.registry import read_model_config
from mindspeed_llm.training.expert_checks import check_experts
from mindspeed_llm.training.options import TrainOptions
from tests.llm import tiny
from tests.llm.generation import request, several
from tests.ranks import RankFailed, run_ranks
from tests.unit.mindspeed_llm.training.tiny_run import (
    make_samples,
    plain_loop,
    read_losses,
    settings,
    train,
    write_samples,
)

STEPS, SAMPLES = 3, 24
GROUPED = {"moe_grouped_gemm": True}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "grouped": (1, GROUPED),
    "TP2 EP2": (4, GROUPED | TP2 | EP2 | {"expert_tensor_parallel_size": 1}),
    "TP-extend-EP": (4, TP2 | EP2 | {"moe_tp_extend_ep": True}),
    "PP2 EP2": (4, GROUPED | EP2 | {"pipeline_model_parallel_size": 2}),
}

pytestmark = pytest.mark.skipif(
    str(megatron.version()) < "0.16", reason="this megatron-core has no attention sinks"
)


def train_all(runs: dict[str, dict[str, Any]]) -> None:
    for values in runs.values():
        train(values)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny.save("gpt_oss", tmp_path_factory.mktemp("gpt_oss"))
    config = json.loads((path / "config.json").read_text()) | {"router_aux_loss_coef": 0.0}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_steps_are_those_of_transformers(model: Path, tmp_path: Path) -> None:
    samples = make_samples(SAMPLES)
    data = write_samples(tmp_path / "data", samples)
    losses, trained = plain_loop(str(model), samples, STEPS, 4)
    assert losses[0] - losses[-1] > 0.01, "the loss did not fall, so nothing was compared"
    for world in (1, 4):
        runs = {}
        for name, (ranks, changes) in CASES.items():
            if ranks == world:
                (tmp_path / name).mkdir()
                given = {"train_iters": STEPS, "save": str(tmp_path / name / "saved")} | changes
                runs[name] = settings(str(model), data, tmp_path / name, **given)
        run_ranks(train_all, world, runs, timeout=300)
    norms = {}
    for name in CASES:
        log = str(tmp_path / name / "log.jsonl")
        assert read_losses(log) == pytest.approx(losses, abs=2e-5), name
        norms[name] = read_losses(log, "grad norm")
        assert norms[name] == pytest.approx(norms["one rank"], rel=1e-5), name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"variable_seq_lengths": True}, "--variable-seq-lengths: attention with sinks needs"),
        ({"context_parallel_size": 2}, "--context-parallel-size 2: attention with sinks needs"),
    ],
)
def test_what_sinks_rule_out(model: Path, tmp_path: Path, changes: dict, words: str) -> None:
    data = write_samples(tmp_path / "data", make_samples(4))
    values = settings(str(model), data, tmp_path, **changes)
    with pytest.raises(RankFailed, match=words):
        run_ranks(train, changes.get("context_parallel_size", 1), values)


def test_it_is_not_sampled(model: Path) -> None:
    with pytest.raises(RankFailed, match="tokens are not sampled from a model with attention"):
        run_ranks(several, 1, [{"source": str(model), "requests": [request()]}])


def test_experts_with_biases_stay_whole(model: Path) -> None:
    shape = read_model_config(model)
    with pytest.raises(ConfigError, match="cannot be split over 2 ranks: add --expert-tensor"):
        check_experts(TrainOptions(**TP2), shape)
    with pytest.raises(ConfigError, match="need --transformer-impl transformer_engine"):
        check_experts(TrainOptions(transformer_impl="local"), shape)
    check_experts(TrainOptions(**TP2, expert_tensor_parallel_size=1), shape)
