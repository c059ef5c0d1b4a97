"""Adapters: trained as peft trains them, exported for peft, merged, saved and gone on with."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_llm.checkpoint.adapters import read_peft
from mindspeed_llm.cli.main import main
from tests.llm import tiny
from tests.ranks import RankFailed, run_ranks
from tests.unit.mindspeed_llm.training.tiny_run import (
    CLIP,
    DECAY,
    RATE,
    make_samples,
    settings,
    train,
    write_samples,
)

STEPS, BATCH, RANK, ALPHA = 10, 4, 4, 8
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES: dict[str, tuple[str, list[str], int, dict[str, Any]]] = {
    "llama": ("llama", ALL, 1, {}),
    "qwen2": ("qwen2", ALL, 1, {"transformer_impl": "local"}),
    "llama tp 2": ("llama", ALL, 2, {"tensor_model_parallel_size": 2}),
    "qwen2 tp 2 sp, q and v": (
        "qwen2",
        ["q_proj", "v_proj"],
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    ),
    "qwen2 tp 2 sp": (
        "qwen2",
        ALL,
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "transformer_impl": "local"},
    ),
    "qwen2 tp 2 sp, almost no dropout": (
        "qwen2",
        ALL,
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "lora_dropout": 1e-12},
    ),
    "llama tp 2, almost no dropout": (
        "llama",
        ALL,
        2,
        {"tensor_model_parallel_size": 2, "lora_dropout": 1e-12},
    ),
    "tied pp 2, recompute": (
        "llama_tied",
        ALL,
        2,
        {
            "pipeline_model_parallel_size": 2,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    ),
    "dp 2, distributed optimizer, overlaps": (
        "llama",
        ALL,
        2,
        {
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
    ),
}


class _Peft:
    """A model with random adapters, and what ten steps of peft and torch make of them."""

    def __init__(self, folder: Path, name: str, modules: list[str]) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        self.base = str(tiny.save(name, folder))
        self.samples = make_samples(30)
        self.data = write_samples(folder / "data", self.samples)
        self.start = folder / "start"
        config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=modules, task_type="CAUSAL_LM")
        base = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32)
        torch.manual_seed(1)
        self.model = get_peft_model(base, config)
        for key, parameter in self.model.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(parameter.data, std=0.05)
        self.model.save_pretrained(self.start)
        self.losses = self._train()

    def _train(self) -> list[float]:
        self.model.train()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=DECAY)
        losses = []
        for step in range(STEPS):
            total = 0.0
            for place in range(step * BATCH, (step + 1) * BATCH):
                ids, labels = (torch.tensor(x)[None] for x in self.samples[place % 30])
                loss = self.model(input_ids=ids, labels=labels).loss / BATCH
                loss.backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(trained, CLIP)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
        self.model.eval()
        return losses

    def settings(self, folder: Path, **changes: Any) -> dict[str, Any]:
        values = settings(self.base, self.data, folder, train_iters=STEPS, lora_r=RANK)
        return values | {"lora_alpha": ALPHA, "save": str(folder / "saved")} | changes


_made: dict[tuple[str, ...], _Peft] = {}


def _peft(factory: pytest.TempPathFactory, name: str, modules: list[str]) -> _Peft:
    key = (name, *modules)
    if key not in _made:
        _made[key] = _Peft(factory.mktemp(name), name, modules)
    return _made[key]


@pytest.mark.parametrize("case", CASES)
def test_ten_steps_are_those_of_peft(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, case: str
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    name, modules, world, layout = CASES[case]
    peft = _peft(tmp_path_factory, name, modules)
    targets = {} if modules == ALL else {"lora_target_modules": tuple(modules)}
    values = peft.settings(tmp_path, lora_load=str(peft.start), **targets, **layout)
    losses = run_ranks(train, world, values)[0]
    assert losses == pytest.approx(peft.losses, abs=1e-5)
    assert losses[0] - losses[-1] > 0.01, "the loss did not fall, so nothing was compared"

    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    assert main(["export-lora", str(tmp_path / "saved"), str(adapter)]) == 0
    peft.model.save_pretrained(tmp_path / "expected")
    expected, found = read_peft(tmp_path / "expected"), read_peft(adapter)
    assert expected.keys() == found.keys()
    for key, factors in expected.items():
        for one, other in zip(factors, found[key]):
            assert torch.allclose(one, other, atol=1e-4), key

    if world == 1:
        base = AutoModelForCausalLM.from_pretrained(peft.base, dtype=torch.float32)
        with torch.no_grad():
            loaded = PeftModel.from_pretrained(base, adapter).eval()(tiny.TOKENS).logits
            assert torch.allclose(loaded, peft.model(tiny.TOKENS).logits, atol=1e-3)
        assert main(["export-lora", str(tmp_path / "saved"), str(merged), "--merge"]) == 0
        assert torch.allclose(tiny.logits(merged), loaded, atol=1e-4)
        for out, more in ((adapter, []), (merged, ["--merge"])):
            again = ["export-lora", str(tmp_path / "saved"), str(out), *more]
            assert main(again) == 2 and main([*again, "--overwrite"]) == 0
        assert not torch.allclose(tiny.logits(Path(peft.base)), loaded, atol=1e-2)


def test_a_run_resumes_in_another_layout_and_only_with_its_adapters(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    peft = _peft(tmp_path_factory, "llama", ALL)
    dropped: dict[str, Any] = {"lora_dropout": 0.1, "train_iters": 4, "save_interval": 2}
    values = peft.settings(tmp_path, **dropped)
    expected = run_ranks(train, 1, values)[0]
    (tmp_path / "saved/latest_checkpointed_iteration.txt").write_text("2")
    assert run_ranks(train, 1, values)[0] == expected, "resuming is not bit-exact"
    with pytest.raises(RankFailed, match="--lora-r 2: the checkpoint to resume from has 4"):
        run_ranks(train, 1, values | {"lora_r": 2})
    with pytest.raises(
        RankFailed, match="--lora-r is not given: the checkpoint to resume from has 4"
    ):
        run_ranks(train, 1, values | {"lora_r": None})

    other = peft.settings(tmp_path / "other", train_iters=4, save_interval=2)
    expected = run_ranks(train, 1, other)[0]
    (tmp_path / "other/saved/latest_checkpointed_iteration.txt").write_text("2")
    losses = run_ranks(train, 2, other | {"tensor_model_parallel_size": 2})[0]
    assert losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama", {"lora_target_modules": ("q_prj",)}, "did you mean q_proj"),
        ("llama", {"lora_r": 0}, "--lora-r 0"),
        (
            "qwen3_moe",
            {"moe_grouped_gemm": False},
            "adapters of experts need grouped GEMMs: drop --no-moe-grouped-gemm",
        ),
        ("llama", {"lora_r": None}, "--lora-alpha: without --lora-r or --lora-load"),
        ("llama", {"lora_load": "/nowhere"}, "--lora-load /nowhere: there is no adapter_"),
    ],
    ids=["module", "rank", "experts", "forgotten", "load"],
)
def test_misuse_is_reported(
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    name: str,
    changes: dict[str, Any],
    words: str,
) -> None:
    peft = _peft(tmp_path_factory, "llama", ALL)
    model = peft.base if name == "llama" else str(tiny.save(name, tmp_path))
    values = peft.settings(tmp_path, load=model) | changes
    with pytest.raises(RankFailed, match=words):
        run_ranks(train, 1, values)


def test_a_checkpoint_without_adapters_has_nothing_to_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny.save("llama", tmp_path)
    for more in ([], ["--merge"]):
        assert main(["export-lora", str(model), str(tmp_path / "out"), *more]) == 2
        assert "holds no adapters" in capsys.readouterr().err
