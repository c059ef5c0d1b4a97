"""Adapters of experts: trained as a plain loop trains them, in every layout, and read by peft."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from mindspeed.config import ConfigError
from mindspeed_llm.checkpoint.adapters import read_peft
from mindspeed_llm.cli.main import main
from mindspeed_llm.models.registry import read_model_config
from mindspeed_llm.training.lora_plan import plan_lora
from mindspeed_llm.training.options import TrainOptions
from tests.llm import tiny
from tests.ranks import run_ranks
from tests.unit.mindspeed_llm.training.tiny_run import (
    CLIP,
    DECAY,
    RATE,
    make_samples,
    read_losses,
    settings,
    train,
    write_samples,
)

STEPS, BATCH, RANK, ALPHA, SAMPLES = 5, 4, 4, 8, 24
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ("gate_proj", "up_proj", "down_proj")
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2}
SHARED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "router": (1, {"lora_train_router": True}),
    "EP2": (2, EP2),
    "TP2": (2, TP2),
    "TP2 EP2, router": (4, TP2 | EP2 | {"lora_train_router": True}),
    "TP-extend-EP after TP2 EP2": (4, TP2 | EP2 | {"moe_tp_extend_ep": True}),
    "EP2, split experts": (4, EP2 | {"expert_tensor_parallel_size": 2}),
    "PP2 EP2, overlaps": (
        4,
        EP2 | SHARED | {"pipeline_model_parallel_size": 2, "overlap_param_gather": True},
    ),
}


class _LowRank(nn.Module):
    """W + scale * B A for a matrix, or for each expert's matrices in a stack of them."""

    def __init__(self, rows: list[list[str]], factors: nn.ParameterDict) -> None:
        super().__init__()
        self.rows, self.factors = rows, factors

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        parts = [torch.cat([self._sum(name) for name in names]) for names in self.rows]
        return weight + (torch.stack(parts) if weight.ndim == 3 else parts[0])

    def _sum(self, name: str) -> torch.Tensor:
        a, b = (self.factors[f"{name}_{letter}".replace(".", "/")] for letter in "AB")
        return ALPHA / RANK * (b @ a)


class _Reference:
    """What transformers, with every weight replaced by its sum, and torch's AdamW train."""

    def __init__(self, folder: Path) -> None:
        self.base = tiny.save("qwen3_moe", folder)
        config = json.loads((self.base / "config.json").read_text())
        config["router_aux_loss_coef"] = 0.0
        (self.base / "config.json").write_text(json.dumps(config))
        self.samples = make_samples(SAMPLES)
        self.data = write_samples(folder / "data", self.samples)
        self.first = self._first_factors()
        self.start = folder / "start"
        self.start.mkdir()
        from safetensors.torch import save_file

        saved = {
            f"base_model.model.{name}.lora_{letter}.weight": factor
            for name, pair in self.first.items()
            for letter, factor in zip("AB", pair)
        }
        save_file(saved, self.start / "adapter_model.safetensors")

    def _first_factors(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        from safetensors.torch import load_file

        torch.manual_seed(3)
        found = {}
        for name, weight in load_file(self.base / "model.safetensors").items():
            module, last = name.removesuffix(".weight"), name.split(".")[-2]
            if last in ATTENTION or (".experts." in name and last in EXPERTS):
                rows, columns = weight.shape
                found[module] = (torch.randn(RANK, columns) / 6, torch.randn(rows, RANK) / 20)
        return found

    def train(self, *, trains_router: bool) -> tuple[list[float], Any]:
        """Return the losses, and the model with the factors it ends with."""
        model, factors = self._model()
        trained = list(factors.values())
        if trains_router:
            trained += [p for n, p in model.named_parameters() if n.endswith("mlp.gate.weight")]
        model.requires_grad_(False)
        for parameter in trained:
            parameter.requires_grad_(True)
        optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=DECAY)
        losses = []
        for step in range(STEPS):
            total = 0.0
            for place in range(step * BATCH, (step + 1) * BATCH):
                ids, labels = (torch.tensor(x)[None] for x in self.samples[place % SAMPLES])
                loss = model(input_ids=ids, labels=labels).loss / BATCH
                loss.backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(trained, CLIP)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
        return losses, (model.eval(), factors)

    def _model(self) -> tuple[Any, nn.ParameterDict]:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            self.base, dtype=torch.float32, attn_implementation="eager"
        )
        factors = nn.ParameterDict(
            {
                f"{name}_{letter}".replace(".", "/"): nn.Parameter(factor.clone())
                for name, pair in self.first.items()
                for letter, factor in zip("AB", pair)
            }
        )
        for name, module in list(model.named_modules()):
            if name.rpartition(".")[2] in ATTENTION:
                parametrize.register_parametrization(module, "weight", _LowRank([[name]], factors))
            if name.endswith(".mlp.experts"):
                for parameter, projections in (
                    ("gate_up_proj", EXPERTS[:2]),
                    ("down_proj", EXPERTS[2:]),
                ):
                    rows = [[f"{name}.{e}.{p}" for p in projections] for e in range(4)]
                    low_rank = _LowRank(rows, factors)
                    parametrize.register_parametrization(module, parameter, low_rank)
        return model, factors


