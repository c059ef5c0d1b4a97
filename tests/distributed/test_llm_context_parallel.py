"""Training on sequences that are split over ranks: the numbers of one rank, in every layout."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_llm.data.indexed import TokenWriter
from tests.largest_tensor import LargestTensor
from tests.ranks import run_ranks
from tests.unit.mindspeed_llm.training.tiny_run import (
    VOCABULARY,
    make_mixtral,
    make_model,
    make_samples,
    settings,
    write_samples,
)

STEPS = 3
ROWS = [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9, 10], [11, 12], [13, 14, 15], [16, 17], [18], [19, 20]]
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = PP2 | {"num_layers_per_virtual_pipeline_stage": 1}
PER_TOKEN = {"calculate_per_token_loss": True}
SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
LORA = {"lora_r": 2, "lora_alpha": 4}
EVALUATE = {"split": "60,40,0", "eval_interval": 2, "eval_iters": 1}
RESET = {"reset_attention_mask": True}


def cp(size: int, algo: str, **more: Any) -> dict[str, Any]:
    """Return the options of one algorithm."""
    return {"context_parallel_size": size, "context_parallel_algo": f"{algo}_cp_algo"} | more


ZIGZAG = cp(2, "megatron", cp_document_layout="zigzag")
# By number of ranks: the data, what changes the numbers, what must not.
CASES: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "ring, tokens": (2, "samples", PER_TOKEN, cp(2, "megatron")),
    "ulysses, variable, evaluation": (
        2,
        "samples",
        EVALUATE | {"variable_seq_lengths": True},
        cp(2, "ulysses"),
    ),
    "all-gather, packed, LoRA": (2, "packed", LORA, cp(2, "kvallgather")),
    "ring, documents, tokens": (2, "documents", RESET | PER_TOKEN, cp(2, "megatron")),
    "ring, experts": (2, "experts", {}, cp(2, "megatron")),
    "experts, tp, tokens": (2, "experts", PER_TOKEN, TP2),
    "hybrid, packed, sharded": (
        4,
        "packed",
        {},
        cp(4, "hybrid", ulysses_degree_in_cp=2) | SHARDED,
    ),
    "double ring": (4, "samples", {}, cp(4, "megatron", cp_window_size=2)),
    "ring, packed, tp, recompute": (4, "packed", {}, cp(2, "megatron") | TP2 | RECOMPUTE),
    "all-gather, tp": (4, "samples", {}, cp(2, "kvallgather") | TP2),
    "ulysses, variable, pp": (
        4,
        "samples",
        {"variable_seq_lengths": True},
        cp(2, "ulysses") | PP2,
    ),
    "zigzag, packed, vpp, tokens": (4, "packed", PER_TOKEN, ZIGZAG | VPP2),
    "ring, dp": (4, "samples", {}, cp(2, "megatron") | SHARDED),
    "ulysses, documents, pp": (4, "documents", RESET, cp(2, "ulysses") | PP2),
    "experts, ep, tokens": (
        4,
        "experts",
        PER_TOKEN,
        cp(2, "ulysses", expert_model_parallel_size=2),
    ),
}


def train_all(runs: list[tuple[str, dict[str, Any]]]) -> list[list[dict[str, float]]]:
    """Train one run after the other on these ranks; return the log lines of each."""
    from megatron.core import parallel_state

    from mindspeed_llm.tasks.posttrain.sft import SFTTrainer
    from mindspeed_llm.tasks.pretrain import PretrainTrainer
    from mindspeed_llm.training.options import TrainOptions

    for task, values in runs:
        trainer = {"pretrain": PretrainTrainer, "sft": SFTTrainer}[task](TrainOptions(**values))
        trainer.train()
        parallel_state.destroy_model_parallel()
    logs = [Path(values["log_file"]).read_text().splitlines() for _, values in runs]
    return [[json.loads(line) for line in lines] for lines in logs]


class _Tiny:
    """The models, the data, and runs on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        dense, experts = (
            make_model(folder / "hf"),
            make_mixtral(folder / "experts", router_aux_loss_coef=0.05),
        )
        samples = make_samples(24)
        separate = write_samples(folder / "data", samples)
        self.inputs = {
            "samples": ("sft", dense, separate, {}),
            "packed": ("sft", dense, write_samples(folder / "packed", samples, ROWS), {}),
            "experts": ("sft", experts, separate, {}),
            "documents": ("pretrain", dense, write_documents(folder), {"seq_length": 33}),
        }

    def run(self, data: str, name: str, **values: Any) -> tuple[str, dict[str, Any]]:
        task, model, prefix, needed = self.inputs[data]
        log = str(self.folder / f"{name}.jsonl")
        given = {"train_iters": STEPS, "global_batch_size": 2, "log_file": log} | needed | values
        return task, settings(model, prefix, self.folder, **given)


def write_documents(folder: Path) -> str:
    """Write documents of 1 to 40 tokens as preprocess does."""
    generator = np.random.default_rng(1)
    lengths = np.concatenate([[1, 40, 2], generator.integers(1, 40, 60)])
    writer = TokenWriter(folder, "text", np.dtype("<u2"))
    writer.append(generator.integers(0, VOCABULARY, lengths.sum()), lengths)
    writer.build_index(folder / "books_text_document.idx")
    (folder / "text.bin").rename(folder / "books_text_document.bin")
    return str(folder / "books")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> _Tiny:
    return _Tiny(tmp_path_factory.mktemp("cp"))


