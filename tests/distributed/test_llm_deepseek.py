"""Training DeepSeek: gradients of latent attention and of multi-token prediction."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mindspeed.compat import megatron
from mindspeed_llm.training.added_losses import MTP_LOSS
from tests.llm import generation, tiny
from tests.llm.megatron_logits import all_logits
from tests.llm.preferences import make_pairs, write_pairs
from tests.ranks import run_ranks
from tests.unit.mindspeed_llm.checkpoint.test_round_trip import mtp_model
from tests.unit.mindspeed_llm.training.tiny_run import make_samples, settings, write_samples

FACTOR = 0.1  # of Megatron's scripts
KEYS = ("lm loss", "grad norm", MTP_LOSS)
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform"}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "EP2": {"expert_model_parallel_size": 2},
    "TP2": TP2,
    "PP2": {"pipeline_model_parallel_size": 2},
    "CP2": {"context_parallel_size": 2},
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    folder = tmp_path_factory.mktemp("mtp")
    tensors = mtp_model(tiny.save("deepseek3", folder), folder / "mtp")
    for name, tensor in tensors.items():
        if name.startswith("model.layers.4."):  # which is layer 3, each weight larger by 1
            usual = tensors.get(name.replace(".4.", ".3.", 1), tensor * 0.1)
            tensors[name] = usual.flip(0).contiguous()
    save_file(tensors, folder / "mtp/model.safetensors", metadata={"format": "pt"})
    return folder, str(folder / "mtp"), write_samples(folder / "data", make_samples(24))


def run_of(inputs: tuple[Path, str, str], name: str, **values: Any) -> dict[str, Any]:
    folder, model, data = inputs
    given = {"train_iters": 1, "log_file": str(folder / f"{name}.jsonl")}
    return settings(model, data, folder, **given | values)


def train_all(runs: list[dict[str, Any]]) -> None:
    from megatron.core import parallel_state

    from mindspeed_llm.tasks.posttrain.sft import SFTTrainer
    from mindspeed_llm.training.options import TrainOptions

    for values in runs:
        SFTTrainer(TrainOptions(**values)).train()
        parallel_state.destroy_model_parallel()


def first_steps(
    world: int, runs: dict[str, dict[str, Any]], keys: tuple[str, ...] = ("lm loss", "grad norm")
) -> dict[str, tuple[float, ...]]:
    """Train on these ranks; return what is logged of the first step of each."""
    run_ranks(train_all, world, list(runs.values()), timeout=300)
    lines = {n: Path(v["log_file"]).read_text().splitlines()[0] for n, v in runs.items()}
    logs = {name: json.loads(line) for name, line in lines.items()}
    return {name: tuple(log[key] for key in keys) for name, log in logs.items()}


def gradients(values: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of a weight of the further layer, by Megatron and by the formula."""
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    from mindspeed_llm.tasks.posttrain.sft import SFTTrainer
    from mindspeed_llm.training.options import TrainOptions

    trainer = SFTTrainer(TrainOptions(**values))
    (model,) = trainer.primary.chunks
    weight = model.mtp.layers[0].eh_proj.weight
    batch = trainer.collate([trainer.train_data[number] for number in range(2)])
    further: list[torch.Tensor] = []
    # A copy: Megatron's cross entropy overwrites logits.
    model.output_layer.register_forward_hook(lambda *call: further.append(call[2][0].clone()))
    MTPLossAutoScaler.set_loss_scale(torch.ones(1))
    losses = trainer.run_model(model, batch)
    (by_megatron,) = torch.autograd.grad((losses * 0).sum(), weight, retain_graph=True)
    loss = FACTOR * further_loss(further[0], batch)  # the first call of the output layer
    return by_megatron, torch.autograd.grad(loss, weight)[0]


