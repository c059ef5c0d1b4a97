"""Images and videos of files in sharded training, with real processors and a real decoder."""

from pathlib import Path

import pytest

from mindspeed.config import build
from mindspeed_mm.data import DataConfig
from tests.mm import runs, videos
from tests.ranks import run_ranks

pytestmark = videos.needs_packages()

STEPS = 6
PARTS = ["model.language_model.layers.{*}", "model.visual.blocks.{*}"]


def train(folder: str, name: str) -> None:
    from mindspeed_mm.training.transformers_task import callbacks

    model = str(Path(folder) / name)
    param = {
        "basic_parameters": {"dataset": f"{model}/rows.json"},
        "preprocess_parameters": {"model_name_or_path": model},
    }
    data = {"dataset_param": param, "dataloader_param": {"shuffle": False, "num_workers": 1}}
    flags = runs.options(Path(folder) / f"{name}-saved", train_iters=STEPS)
    sharded = {"sharding_size": "auto", "sub_modules_to_wrap": PARTS}
    run = runs.make_run(flags, sharded, {"init_from_hf_path": model})
    run.mm.data = build(DataConfig, data)
    runs.train_once(run, callbacks())


@pytest.mark.parametrize("name", videos.QWEN)
def test_training_equals_a_loop_of_transformers(tmp_path: Path, name: str) -> None:
    import transformers

    folder = tmp_path / name
    videos.write(folder, name)
    run_ranks(train, 2, str(tmp_path), name, timeout=240)
    plain = transformers.AutoModelForImageTextToText.from_pretrained(folder).train()
    expected = runs.plain_loop(
        plain, videos.ByHand(folder, name), lambda model, batch: model(**batch).loss, STEPS
    )
    found = runs.outcome(tmp_path / f"{name}-saved")
    assert found.losses == pytest.approx(expected.losses, abs=1e-5)
    assert found.norms == pytest.approx(expected.norms, rel=1e-4)
    for key, value in expected.weights.items():
        assert (found.weights[f"model.{key}"] - value).abs().max() < 1e-5, key