@pytest.fixture(scope="module")
def logs(tiny: _Tiny) -> dict[str, Any]:
    """Every case on its ranks and on one rank; a world is started once."""
    runs = {}
    for world in (1, 2, 4):
        names = [name for name, case in CASES.items() if world in (1, case[0])]
        todo = []
        for name in names:
            _, data, values, layout = CASES[name]
            both = values if world == 1 else values | layout
            todo.append(tiny.run(data, f"{name} {world}", **both))
        found = run_ranks(train_all, world, todo, timeout=300)[0]
        runs |= {(name, world): log for name, log in zip(names, found)}
    return runs


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_one_rank(logs: dict[str, Any], name: str) -> None:
    found, expected = logs[name, CASES[name][0]], logs[name, 1]
    keys = ["lm loss", "grad norm", *["validation lm loss"] * ("evaluation" in name)]
    for key in keys:
        values = [[line[key] for line in log if key in line] for log in (found, expected)]
        assert values[0] == pytest.approx(values[1], rel=1e-6, abs=1e-6) and values[0], key
    steps = [[_tokens(line) for line in log if "lm loss" in line] for log in (found, expected)]
    assert steps[0] == steps[1] and len(steps[0]) == STEPS


def _tokens(line: dict[str, float]) -> int:
    """Return the tokens of a step, which are not padding."""
    return round(line["tokens/s"] * line["elapsed time per iteration (ms)"] / 1000)


def test_runs_resume_with_another_number_of_ranks_a_sequence(tiny: _Tiny, tmp_path: Path) -> None:
    """Two ranks a sequence, then one, then two: the steps of a run that never stopped."""
    saved = {"save": str(tmp_path / "saved"), "use_distributed_optimizer": True}
    whole = tiny.run("packed", "whole", train_iters=6)
    expected = run_ranks(train_all, 1, [whole])[0][0]
    found: list[dict[str, float]] = []
    for steps, size in ((2, 2), (4, 1), (6, 2)):
        layout = {"context_parallel_size": size}
        run = tiny.run("packed", f"up to {steps}", train_iters=steps, **saved, **layout)
        found += run_ranks(train_all, size, [run])[0][0]
    assert [line["iteration"] for line in found] == list(range(1, 7))
    for one, other in zip(found, expected):
        assert one["lm loss"] == pytest.approx(other["lm loss"], rel=1e-6)
        assert one["grad norm"] == pytest.approx(other["grad norm"], rel=1e-5)


def logits_of_documents(run: tuple[str, dict[str, Any]], algos: list[dict[str, Any]]) -> list[Any]:
    """Return, for each algorithm, the losses of one batch, and of one with another document."""
    import torch
    from megatron.core import parallel_state

    from mindspeed_llm.tasks.posttrain.sft import SFTTrainer
    from mindspeed_llm.training.options import TrainOptions

    results = []
    for algo in algos:
        trainer = SFTTrainer(TrainOptions(**run[1] | algo))
        (model,) = trainer.primary.wrapped
        row = dict(trainer.train_data[0])
        losses = []
        for changed in (0, 1):
            ids = row["input_ids"].copy()
            ids[row["attention_mask"] == 2] += changed
            batch = trainer.collate([row | {"input_ids": ids % VOCABULARY}])
            share = trainer.context_split.split(batch)
            with torch.no_grad():
                losses.append(trainer.forward_step(iter([share]), model)[0])
        numbers = torch.from_numpy(row["attention_mask"].copy())[None]
        owners = trainer.context_split.source_rows(batch["cu_seqlens"].tolist())
        numbers = torch.where(owners < 0, 0, numbers[0, owners.clamp(min=0)])
        results.append((losses[0][0], losses[1][0], numbers))
        parallel_state.destroy_model_parallel()
    return results


def test_documents_of_a_pack_do_not_see_each_other(tiny: _Tiny) -> None:
    """Not a bit of the other documents changes, under every algorithm."""
    run = tiny.run("packed", "logits")
    algos = [cp(2, "megatron"), cp(2, "ulysses"), cp(2, "kvallgather"), ZIGZAG]
    cut = []
    for ranks in zip(*run_ranks(logits_of_documents, 2, run, algos), strict=True):
        for before, after, document in ranks:
            is_same = before == after
            assert is_same[document != 2].all() and not is_same[document == 2].any()
        held = [set(document.tolist()) - {0} for _, _, document in ranks]
        assert held[0] | held[1] == {1, 2, 3, 4}
        cut.append(len(held[0] & held[1]))
    assert max(cut[:3]) <= 2 and cut[3] == 4  # of four documents


def largest_tensors(run: tuple[str, dict[str, Any]], lengths: list[int]) -> list[int]:
    """Return the size of the largest tensor of a train step, for each sequence length."""
    from megatron.core import parallel_state

    from mindspeed_llm.tasks.pretrain import PretrainTrainer
    from mindspeed_llm.training.options import TrainOptions

    found = []
    for length in lengths:
        trainer = PretrainTrainer(TrainOptions(**run[1] | {"seq_length": length}))
        batch = trainer.context_split.split(trainer.collate([trainer.train_data[0]]))
        assert not [x for x in batch.values() if x.numel() > length]
        (model,) = trainer.primary.wrapped
        with LargestTensor() as watch:
            trainer.forward_step(iter([batch]), model)[0].sum().backward()
        found.append(watch.nbytes)
        parallel_state.destroy_model_parallel()
    return found


def test_no_mask_of_all_pairs_of_tokens_exists(tiny: _Tiny) -> None:
    """What a step holds grows with the sequence, and not with its square."""
    run = tiny.run("documents", "memory", max_position_embeddings=4096, **RESET)
    for layout in ({}, cp(2, "megatron")):
        one = run[0], run[1] | layout
        for short, long in run_ranks(largest_tensors, 2 if layout else 1, one, [320, 640]):
            assert long < 2.3 * short