def further_loss(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    """Return the mean loss of the token after the next, where that token has a label."""
    labels, mask = batch["labels"][:, 1:], batch["loss_mask"][:, 1:].flatten()
    logits = logits.transpose(0, 1)[:, :-1].flatten(0, 1).float()
    return (F.cross_entropy(logits, labels.flatten(), reduction="none") * mask).sum() / mask.sum()


def loss_by_formula(values: dict[str, Any]) -> float:
    """Return the mean over the first micro-batches of the loss of the further layer."""
    from mindspeed_llm.tasks.posttrain.sft import SFTTrainer
    from mindspeed_llm.training.options import TrainOptions

    trainer = SFTTrainer(TrainOptions(**values))
    (model,) = trainer.primary.chunks
    further: list[torch.Tensor] = []
    model.output_layer.register_forward_hook(lambda *call: further.append(call[2][0].clone()))
    losses = []
    for number in range(trainer.setup.dims.global_batch_size):
        further.clear()
        batch = trainer.collate([trainer.train_data[number]])
        with torch.no_grad():
            trainer.run_model(model, batch)
        losses.append(further_loss(further[0], batch).nan_to_num().item())  # 0 where none is
    return sum(losses) / len(losses)


def test_the_gradient_is_that_of_the_formula(inputs: tuple[Path, str, str]) -> None:
    values = run_of(inputs, "formula", no_gradient_accumulation_fusion=True)
    ((found, expected),) = run_ranks(gradients, 1, values)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_padding_and_layouts_change_nothing(inputs: tuple[Path, str, str]) -> None:
    runs = {"plain": run_of(inputs, "plain"), "padded": run_of(inputs, "padded", seq_length=48)}
    runs |= {"recompute": run_of(inputs, "recompute", **RECOMPUTE, recompute_num_layers=4)}
    runs |= {"local": run_of(inputs, "local", transformer_impl="local")}
    steps = first_steps(1, runs, KEYS)
    runs = {name: run_of(inputs, name, **layout) for name, layout in LAYOUTS.items()}
    steps |= first_steps(2, runs, KEYS)
    for name, found in steps.items():
        assert found == pytest.approx(steps["plain"], rel=1e-5), name


@pytest.mark.skipif(
    megatron.version() < Version("0.16"), reason="one line refuses rows of several samples"
)
def test_samples_of_one_row_are_apart(inputs: tuple[Path, str, str]) -> None:
    """A step is that of padded rows of the same samples, wherever ranks cut them."""
    folder = inputs[0]
    data = write_samples(folder / "rows", make_samples(24), [[n, n + 1] for n in range(0, 24, 2)])
    kinds: dict[str, dict[str, Any]] = {
        "variable": {"micro_batch_size": 2, "variable_seq_lengths": True},
        "packed": {"global_batch_size": 2, "data_path": (data,), "neat_pack": True},
    }
    cp2 = {"context_parallel_size": 2}
    layouts: dict[str, tuple[int, dict[str, Any]]] = {
        "one rank": (1, {}),
        "recompute, no-ops": (1, RECOMPUTE | {"recompute_num_layers": 2, "noop_layers": (0, 5)}),
        "CP2": (2, cp2),
        "CP2 zigzag": (2, cp2 | {"cp_document_layout": "zigzag"}),
        "CP2 TP2": (4, cp2 | TP2),
    }

    padded = {"pairs": run_of(inputs, "pairs", micro_batch_size=2)}
    expected = first_steps(1, padded, KEYS)["pairs"]
    # Each layout in processes of its own, as features of one run stay on.
    for name, (world, layout) in layouts.items():
        runs = {kind: run_of(inputs, f"{kind} {name}", **v, **layout) for kind, v in kinds.items()}
        for kind, step in first_steps(world, runs, KEYS).items():
            assert step == pytest.approx(expected, rel=1e-5), (kind, name)


def test_the_logged_loss_is_that_of_the_formula(inputs: tuple[Path, str, str]) -> None:
    samples = make_samples(4)
    samples[1][1][:] = -100  # no token of this one has a label
    data = write_samples(inputs[0] / "three of four", samples)
    runs = {"logged": run_of(inputs, "logged"), "three": run_of(inputs, "three", data_path=(data,))}
    steps = first_steps(1, runs, (MTP_LOSS, "grad norm"))
    for name, (found, norm) in steps.items():
        (expected,) = run_ranks(loss_by_formula, 1, runs[name])
        assert found == pytest.approx(expected, rel=1e-5)
        assert math.isfinite(norm)


def test_answers_are_those_of_a_model_of_the_next_token(inputs: tuple[Path, str, str]) -> None:
    """Of the trained model, which has its layers, and of the one that generates, which does not."""
    theirs = AutoModelForCausalLM.from_pretrained(inputs[1], dtype=torch.float32)
    expected = tiny.logits(inputs[1])
    case = {"source": inputs[1], "config_folder": inputs[1]}
    case |= {"further": True, "impl": "transformer_engine"}
    cases = {"one rank": (1, {}), "PP2": (2, {"pp": 2}), "TP2": (2, {"tp": 2})}
    for name, (world, layout) in cases.items():
        (found,) = run_ranks(all_logits, world, [case | layout])[-1]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4, msg=name)
    asked = {"source": inputs[1], "requests": [generation.request()]}
    answers = generation.theirs(theirs, generation.PROMPTS)
    assert run_ranks(generation.several, 1, [asked])[0] == [[answers]]
    assert run_ranks(generation.several, 2, [asked | {"pp": 2}])[0] == [[answers]]


