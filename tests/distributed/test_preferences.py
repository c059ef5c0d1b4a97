"""Stages on preferences: the numbers of TRL's trainers, in every layout."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_llm.checkpoint import ConvertOptions
from mindspeed_llm.checkpoint.conversion import convert
from tests.largest_tensor import LargestTensor
from tests.llm.preferences import (
    KTO_BATCH,
    VOCABULARY,
    Pair,
    make_pairs,
    make_steps,
    make_unpaired,
    save_llama,
    settings,
    write_pairs,
    write_steps,
    write_unpaired,
)
from tests.ranks import run_ranks
from tests.unit.mindspeed_llm.training.tiny_run import (
    OWN_REFERENCE,
    log_of_references,
    make_mixtral,
    read_losses,
    train,
)

TRL = json.loads((Path(__file__).parents[1] / "assets/trl_values.json").read_text())
STAGES: dict[str, dict[str, Any]] = {
    "dpo": {"stage": "dpo"},
    "dpo hinge": {"stage": "dpo", "dpo_loss_type": "hinge"},
    "dpo ipo": {"stage": "dpo", "dpo_loss_type": "ipo"},
    "dpo smoothed": {"stage": "dpo", "dpo_label_smoothing": 0.2},
    "dpo ftx": {"stage": "dpo", "pref_ftx": 0.5},
    "simpo": {"stage": "simpo"},
    "simpo smoothed": {"stage": "simpo", "simpo_label_smoothing": 0.2},
    "kto": {
        "stage": "kto",
        "kto_undesirable_weight": 1.5,
        "global_batch_size": KTO_BATCH,
        "micro_batch_size": 2,
    },
    "orm": {"stage": "orm"},
}
NAMES = {"loss": "lm loss", "grad_norm": "grad norm", "margin": "rewards/margins"}
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
VARIABLE = {"variable_seq_lengths": True}
SP = {"sequence_parallel": True}
FEW = {"train_iters": 4}
"""Steps of a layout: what ten would show, the optimizer's state included, shows in these."""


class _Tiny:
    def __init__(self, folder: Path) -> None:
        self.model = save_llama(folder / "hf")
        self.scorer = save_llama(folder / "score", "LlamaForSequenceClassification")
        self.pairs = write_pairs(folder / "pairs", make_pairs())
        self.unpaired = write_unpaired(folder / "unpaired", make_unpaired())

    def settings(self, name: str, folder: Path, **changes: Any) -> dict[str, Any]:
        """Return the options of a stage."""
        stage = STAGES[name]["stage"]
        model = self.scorer if stage == "orm" else self.model
        data = self.unpaired if stage == "kto" else self.pairs
        return settings(model, data, folder, **STAGES[name] | changes)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> _Tiny:
    return _Tiny(tmp_path_factory.mktemp("preferences"))


LN2 = float(np.float32(np.log(2)))


def check_steps(values: dict[str, Any], name: str, tolerance: float = 1e-5) -> None:
    lines = list(map(json.loads, Path(values["log_file"]).read_text().splitlines()))
    assert len(lines) == values["train_iters"]
    if name == "dpo":
        assert lines[0]["lm loss"] == LN2
    for key, expected in TRL[name]["steps"].items():
        found, expected = [line.get(NAMES.get(key, key)) for line in lines], expected[: len(lines)]
        if key == "rewards/accuracies" and name.startswith("dpo"):
            assert lines[0]["rewards/margins"] == 0.0, "policy and reference are the same"
            found, expected = found[1:], expected[1:]
        assert found == pytest.approx(expected, rel=tolerance, abs=tolerance), key


@pytest.mark.parametrize("name", STAGES)
def test_ten_steps_are_those_of_trl(tiny: _Tiny, tmp_path: Path, name: str) -> None:
    values = tiny.settings(name, tmp_path)
    run_ranks(train, 1, values)
    check_steps(values, name)


