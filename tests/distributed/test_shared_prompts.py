"""Prompts that pairs share: the losses and gradients of whole sequences, in every layout."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version

from mindspeed.compat import megatron
from tests.distributed import te_model
from tests.llm import preferences as pref
from tests.ranks import run_ranks
from tests.unit.mindspeed_llm.training import tiny_run

SP = {"tp": 2, "sequence_parallel": True}
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
FUSED = {"use_fused_rotary_pos_emb": True}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Megatron's rotation": ({}, {}),
    "fused rotation of qkv": ({}, FUSED),
    "fused rotation": ({"qk_layernorm": True}, FUSED),
    "interleaved": ({"rotary_interleaved": True}, {}),
    "learned positions": ({"position_embedding_type": "learned_absolute"}, {}),
    "window": ({"window_size": (2, 0)}, {}),
    "all recomputed": (FULL, FUSED),
    "attention kept": (FULL, {"recompute_keep_attention": True}),
    "attention recomputed": ({"recompute_granularity": "selective"}, {}),
    "attention swapped": ({}, {"swap_attention": True}),
    "tiles": ({}, {"tiled_mlp_size": 5, "tiled_loss_size": 3}),
}
"""Changes of the config, and features."""


def make_pairs() -> list[dict[str, np.ndarray]]:
    """Return pairs with prompts of 4, 1, 3 and no common tokens."""
    generator = np.random.default_rng(5)
    pairs = []
    for prompt, chosen, rejected in ((4, 3, 4), (1, 4, 2), (3, 1, 3), (2, 5, 3)):
        common = generator.integers(0, te_model.VOCAB, prompt)
        pair = {}
        for side, size in (("chosen", chosen), ("rejected", rejected)):
            answer = generator.integers(0, te_model.VOCAB, size)
            pair[f"{side}_input_ids"] = np.concatenate([common, answer])
            pair[f"{side}_labels"] = np.concatenate([np.full(prompt, -100), answer])
        pairs.append(pair)
    last = pairs[-1]["rejected_input_ids"]
    last[0] = (last[0] + 1) % te_model.VOCAB  # a template may cut the prompts differently
    return pairs


def make_batches(multiple: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the pairs with whole sequences, and with shared prompts."""
    from mindspeed_llm.data.collate import collate_packed, split_pairs
    from mindspeed_llm.data.shared_prompts import collate_shared_pairs

    pairs = make_pairs()
    whole = collate_packed(split_pairs(pairs), multiple=multiple)
    return whole, collate_shared_pairs(pairs, multiple=multiple)


@contextmanager
def _rows_seen(model: Any) -> Iterator[set[int]]:
    """Collect how many rows the layers of a model get."""
    seen: set[int] = set()
    hooks = [
        layer.mlp.register_forward_hook(lambda _, args, out: seen.add(len(args[0])))
        for layer in model.decoder.layers
    ]
    yield seen
    for hook in hooks:
        hook.remove()


def step(model: Any, batch: dict[str, Any]) -> Any:
    """Return the losses of labels in order, the gradients by name, and the rows of layers."""
    from mindspeed_llm.training.trainer import packed_seq_params, register_shared

    register_shared(batch)
    with _rows_seen(model) as seen:
        losses = model(
            batch["tokens"],
            batch["position_ids"],
            None,
            labels=batch["labels"],
            packed_seq_params=packed_seq_params(batch),
        )[batch["loss_mask"] == 1]
    # Every label has another weight, so that no two can be exchanged.
    (losses * torch.arange(1, len(losses) + 1, device=losses.device)).sum().backward()
    grads = te_model.gathered(model, te_model.gradients(model))
    model.zero_grad()
    return losses.detach(), grads, seen


def activate(arguments: dict[str, Any], **features: Any) -> None:
    """Put features in force as the trainer does."""
    from mindspeed.features.activation import current
    from mindspeed.features.base import Context

    options = current().registry.options_class(**features)
    current().activate(options, Context(megatron={"shares_prompts": True} | arguments))


