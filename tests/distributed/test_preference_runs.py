"""Runs on preferences: resume, process rewards, new value heads, and what is refused."""

import contextlib
import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mindspeed.launch.functions import call
from tests.llm.preferences import (
    KTO_BATCH,
    SIZES,
    VERDICTS,
    VOCABULARY,
    make_pairs,
    make_steps,
    make_unpaired,
    save_llama,
    settings,
    write_columns,
    write_pairs,
    write_steps,
    write_unpaired,
)
from tests.ranks import RankFailed, run_ranks
from tests.unit.mindspeed_llm.training.tiny_run import read_checkpoint, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    save_llama(root / "hf")
    write_pairs(root / "pairs", make_pairs())
    write_unpaired(root / "unpaired", make_unpaired())
    return root


def read_lines(values: dict[str, Any]) -> list[dict[str, float]]:
    lines = map(json.loads, Path(values["log_file"]).read_text().splitlines())
    return [{k: v for k, v in line.items() if "time" not in k and "/s" not in k} for line in lines]


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (1, {"stage": "dpo", "bf16": True}),
        (2, {"stage": "orm", "use_distributed_optimizer": True}),
        (1, {"stage": "kto", "lora_r": 4, "global_batch_size": KTO_BATCH}),
    ],
    ids=["dpo", "orm", "kto"],
)
def test_a_resumed_run_is_bit_exact(
    folder: Path, tmp_path: Path, world: int, flags: dict[str, Any]
) -> None:
    data = str(folder / ("unpaired" if flags["stage"] == "kto" else "pairs"))
    runs = {}
    for name in ("whole", "resumed"):
        more = flags | {"save": str(tmp_path / name / "saved"), "save_interval": 3}
        runs[name] = settings(
            str(folder / "hf"), data, tmp_path / name, **more | {"train_iters": 6}
        )
    run_ranks(train, world, runs["whole"])
    run_ranks(train, world, runs["resumed"] | {"train_iters": 3})
    run_ranks(train, world, runs["resumed"])
    assert read_lines(runs["whole"]) == read_lines(runs["resumed"])
    one, other = (read_checkpoint(Path(run["save"])) for run in runs.values())
    assert one.keys() == other.keys() and not any(name.startswith("reference") for name in one)
    assert all(torch.equal(values, other[name]) for name, values in one.items())