def test_gradients_are_those_of_trl(tiny: _Tiny, tmp_path: Path) -> None:
    """A step of SGD with rate 1 changes every weight by its gradient."""
    for name in ("dpo", "simpo", "kto", "orm"):
        saved = tmp_path / name / "saved"
        sgd = {"optimizer": "sgd", "sgd_momentum": 0.0, "lr": 1.0, "train_iters": 1}
        values = tiny.settings(name, tmp_path / name, save=str(saved), **TP2, **sgd)
        run_ranks(train, 2, values)
        before, after = load_weights(values["load"]), export_weights(saved)
        for weight, expected in TRL[name]["first gradients"].items():
            found = (before[weight] - after[weight]).flatten()[:4]
            assert torch.allclose(found, torch.tensor(expected), atol=1e-5), (name, weight)


def test_trained_weights_are_those_of_trl(tiny: _Tiny, tmp_path: Path) -> None:
    for name in ("dpo ftx", "orm"):
        saved = tmp_path / name / "saved"
        run_ranks(train, 2, tiny.settings(name, tmp_path / name, save=str(saved), **PP2))
        trained = export_weights(saved)
        for weight, expected in TRL[name]["trained weights"].items():
            found = trained[weight].flatten()[:4]
            assert torch.allclose(found, torch.tensor(expected), atol=1e-4), (name, weight)


def export_weights(saved: Path) -> dict[str, torch.Tensor]:
    """Export a checkpoint, and return the weights as transformers reads them."""
    target = saved.with_name("exported")
    options = {"load_model_type": "mg", "save_model_type": "hf", "load_dir": str(saved)}
    convert(ConvertOptions(**options, save_dir=str(target)))
    return load_weights(str(target))