def train_all(runs: dict[str, dict[str, Any]]) -> None:
    for name, values in runs.items():
        if " after " in name:
            train(values | {"moe_tp_extend_ep": False, "train_iters": 3})
        train(values)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("expert_lora")


@pytest.fixture(scope="module")
def reference(folder: Path) -> _Reference:
    return _Reference(folder)


@pytest.fixture(scope="module")
def expected(reference: _Reference) -> dict[bool, tuple[list[float], Any]]:
    return {trained: reference.train(trains_router=trained) for trained in (False, True)}


@pytest.fixture(scope="module")
def trained(reference: _Reference, folder: Path) -> dict[str, Path]:
    """Train in every layout, and return the folder of each run."""
    for world in (1, 2, 4):
        runs = {}
        for name, (ranks, changes) in CASES.items():
            if ranks == world:
                given = {"train_iters": STEPS, "lora_r": RANK, "lora_alpha": ALPHA} | changes
                given |= {"save": str(folder / name / "saved"), "moe_grouped_gemm": True}
                given |= {"lora_load": str(reference.start), "global_batch_size": BATCH}
                (folder / name).mkdir()
                runs[name] = settings(str(reference.base), reference.data, folder / name, **given)
        run_ranks(train_all, world, runs, timeout=300)
    return {name: folder / name for name in CASES}


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_a_plain_loop(
    case: str,
    reference: _Reference,
    expected: dict[bool, tuple[list[float], Any]],
    trained: dict[str, Path],
) -> None:
    trains_router = "lora_train_router" in CASES[case][1]
    losses, (model, factors) = expected[trains_router]
    found = read_losses(str(trained[case] / "log.jsonl"))
    assert found == pytest.approx(losses, abs=1e-5)
    assert losses[0] - losses[-1] > 0.01, "the loss did not fall, so nothing was compared"
    norms = {name: read_losses(str(trained[name] / "log.jsonl"), "grad norm") for name in trained}
    same = "router" if trains_router else "one rank"
    assert norms[case] == pytest.approx(norms[same], rel=1e-5)

    adapter = trained[case] / "adapter"
    assert main(["export-lora", str(trained[case] / "saved"), str(adapter)]) == 0
    exported = read_peft(adapter)
    assert exported.keys() == reference.first.keys()
    for name, pair in exported.items():
        for letter, factor in zip("AB", pair):
            want = factors[f"{name}_{letter}".replace(".", "/")]
            assert torch.allclose(factor, want, atol=1e-4), (name, letter)


@pytest.mark.parametrize("case", ["one rank", "TP2 EP2, router"])
def test_exports_are_the_trained_model(
    case: str,
    reference: _Reference,
    expected: dict[bool, tuple[list[float], Any]],
    trained: dict[str, Path],
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    _, (model, _) = expected["router" in case]
    adapter, merged = trained[case] / "for_peft", trained[case] / "merged"
    assert main(["export-lora", str(trained[case] / "saved"), str(adapter)]) == 0
    assert main(["export-lora", str(trained[case] / "saved"), str(merged), "--merge"]) == 0
    base = AutoModelForCausalLM.from_pretrained(reference.base, dtype=torch.float32)
    with torch.no_grad():
        want = model(tiny.TOKENS).logits
        loaded = PeftModel.from_pretrained(base, adapter).eval()(tiny.TOKENS).logits
    assert torch.allclose(loaded, want, atol=1e-3)
    assert torch.allclose(tiny.logits(merged), loaded, atol=1e-4)
    assert not torch.allclose(tiny.logits(reference.base), loaded, atol=1e-2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"moe_grouped_gemm": False}, "adapters of experts need grouped GEMMs"),
        ({"transformer_impl": "local"}, "need --transformer-impl transformer_engine, not local"),
        ({"lora_dropout": 0.1}, "--lora-dropout 0.1: adapters of experts have no dropout"),
        ({"lora_train_router": True, "freeze_router": True}, "exclude each other"),
    ],
)
def test_misuse_is_reported(reference: _Reference, changes: dict[str, Any], words: str) -> None:
    shape = read_model_config(reference.base)
    given = {"lora_r": 4, "moe_grouped_gemm": True} | changes
    with pytest.raises(ConfigError, match=words):
        plan_lora(TrainOptions(**given), shape)
    attention = given | {"lora_target_modules": ("linear_qkv", "linear_proj")}
    if "freeze_router" not in changes:
        assert plan_lora(TrainOptions(**attention), shape) is not None


@pytest.mark.parametrize(
    ("family", "modules"),
    [
        ("deepseek3", {"o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("gpt_oss", {"q_proj", "k_proj", "v_proj", "o_proj"}),
    ],
)
def test_without_targets_what_the_model_has_gets_adapters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, modules: set[str]
) -> None:
    shape = read_model_config(tiny.save(family, tmp_path))
    plan = plan_lora(TrainOptions(lora_r=4, moe_grouped_gemm=True), shape)
    assert plan is not None and set(plan.modules) == modules
    assert f"this {family} model has none for linear_" in caplog.text
    named = TrainOptions(lora_r=4, lora_target_modules=("linear_qkv", "linear_fc1"))
    with pytest.raises(ConfigError, match="has no such layer for adapters"):
        plan_lora(named, shape)