@contextmanager
def _fused_rotations() -> Iterator[list[int]]:
    """Collect the rows of qkv tensors that are rotated as they are split."""
    from mindspeed.ops.rotary_position_embedding import megatron as rotary

    rotate, seen = rotary.rotate_qkv, []

    def counted(qkv: Any, *args: Any) -> Any:
        seen.append(len(qkv))
        return rotate(qkv, *args)

    rotary.rotate_qkv = counted
    yield seen
    rotary.rotate_qkv = rotate


def _steps(cases: list[str], options: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name in cases:
        changes, features = CASES[name]
        activate(changes, linear_cross_entropy=True, **features)
        settings = {"params_dtype": torch.float64} | options | changes
        model = te_model.build("te", "llama", **settings).double()
        whole, shared = make_batches(options.get("tp", 1))
        with _fused_rotations() as rotated:
            found[name] = step(model, whole), step(model, shared), rotated
        found[name] += (shared["tokens"].numel(),)
    return found


@pytest.mark.parametrize(
    ("world", "options", "cases"),
    [(1, {}, [*CASES]), (2, {"tp": 2}, [*CASES][:2]), (2, SP, [*CASES][:3])],
)
def test_losses_and_gradients_are_those_of_whole_sequences(
    world: int, options: dict[str, Any], cases: list[str]
) -> None:
    for found in run_ranks(_steps, world, cases, options):
        for name, (whole, shared, rotated, rows) in found.items():
            torch.testing.assert_close(shared[0], whole[0], rtol=0, atol=1e-12, msg=name)
            assert shared[1].keys() == whole[1].keys()
            for weight, grad in whole[1].items():
                where = f"{name}: {weight}"
                torch.testing.assert_close(shared[1][weight], grad, rtol=0, atol=1e-12, msg=where)
            # A layer rotates qkv in one as without shared prompts, where Megatron can split so.
            if name == "fused rotation of qkv" and megatron.version() >= Version("0.16"):
                assert rotated[-te_model.LAYERS :] == [rows] * te_model.LAYERS
            # Three and two tokens of prompts are not computed again.
            assert whole[2] != shared[2] == {rows // (2 if "sequence_parallel" in options else 1)}


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
FEW = {"train_iters": 3, "micro_batch_size": 3, "global_batch_size": 6}
VARIABLE = {"variable_seq_lengths": True}
LOCAL = {"transformer_impl": "local"}
RUNS: dict[str, dict[str, Any]] = {
    "dpo": {"stage": "dpo"},
    "dpo, concatenated": {"stage": "dpo", **VARIABLE},
    "dpo, adapters": {"stage": "dpo", "lora_r": 4, "lora_alpha": 8},
    "dpo, local": {"stage": "dpo", **LOCAL},
    "dpo, yarn": {"stage": "dpo"},
    "simpo": {"stage": "simpo"},
    "orm": {"stage": "orm"},
}
ONCE, TWICE = "is computed once (--no-share-prompts: twice)", "is computed twice: {} needs it"
KEYS = ("lm loss", "grad norm", "rewards/margins")


class _Rows:
    """The rows that the layers of all models get."""

    def __init__(self) -> None:
        from megatron.core.transformer.mlp import MLP
        from torch.nn.modules.module import register_module_forward_hook

        self.count = 0

        def add(module: Any, args: Any, out: Any) -> None:
            self.count += args[0].shape[:2].numel() if isinstance(module, MLP) else 0

        register_module_forward_hook(add)

    def take(self) -> int:
        """Return how many there were since the last time."""
        found, self.count = self.count, 0
        return found


def _train_each(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train each run, and with whole prompts; return the rows of both, and their files."""
    rows, found = _Rows(), {}
    for name, values in runs.items():
        both = []
        for is_whole in (False, True):
            path = f"{values['log_file']}.{name}.{is_whole}"
            logging.basicConfig(filename=f"{path}.txt", level=logging.INFO, force=True)
            tiny_run.train(values | {"log_file": path, "no_share_prompts": is_whole})
            both.append((rows.take(), path))
        found[name] = both
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("pairs")
    data = pref.write_pairs(folder / "pairs", pref.make_pairs())
    sources = {
        "orm": pref.save_llama(folder / "scorer", "LlamaForSequenceClassification"),
        "dpo, yarn": tiny_run.make_model(folder / "yarn", rope_scaling=YARN, rope_theta=10000.0),
    }
    plain = pref.save_llama(folder / "policy")
    return {
        name: pref.settings(sources.get(name, plain), data, folder, **FEW, **changes)
        for name, changes in RUNS.items()
        if name != "dpo, yarn" or megatron.version() >= Version("0.13")  # not there before
    }


def test_stages_train_as_with_whole_prompts(runs: dict[str, dict[str, Any]]) -> None:
    (found,) = run_ranks(_train_each, 1, runs)
    pairs = pref.make_pairs()[: FEW["train_iters"] * FEW["global_batch_size"]]
    for name, ((rows, path), (whole_rows, whole_path)) in found.items():
        _check_metrics(path, whole_path, FEW["train_iters"])
        log = Path(f"{path}.txt").read_text()
        assert "common prompt" not in Path(f"{whole_path}.txt").read_text()
        if name == "dpo, local":
            assert TWICE.format("--transformer-impl local") in log and rows == whole_rows
            continue
        assert ONCE in log
        # Four layers of one or two models; the rows of three pairs are padded to 16.
        passes = 4 * (2 if name.startswith("dpo") else 1)
        used = [sum(map(_rows_of, pairs[at : at + 3])) for at in range(0, len(pairs), 3)]
        assert rows == passes * sum(-(-each // 16) * 16 for each in used) < whole_rows


def _check_metrics(path: str, other_path: str, steps: int) -> None:
    for key in KEYS:
        one, other = (tiny_run.read_losses(each, key) for each in (path, other_path))
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6), (path, key)
        assert len(one) == len(set(one)) == steps


def _rows_of(pair: pref.Pair) -> int:
    return len(pair.prompt) + len(pair.chosen) + 1 + len(pair.rejected)


PP2 = {"pipeline_model_parallel_size": 2, "micro_batch_size": 1, "global_batch_size": 3}


def test_pipeline_stages_exchange_rows_of_any_length(runs: dict[str, dict[str, Any]]) -> None:
    """Three pairs of different lengths in a step, with the reference's pass."""
    values = runs["dpo"] | PP2 | {"train_iters": 2}
    values["log_file"] += ".pp"
    for found in run_ranks(_train_each, 2, {"dpo": values}):
        (rows, path), (whole_rows, whole_path) = found["dpo"]
        assert rows < whole_rows
    _check_metrics(path, whole_path, 2)


def test_a_run_resumes_with_the_switch_changed(
    runs: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """The reference's log-probabilities that one layout has computed serve the other."""
    known = {"precompute_ref_log_probs": True, "cache_dir": str(tmp_path / "cache")}
    values = runs["dpo"] | known | {"save": str(tmp_path / "saved")}
    log = str(tmp_path / "changed.jsonl")
    resumed = [
        values | {"log_file": log, "train_iters": 2},
        values | {"log_file": log, "train_iters": 4, "no_share_prompts": True},
    ]
    whole = runs["dpo"] | {"log_file": str(tmp_path / "whole.jsonl"), "train_iters": 4}
    run_ranks(_train_all, 1, [*resumed, whole])
    (_,) = (tmp_path / "cache/reference").iterdir()
    _check_metrics(log, whole["log_file"], 4)


def _train_all(every: list[dict[str, Any]]) -> None:
    for values in every:
        tiny_run.train(values)
