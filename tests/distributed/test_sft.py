"""Fine-tuning: the same losses as a plain loop of transformers and torch, in every layout."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import RankFailed, run_ranks
from tests.unit.mindspeed_llm.training.tiny_run import (
    make_model,
    make_samples,
    plain_loop,
    settings,
    train,
    write_samples,
)

STEPS, BATCH = 20, 4
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "local spec": (1, {"transformer_impl": "local"}),
    "fixed length": (1, {"seq_length": 40}),
    "variable length": (1, {"variable_seq_lengths": True}),
    "dp 2": (2, {}),
    "dp 2, distributed optimizer, overlaps": (
        2,
        {
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
    ),
    "tp 2": (2, {"tensor_model_parallel_size": 2}),
    "pp 2": (2, {"pipeline_model_parallel_size": 2}),
    "pp 2, variable length": (
        2,
        {"pipeline_model_parallel_size": 2, "variable_seq_lengths": True},
    ),
    "vpp 2": (
        2,
        {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
    ),
    "tp 2 pp 2 sp, recompute": (
        4,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "sequence_parallel": True,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    ),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> "_Tiny":
    return _Tiny(tmp_path_factory.mktemp("sft"))


class _Tiny:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.samples = make_samples(30)
        self.model = make_model(folder / "hf")
        self.data = write_samples(folder / "data", self.samples)
        self.losses, self.trained = plain_loop(self.model, self.samples, STEPS, BATCH)


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_are_those_of_a_plain_loop(tiny: _Tiny, tmp_path: Path, name: str) -> None:
    world, layout = LAYOUTS[name]
    values = settings(tiny.model, tiny.data, tmp_path, **layout)
    losses = run_ranks(train, world, values)[0]
    assert losses == pytest.approx(tiny.losses, abs=1e-5)
    assert losses[0] - losses[-1] > 0.05, "the loss did not fall, so nothing was compared"


def test_weights_are_those_of_a_plain_loop(tiny: _Tiny, tmp_path: Path) -> None:
    """Exported from a checkpoint of two tensor-parallel ranks."""
    from transformers import LlamaForCausalLM

    from mindspeed_llm.checkpoint import ConvertOptions
    from mindspeed_llm.checkpoint.conversion import convert

    saved = str(tmp_path / "saved")
    values = settings(tiny.model, tiny.data, tmp_path, tensor_model_parallel_size=2, save=saved)
    run_ranks(train, 2, values)
    convert(
        ConvertOptions(
            load_model_type="mg",
            save_model_type="hf",
            load_dir=saved,
            save_dir=str(tmp_path / "exported"),
        )
    )
    exported = LlamaForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    expected = dict(tiny.trained.named_parameters())
    for name, parameter in exported.named_parameters():
        assert torch.allclose(parameter, expected[name], atol=1e-4), name


@pytest.mark.parametrize("layout", [{}, {"pipeline_model_parallel_size": 2}], ids=["dp", "pp"])
def test_packed_samples_are_as_separate_ones(
    tiny: _Tiny, tmp_path: Path, layout: dict[str, Any]
) -> None:
    """A step on 2 rows of 4 samples each is a step on these 8 samples, token for token."""
    rows = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    packed = write_samples(tmp_path / "packed", tiny.samples, rows)
    separate = write_samples(tmp_path / "separate", tiny.samples[:16])
    losses = []
    for number, (data, batch, size) in enumerate([(packed, 2, 2), (separate, 8, 1)]):
        values = settings(
            tiny.model,
            data,
            tmp_path,
            train_iters=4,
            global_batch_size=batch,
            micro_batch_size=size,
            calculate_per_token_loss=True,
            log_file=str(tmp_path / f"{number}.jsonl"),
            **layout,
        )
        losses.append(run_ranks(train, 2 if layout else 1, values)[0])
    assert losses[0] == pytest.approx(losses[1], abs=2e-6)


def test_steps_that_are_not_numbers_change_nothing_and_end_the_run(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = make_model(tmp_path / "hf")
    weights = load_file(tmp_path / "hf/model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, tmp_path / "hf/model.safetensors", {"format": "pt"})
    data = write_samples(tmp_path / "data", make_samples(8))
    values = settings(model, data, tmp_path, max_nan_iterations=3, save=str(tmp_path / "saved"))
    with pytest.raises(RankFailed, match="in 3 steps up to iteration 3: .*none was saved before"):
        run_ranks(train, 1, values)
    assert not list((tmp_path / "saved").glob("iter_*"))