def moved_weights(values: dict[str, Any]) -> set[str]:
    """Return the names of the weights that two steps on pairs of answers change."""
    from mindspeed_llm.tasks.posttrain.simpo import SimPOTrainer
    from mindspeed_llm.training.options import TrainOptions

    trainer = SimPOTrainer(TrainOptions(**values))
    (model,) = trainer.primary.chunks
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    trainer.train()
    return {n for n, weight in model.named_parameters() if not torch.equal(weight, before[n])}


def test_preferences_leave_further_tokens_as_they_are(inputs: tuple[Path, str, str]) -> None:
    """Not even weight decay changes what no loss trains."""
    data = write_pairs(inputs[0] / "pairs", make_pairs())
    values = run_of(inputs, "pairs", stage="simpo", data_path=(data,), train_iters=2)
    (moved,) = run_ranks(moved_weights, 1, values)
    assert any(name.startswith("decoder.") for name in moved)
    assert not any(name.startswith("mtp.") for name in moved)


def test_a_run_with_further_tokens_resumes_in_other_layouts(inputs: tuple[Path, str, str]) -> None:
    """With tensor parallelism the vocabulary is padded, and so is the optimizer's state.

    Groups of parameters, by their weight decay, are in another order on another virtual stage.
    """
    vpp2 = LAYOUTS["PP2"] | {"num_layers_per_virtual_pipeline_stage": 1}
    common = {"weight_decay": 10.0, "use_distributed_optimizer": True}
    whole = run_of(inputs, "whole", train_iters=3, **common)
    saved = inputs[0] / "saved"
    run_ranks(train_all, 1, [whole])
    run_ranks(train_all, 2, [run_of(inputs, "first", save=str(saved), **vpp2 | common)])
    found = {}
    for name, (world, layout) in {"VPP2": (2, vpp2), "one": (1, {}), "TP2": (2, TP2)}.items():
        folder = shutil.copytree(saved, inputs[0] / f"saved {name}")
        values = run_of(inputs, name, train_iters=3, save=str(folder), **layout | common)
        run_ranks(train_all, world, [values])
        found[name] = last_step(values)
    for name, step in found.items():
        assert step == pytest.approx(last_step(whole), rel=1e-5), name


def last_step(values: dict[str, Any]) -> tuple[int, float, float]:
    lines = map(json.loads, Path(values["log_file"]).read_text().splitlines())
    log = [line for line in lines if "lm loss" in line][-1]
    return log["iteration"], log["lm loss"], log["grad norm"]


@pytest.mark.parametrize("name", ["deepseek3", "deepseek2_lite"])
def test_heads_of_all_ranks_count_in_the_gradient_of_keys(
    inputs: tuple[Path, str, str], name: str
) -> None:
    load = str(inputs[0] / "deepseek3")
    if name != "deepseek3":
        load = str(tiny.save(name, inputs[0]))
    kinds = ("transformer_engine", "local")
    runs = {kind: {"load": load, "transformer_impl": kind} for kind in kinds}
    one = {kind: run_of(inputs, f"{name} {kind} 1", **values) for kind, values in runs.items()}
    two = {kind: run_of(inputs, f"{name} {kind} 2", **v, **TP2) for kind, v in runs.items()}
    expected = first_steps(1, one)["local"]
    for kind, found in first_steps(2, two).items():
        assert found == pytest.approx(expected, rel=1e-5), kind


Biases = dict[int, torch.Tensor]
"""By number of the layer, from 1 on; the last is that of multi-token prediction."""


def biases_of_routers(values: dict[str, Any], bad_step: int | None = None) -> Biases:
    """Return the biases by which experts are chosen, after a training with `bad_step`.

    The loss of that step, where there is one, is not a number.
    """
    from mindspeed_llm.tasks.posttrain.launcher import AutoTrainer
    from mindspeed_llm.training.options import TrainOptions

    trainer = AutoTrainer(TrainOptions(**values)).trainer
    if values["train_iters"]:
        loss_func, calls = trainer.loss_func, iter(range(100))

        def spoiled(batch: Any, output: torch.Tensor) -> Any:
            is_bad = next(calls) // values["global_batch_size"] == bad_step
            return loss_func(batch, output * float("nan") if is_bad else output)

        trainer.loss_func = spoiled  # type: ignore[method-assign]
        trainer.train()
    routers = trainer.primary.routers
    assert all(each.dtype == torch.float32 for router in routers for each in router.buffers())
    return {number: router.expert_bias for number, router in enumerate(routers, 2)}


