"""A stage of two models, defined here: a policy that is kept near a frozen reference."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.unit.mindspeed_llm.training.tiny_run import (
    make_model,
    make_samples,
    read_checkpoint,
    settings,
    write_samples,
)

SAMPLES = make_samples(4)
METRICS = ("lm loss", "kl", "largest kl", "trained tokens")


def make_trainer(values: dict[str, Any], *, saved: bool) -> Any:
    """Return the trainer of the stage: next-token loss plus KL(policy || reference)."""
    from mindspeed.training.metrics import Metric
    from mindspeed_llm.tasks.posttrain.sft import SFTTrainer
    from mindspeed_llm.training.model import ModelRole
    from mindspeed_llm.training.options import TrainOptions

    class DistillTrainer(SFTTrainer):
        models = (ModelRole("policy"), ModelRole("reference", trainable=False, saved=saved))
        metrics = (
            Metric("lm loss", "micro_batch_mean"),
            Metric("kl"),
            Metric("largest kl", "max"),
            Metric("trained tokens", "sum"),
        )

        def forward_step(self, data_iterator: Any, model: Any) -> Any:
            batch = self.get_batch(data_iterator)
            inputs = (batch["tokens"], batch["position_ids"], None)
            with torch.no_grad():
                (reference,) = self.model("reference").wrapped
                expected = reference(*inputs)
            return model(*inputs), partial(self.loss_func, batch | {"reference": expected})

        def loss_func(self, batch: Any, output_tensor: torch.Tensor) -> Any:
            policy = output_tensor.float().log_softmax(-1)
            reference = batch["reference"].float().log_softmax(-1)
            mask = batch["loss_mask"].float()
            loss = -policy.gather(-1, batch["labels"].unsqueeze(-1)).squeeze(-1) * mask
            kl = (policy.exp() * (policy - reference)).sum(-1) * mask
            count = mask.sum()
            report = {
                "lm loss": torch.stack([loss.detach().sum(), count]),
                "kl": torch.stack([kl.detach().sum(), count]),
                "largest kl": kl.detach().max(),
                "trained tokens": count,
                "tokens": batch["real_tokens"],
            }
            return loss.sum() + 2.0 * kl.sum(), count.to(torch.int32), report

    return DistillTrainer(TrainOptions(**values))


def distill(values: dict[str, Any], saved: bool) -> dict[str, Any]:
    """Train as one rank; return whether the reference changed and what is trained."""
    trainer = make_trainer(values, saved=saved)
    (reference,) = trainer.model("reference").chunks
    before = {n: p.clone() for n, p in reference.named_parameters()}
    trainer.train()
    return {
        "unchanged": all(torch.equal(p, before[n]) for n, p in reference.named_parameters()),
        "frozen": not any(p.requires_grad for p in reference.parameters()),
        "optimizers": [m.role.name for m in trainer.training.models.values() if m.optimizer],
    }


def _lines(values: dict[str, Any]) -> list[dict[str, float]]:
    lines = map(json.loads, Path(values["log_file"]).read_text().splitlines())
    return [{name: line[name] for name in (*METRICS, "grad norm")} for line in lines]


@pytest.mark.parametrize(
    ("world", "saved", "flags"),
    [(1, False, {"bf16": True}), (2, True, {"use_distributed_optimizer": True})],
)
def test_it_trains_saves_and_resumes_bit_exactly(
    tmp_path: Path, world: int, saved: bool, flags: dict[str, Any]
) -> None:
    model, data = make_model(tmp_path / "hf"), write_samples(tmp_path / "data", SAMPLES)
    runs = {}
    for name in ("whole", "resumed"):
        (tmp_path / name).mkdir()
        saves = {"save": str(tmp_path / name / "saved"), "save_interval": 3, **flags}
        runs[name] = settings(model, data, tmp_path / name, train_iters=6, **saves)
    (found, *_) = run_ranks(distill, world, runs["whole"], saved)
    assert found == {"unchanged": True, "frozen": True, "optimizers": ["policy"]}
    run_ranks(distill, world, runs["resumed"] | {"train_iters": 3}, saved)
    run_ranks(distill, world, runs["resumed"], saved)

    whole, resumed = _lines(runs["whole"]), _lines(runs["resumed"])
    assert len(whole) == 6 and resumed == whole
    # Both start from the same weights; with and without gradients, kernels may round otherwise.
    assert abs(whole[0]["kl"]) < abs(whole[0]["largest kl"]) + 1e-9 < 1e-6
    assert all(line["largest kl"] > line["kl"] > 1e-6 for line in whole[1:])
    assert whole[-1]["lm loss"] < whole[0]["lm loss"]
    trained = sum(len(ids) - max(len(ids) // 3, 1) for ids, _ in SAMPLES)
    assert whole[0]["trained tokens"] == trained
    one, other = (read_checkpoint(Path(run["save"])) for run in runs.values())
    assert one.keys() == other.keys()
    assert all(torch.equal(values, other[name]) for name, values in one.items())
    assert any(name.startswith("reference.") for name in one) == saved