def train_and_count_warnings(values: dict[str, Any]) -> int:
    """Train as one rank and return how often padding was warned of."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mindspeed_llm").addHandler(handler)
    train(values)
    return sum("of a packed batch are padding" in line for line in found)


def test_padding_is_warned_of_once_however_often_a_run_evaluates(
    folder: Path, tmp_path: Path
) -> None:
    more = {"train_iters": 3, "eval_interval": 1, "eval_iters": 1, "split": "80,20,0"}
    more |= {"stage": "dpo", "pad_to_multiple_of": 64}
    values = settings(str(folder / "hf"), str(folder / "pairs"), tmp_path, **more)
    assert run_ranks(train_and_count_warnings, 1, values) == [1]


def plain_prm(model: str, solutions: list[tuple[list[int], list[int]]], steps: int) -> list[float]:
    """Train with transformers and torch only; return the losses."""
    from transformers import LlamaForCausalLM

    llama = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    for start in range(0, 2 * steps, 2):
        total = 0.0
        for ids, labels in solutions[start : start + 2]:
            places = [i for i, label in enumerate(labels) if label != -100]
            logits = llama(torch.tensor([ids])).logits[0, places][:, sorted(VERDICTS)]
            targets = torch.tensor([sorted(VERDICTS).index(labels[i]) for i in places])
            loss = F.cross_entropy(logits, targets) / 2
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (1, {"variable_seq_lengths": True}),
        (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        (2, {"context_parallel_size": 2, "variable_seq_lengths": True}),
    ],
)
def test_process_rewards_are_those_of_a_plain_loop(
    folder: Path, tmp_path: Path, world: int, layout: dict[str, Any]
) -> None:
    solutions = make_steps(20)
    data = write_steps(tmp_path / "steps", solutions)
    values = settings(str(folder / "hf"), data, tmp_path, stage="prm", **layout)
    run_ranks(train, world, values)
    expected = plain_prm(str(folder / "hf"), solutions, 10)
    lines = read_lines(values)
    assert [line["lm loss"] for line in lines] == pytest.approx(expected, abs=1e-5)
    assert 0 <= min(line["accuracy"] for line in lines) < max(line["accuracy"] for line in lines)


def test_packed_solutions_are_as_separate_ones(folder: Path, tmp_path: Path) -> None:
    """Two of a row neither see each other nor share positions."""
    solutions = make_steps(6)
    pairs = list(zip(solutions[::2], solutions[1::2]))
    rows = {
        "input_ids": [[*one[0], *two[0]] for one, two in pairs],
        "attention_mask": [[1] * len(one[0]) + [2] * len(two[0]) for one, two in pairs],
        "labels": [[*one[1], *two[1]] for one, two in pairs],
    }
    longest = max(map(len, rows["input_ids"]))
    filling = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    columns = {
        key: [[*row, *[filling[key]] * (longest - len(row))] for row in found]
        for key, found in rows.items()
    }
    runs = []
    for name, data, size in (
        ("packed", write_columns(tmp_path / "packed", columns), 1),
        ("separate", write_steps(tmp_path / "separate", solutions), 2),
    ):
        more = {"stage": "prm", "micro_batch_size": size, "global_batch_size": size}
        runs.append(
            settings(str(folder / "hf"), data, tmp_path / name, **more | {"train_iters": 3})
        )
        run_ranks(train, 1, runs[-1])
    one, other = ([line["lm loss"] for line in read_lines(values)] for values in runs)
    assert one == pytest.approx(other, abs=1e-6)


def test_a_new_value_head_is_the_same_in_every_layout_and_exported(
    folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    from mindspeed_llm.checkpoint import ConvertOptions
    from mindspeed_llm.checkpoint.conversion import convert

    runs = []
    for name, layout in (("one", {}), ("two", {"pipeline_model_parallel_size": 2})):
        more = {"stage": "orm", "save": str(tmp_path / name / "saved"), "train_iters": 3}
        data = str(folder / "pairs")
        values = settings(str(folder / "hf"), data, tmp_path / name, **more, **layout)
        run_ranks(train, 2 if layout else 1, values)
        runs.append([line["lm loss"] for line in read_lines(values)])
    assert runs[0] == pytest.approx(runs[1], abs=1e-5)
    options = {"load_model_type": "mg", "save_model_type": "hf", "load_dir": more["save"]}
    convert(ConvertOptions(**options, save_dir=str(tmp_path / "exported")))
    scorer = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported")
    assert scorer.config.num_labels == 1 and scorer.score.weight.shape == (1, SIZES["hidden_size"])
    # What was trained is the start of a second run, which goes on from it.
    more = {"stage": "orm", "train_iters": 1, "no_shuffle": True}
    scores = []
    loads = [str(tmp_path / "exported"), str(tmp_path / "two/saved")]
    for load in loads:
        values = settings(load, str(folder / "pairs"), tmp_path, finetune=True, **more)
        run_ranks(train, 1, values)
        scores.append(read_lines(values)[0]["rewards/chosen"])
    with torch.no_grad():
        chosen = [torch.tensor([pair.prompt + pair.chosen]) for pair in make_pairs()[:2]]
        expected = sum(scorer(ids).logits.item() for ids in chosen) / 2
    assert scores == pytest.approx([expected] * 2, abs=1e-5)
    for load, command in zip(loads, (["generate", "--prompt", "1"], ["chat"])):
        ((code, printed),) = call(run_command, 1, [*command, "--load", load], timeout=300)
        (line,) = printed.splitlines()
        assert code == 2 and f"error: --load {load}: is a reward model, which has no" in line
        assert f"posttrain_gpt.py with --reward-model {load}" in line


def run_command(arguments: list[str]) -> tuple[int, str]:
    """Run a command; return its exit code and what it prints as errors."""
    from mindspeed_llm.cli.main import main

    with io.StringIO() as printed, contextlib.redirect_stderr(printed):
        return main(arguments), printed.getvalue()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "other data": (
        {"stage": "dpo", "data_path": ("unpaired",)},
        "chosen_input_ids_document.idx is missing: --stage dpo needs it; .* holds labelled "
        "completions, not pairs: preprocess with another --handler-name, or give another --stage",
    ),
    "records of another kind": (
        {"stage": "kto", "data_path": ("raw.jsonl",), "handler_name": "AlpacaStylePairwiseHandler"},
        "AlpacaStylePairwiseHandler: makes data of another kind than --stage kto trains on: give "
        "AlpacaStyleKTOHandler or OpenAIKTOHandler or SharegptStyleKTOHandler",
    ),
    "a reference of another shape": (
        {"stage": "dpo", "ref_model": "small"},
        "its num_layers is 2, the policy's 4: the reference must be of the same shape",
    ),
    "a reference with other positions": (
        {"stage": "dpo", "ref_model": "rotary"},
        "its rotary.base is 500.0, the policy's 10000.0: the reference must be of the same shape",
    ),
    "one sample a step": (
        {"stage": "kto", "data_path": ("unpaired",), "global_batch_size": 1},
        "--global-batch-size 1: KTO pairs each prompt",
    ),
    "a reward model as a policy": (
        {"stage": "dpo", "load": "score"},
        "is a reward model, which has no output layer: load a language model",
    ),
    "another reference than the run had": (
        {"stage": "dpo", "ref_model": "other", "save": "saved", "train_iters": 2},
        "saved holds a run with another reference than --ref-model .*other: give the one",
    ),
    "the reference with merged adapters": (
        {"stage": "dpo", "ref_model": "merged", "save": "saved", "train_iters": 2},
        "saved holds a run with another reference than --ref-model .*merged: give the one",
    ),
    "another stage than the run had": (
        {"stage": "simpo", "save": "saved", "train_iters": 2},
        "saved: holds a run of --stage dpo, not simpo: to start from its weights give it as",
    ),
    "packed pairs": (
        {"stage": "dpo", "neat_pack": True},
        "--neat-pack: --stage dpo has no packed rows: give --variable-seq-lengths",
    ),
    "no reference": (
        {"stage": "dpo", "ref_model": "nowhere"},
        "--ref-model .*nowhere: does not exist",
    ),
    "the trained policy as its own reference": (
        {"stage": "dpo", "load": "saved"},
        "--ref-model is missing: --load .*saved is a run to resume",
    ),
}


def test_what_cannot_work_is_refused(folder: Path, tmp_path: Path) -> None:
    import transformers

    small = transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 2})
    transformers.LlamaForCausalLM(small).save_pretrained(folder / "small")
    save_llama(folder / "score", "LlamaForSequenceClassification")
    save_llama(folder / "other", seed=1)
    merged = transformers.LlamaForCausalLM.from_pretrained(folder / "hf")
    merged.model.layers[1].self_attn.q_proj.weight.data += 0.01
    merged.save_pretrained(folder / "merged")
    (folder / "raw.jsonl").write_text("{}\n")
    merged.config.rope_parameters["rope_theta"] = 500.0
    merged.save_pretrained(folder / "rotary")
    model, data = str(folder / "hf"), str(folder / "pairs")
    saved = {"stage": "dpo", "train_iters": 1, "save": str(folder / "saved")}
    run_ranks(train, 1, settings(model, data, tmp_path, **saved))
    assert VOCABULARY == SIZES["vocab_size"]
    for name, (changes, message) in WRONG.items():
        paths = {
            key: tuple(str(folder / v) for v in value)
            if isinstance(value, tuple)
            else str(folder / value)
            for key, value in changes.items()
            if key in ("data_path", "ref_model", "load", "save")
        }
        with pytest.raises(RankFailed, match=message):
            run_ranks(train, 1, settings(model, data, tmp_path, **changes | paths))
            raise AssertionError(name)