def loaded_biases(inputs: tuple[Path, str, str]) -> Biases:
    tensors = load_file(Path(inputs[1]) / "model.safetensors")
    name = "model.layers.{}.mlp.gate.e_score_correction_bias"
    return {number: tensors[name.format(number - 1)] for number in (2, 3, 4, 5)}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_biases_of_routers_are_not_rounded(inputs: tuple[Path, str, str], precision: str) -> None:
    values = run_of(inputs, precision, train_iters=0, **{precision: True})
    (found,) = run_ranks(biases_of_routers, 1, values)
    expected = loaded_biases(inputs)
    assert any(not torch.equal(bias, bias.bfloat16().float()) for bias in expected.values())
    assert all(torch.equal(found[number], bias) for number, bias in expected.items())


def biases_that_generate(source: str) -> Biases:
    """Return the biases of a model that is loaded to generate in half precision."""
    from mindspeed_llm.generation.model import load_model
    from mindspeed_llm.training.model import routers
    from mindspeed_llm.training.options import TrainOptions

    model = load_model(TrainOptions(load=source, bf16=True))
    return {number: one.expert_bias for number, one in enumerate(routers([*model.chunks]), 2)}


def test_a_model_that_generates_chooses_the_same_experts(inputs: tuple[Path, str, str]) -> None:
    (found,) = run_ranks(biases_that_generate, 1, inputs[1])
    expected = loaded_biases(inputs)
    assert found.keys() == {2, 3, 4}
    assert all(torch.equal(bias, expected[number]) for number, bias in found.items())


def test_fixed_routing_is_even_whatever_the_biases_are(inputs: tuple[Path, str, str]) -> None:
    folder = shutil.copytree(inputs[1], inputs[0] / "biased")
    tensors = load_file(folder / "model.safetensors")
    for name in filter(lambda name: name.endswith("e_score_correction_bias"), tensors):
        tensors[name] = 100 * tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = run_of(inputs, "fixed", load=str(folder), fix_router=True, seq_length=32)
    (biases,) = run_ranks(biases_of_routers, 1, values)
    lines = map(json.loads, Path(values["log_file"]).read_text().splitlines())
    (load,) = [line for line in lines if "moe load" in line]
    assert load["moe max load"] == load["moe min load"] == 1
    for number, bias in loaded_biases((inputs[0], str(folder), "")).items():
        assert torch.equal(biases[number], bias)  # nothing is left to balance


def test_a_skipped_step_changes_no_bias_of_a_router(inputs: tuple[Path, str, str]) -> None:
    """Not one whose loss is not finite, nor one that overflows in half precision."""
    before = loaded_biases(inputs)
    one, bad, half = (run_of(inputs, name) for name in ("one", "bad", "half"))
    half |= {"fp16": True, "train_iters": 3}
    (once,) = run_ranks(biases_of_routers, 1, one)
    (twice,) = run_ranks(biases_of_routers, 1, bad | {"train_iters": 2}, 1)
    (never,) = run_ranks(biases_of_routers, 1, half)
    assert not any(torch.equal(once[number], bias) for number, bias in before.items())
    assert all(torch.equal(twice[number], bias) for number, bias in once.items())
    assert all(torch.equal(never[number], bias) for number, bias in before.items())


def test_the_biases_of_routers_that_are_not_trained_stay(inputs: tuple[Path, str, str]) -> None:
    before = loaded_biases(inputs)
    data = write_pairs(inputs[0] / "pairs of biases", make_pairs())
    kinds = {
        "frozen": {"freeze_router": True},
        "adapters": {"lora_r": 4},
        "rate": {"moe_router_bias_update_rate": 0.0},
        "pairs of biases": {"stage": "simpo", "data_path": (data,)},
    }
    for name, changes in kinds.items():
        (found,) = run_ranks(biases_of_routers, 1, run_of(inputs, name, **changes))
        moved = {n for n, bias in before.items() if not torch.equal(found[n], bias)}
        assert moved == ({2, 3, 4} if "stage" in changes else set()), name


def test_experts_padded_to_a_capacity_move_the_biases(inputs: tuple[Path, str, str]) -> None:
    dropped = run_of(inputs, "dropped", moe_expert_capacity_factor=1.0)
    padded = run_of(inputs, "padded", moe_expert_capacity_factor=1.0)
    padded |= {"moe_pad_expert_input_to_capacity": True}
    (expected,), (found,) = (run_ranks(biases_of_routers, 1, each) for each in (dropped, padded))
    for number, bias in loaded_biases(inputs).items():
        assert torch.equal(found[number], expected[number])
        assert not torch.equal(found[number], bias)