def load_weights(folder: str) -> dict[str, torch.Tensor]:
    import transformers

    (kind,) = json.loads((Path(folder) / "config.json").read_text())["architectures"]
    model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32)
    return {name: weight.detach() for name, weight in model.named_parameters()}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "concatenated, without logits": (
        1,
        {"micro_batch_size": 2, "linear_cross_entropy": True, **VARIABLE},
    ),
    "local spec, padded to the longest": (1, {"transformer_impl": "local", **VARIABLE}),
    "dp 2, distributed optimizer, overlaps": (
        2,
        {
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
    ),
    "tp 2, padded vocabulary": (2, TP2 | {"linear_cross_entropy": True}),
    "pp 2, concatenated": (2, PP2 | VARIABLE),
    "cp 2": (2, CP2),
    "cp 2 tp 2 sp, concatenated": (4, CP2 | TP2 | VARIABLE | {"sequence_parallel": True}),
    "vpp 2": (2, PP2 | {"num_layers_per_virtual_pipeline_stage": 1}),
    "pp 2, whole prompts": (2, PP2 | {"no_share_prompts": True}),
    "tp 2 pp 2 sp, concatenated, recompute": (
        4,
        TP2
        | PP2
        | VARIABLE
        | {
            "sequence_parallel": True,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_has_the_numbers_of_trl(tiny: _Tiny, tmp_path: Path, name: str) -> None:
    world, layout = LAYOUTS[name]
    values = tiny.settings("dpo", tmp_path, **layout | FEW)
    run_ranks(train, world, values)
    check_steps(values, "dpo")


OTHERS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "kto, tp 2, concatenated": ("kto", 2, TP2 | VARIABLE),
    # Undesirable completions, and so margins, are in steps 5 to 7.
    "kto, dp 2": ("kto", 2, {"micro_batch_size": 1, "train_iters": 7}),
    "kto, pp 2": ("kto", 2, PP2),
    "orm, tp 2 pp 2 sp": ("orm", 4, TP2 | PP2 | SP),
    "simpo, cp 2, concatenated": ("simpo", 2, CP2 | VARIABLE | {"micro_batch_size": 2}),
    "kto, cp 2, concatenated": ("kto", 2, CP2 | VARIABLE),
    "orm, cp 2": ("orm", 2, CP2),
    "orm, cp 2, concatenated": ("orm", 2, CP2 | VARIABLE | {"micro_batch_size": 2}),
    "orm, concatenated": ("orm", 1, {"micro_batch_size": 2, **VARIABLE}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_stages_have_the_numbers_of_trl(tiny: _Tiny, tmp_path: Path, name: str) -> None:
    stage, world, layout = OTHERS[name]
    values = tiny.settings(stage, tmp_path, **FEW | layout)
    run_ranks(train, world, values)
    check_steps(values, stage)


def largest_tensors(runs: list[dict[str, Any]]) -> list[int]:
    """Train several runs, and return the size of the largest tensor of each."""
    from megatron.core import parallel_state

    from mindspeed_llm.tasks.posttrain.dpo import DPOTrainer
    from mindspeed_llm.training.options import TrainOptions

    found = []
    for values in runs:
        trainer = DPOTrainer(TrainOptions(**values))
        with LargestTensor() as watch:
            trainer.train()
        found.append(watch.nbytes)
        parallel_state.destroy_model_parallel()
    return found


def test_packed_pairs_have_no_mask_of_all_pairs_of_tokens(tiny: _Tiny, tmp_path: Path) -> None:
    """What a step of policy and reference holds grows with the pairs, and not with their square."""
    runs = []
    for layout in (VARIABLE, {}):
        for length in (256, 512):
            pairs = [Pair([1] * length, [2] * 8, [3] * 8)]
            data = write_pairs(tmp_path / f"{len(runs)}", pairs)
            more = {"data_path": (data,), "max_position_embeddings": 4096, "train_iters": 1}
            runs.append(tiny.settings("dpo", tmp_path, **more | layout | {"global_batch_size": 1}))
    (found,) = run_ranks(largest_tensors, 1, runs)
    for short, long in (found[:2], found[2:]):
        assert long < 2.3 * short


@pytest.mark.parametrize(
    ("world", "layout"), [(2, PP2 | VARIABLE), (2, {"micro_batch_size": 1}), (2, CP2)]
)
def test_precomputed_log_probs_are_those_of_the_reference(
    tiny: _Tiny, tmp_path: Path, world: int, layout: dict[str, Any]
) -> None:
    """Computed by the first run, read by the second, which has no reference."""
    known = {"precompute_ref_log_probs": True, "cache_dir": str(tmp_path / "cache")}
    written = set()
    for folder in ("computed", "read"):
        values = tiny.settings("dpo", tmp_path / folder, **layout | known | FEW)
        log = tmp_path / f"{folder}.txt"
        held = run_ranks(train_with_log, world, values, str(log))[0]
        check_steps(values, "dpo")
        assert held == ["policy"]
        is_announced = "computes the log-probabilities of 20 pairs" in log.read_text()
        assert is_announced == (folder == "computed")
        (table,) = (tmp_path / "cache/reference").iterdir()
        written.add(table.stat().st_mtime_ns)
    assert len(written) == 1


def train_with_log(values: dict[str, Any], file: str) -> list[str]:
    """Do that with a file for log messages."""
    logging.basicConfig(filename=file, level=logging.INFO, force=True)
    return train_and_list_models(values)


def train_and_list_models(values: dict[str, Any]) -> list[str]:
    """Train as one rank, and return the models that are left."""
    from mindspeed_llm.tasks.posttrain.dpo import DPOTrainer
    from mindspeed_llm.training.options import TrainOptions

    trainer = DPOTrainer(TrainOptions(**values))
    trainer.train()
    return list(trainer.training.models)


LORA = {"lora_r": 4, "lora_alpha": 8}


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (1, {"transformer_impl": "local"}),
        (2, TP2 | SP | VARIABLE),
        (2, PP2 | {"precompute_ref_log_probs": True}),
    ],
)
def test_the_base_of_adapters_is_the_reference(
    tiny: _Tiny, tmp_path: Path, world: int, layout: dict[str, Any]
) -> None:
    """As with the base as a second model, and without holding one."""
    runs = []
    for folder, reference in (("own", None), ("second", tiny.model)):
        more = LORA | layout | FEW | {"cache_dir": str(tmp_path), "ref_model": reference}
        values = tiny.settings("dpo", tmp_path / folder, **more)
        held = run_ranks(train_and_list_models, world, values)[0]
        runs.append([json.loads(x) for x in Path(values["log_file"]).read_text().splitlines()])
        is_second = reference is not None and "precompute_ref_log_probs" not in layout
        assert held == ["policy", "reference"][: 1 + is_second]
    for name in ("lm loss", "rewards/margins", "grad norm"):
        one, other = ([line[name] for line in lines] for lines in runs)
        assert one == pytest.approx(other, abs=1e-6)
    assert runs[0][0]["lm loss"] == pytest.approx(0.693147, abs=1e-6) != runs[0][-1]["lm loss"]


def test_the_start_says_what_the_reference_is(tiny: _Tiny, tmp_path: Path) -> None:
    own, loaded = OWN_REFERENCE, f"reference: weights from {tiny.model}"
    apart = {"no_overlap_reference": True}
    in_vain = "reference: --no-overlap-reference has no effect, as"
    cases = [
        ("dpo", LORA, [own]),
        ("kto", LORA, [own]),
        ("dpo", LORA | {"ref_model": tiny.model}, [loaded]),
        ("dpo", {}, [loaded]),
        ("kto", LORA | apart, [own, f"{in_vain} it shares its weights with the policy"]),
        ("dpo", apart, [loaded, f"{in_vain} kernels of this device do not overlap"]),
    ]
    runs = [tiny.settings(stage, tmp_path, **changes) for stage, changes, _ in cases]
    assert run_ranks(log_of_references, 1, runs) == [[said for _, _, said in cases]]


def list_models_of_each(runs: list[dict[str, Any]]) -> list[list[str]]:
    """Train several runs as one rank, and return the models that each has."""
    from megatron.core import parallel_state

    held = []
    for values in runs:
        held.append(train_and_list_models(values))
        parallel_state.destroy_model_parallel()
    return held


def test_trained_routers_are_no_reference(tiny: _Tiny, tmp_path: Path) -> None:
    """They are not adapters: without these the policy still has them."""
    model = make_mixtral(tmp_path / "experts")
    changes = LORA | {"lora_target_modules": ("linear_proj",), "lora_train_router": True} | FEW
    runs = []
    for reference in (None, model):
        values = tiny.settings("dpo", tmp_path, **changes | {"load": model, "ref_model": reference})
        runs.append(values | {"log_file": str(tmp_path / f"{len(runs)}.jsonl")})
    assert run_ranks(list_models_of_each, 1, runs) == [[["policy", "reference"]] * 2]
    one, other = (read_losses(values["log_file"]) for values in runs)
    assert one == other and one[0] == pytest.approx(LN2, abs=1e-6) != one[-1]


def train_each(runs: list[dict[str, Any]]) -> None:
    """Train several runs, one after the other, as one rank of each."""
    from megatron.core import parallel_state

    for values in runs:
        train(values)
        parallel_state.destroy_model_parallel()


def test_experts_on_ranks_of_their_own_give_the_numbers_of_one_rank(
    tiny: _Tiny, tmp_path: Path
) -> None:
    """Expert parallelism, with the reference's and the mismatched passes of a step."""
    model = make_mixtral(tmp_path / "experts", vocab_size=VOCABULARY)
    steps = write_steps(tmp_path / "steps", make_steps(8))
    more = FEW | {"moe_grouped_gemm": True, "moe_load_interval": 0}
    data = {"kto": tiny.unpaired, "prm": steps}
    runs: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
    for world, found in runs.items():
        for stage in ("dpo", "simpo", "kto", "orm", "prm"):
            log = str(tmp_path / f"{stage}-{world}.jsonl")
            values = settings(model, data.get(stage, tiny.pairs), tmp_path, stage=stage, **more)
            values |= {"global_batch_size": KTO_BATCH} if stage == "kto" else {}
            found.append(values | {"log_file": log, "expert_model_parallel_size": world})
        run_ranks(train_each, world, found)
    for one, other in zip(*runs.values()):
        lines = [list(map(json.loads, Path(v["log_file"]).open())) for v in (one, other)]
        for key in ("lm loss", "grad norm"):
            alone, shared = ([line[key] for line in each] for each in lines)
            assert shared == pytest.approx(alone, rel=1e-5), (one["stage"], key)
            assert len(set(alone)) == FEW["train_iters"]
