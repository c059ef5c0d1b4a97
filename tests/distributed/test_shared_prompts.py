"""Prompts that pairs share: the losses and gradients of whole sequences, in every layout."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed import te_model
from tests.ranks import run_ranks

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


def _steps(cases: list[str], options: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name in cases:
        changes, features = CASES[name]
        activate(changes, linear_cross_entropy=True, **features)
        settings = {"params_dtype": torch.float64} | options | changes
        model = te_model.build("te", "llama", **settings).double()
        whole, shared = make_batches(options.get("tp", 1))
        found[name] = step(model, whole), step(model, shared), shared["tokens"].numel()
    return found


@pytest.mark.parametrize(
    ("world", "options", "cases"),
    [(1, {}, [*CASES]), (2, {"tp": 2}, [*CASES][:2]), (2, SP, [*CASES][:3])],
)
def test_losses_and_gradients_are_those_of_whole_sequences(
    world: int, options: dict[str, Any], cases: list[str]
) -> None:
    for found in run_ranks(_steps, world, cases, options):
        for name, (whole, shared, rows) in found.items():
            torch.testing.assert_close(shared[0], whole[0], rtol=0, atol=1e-12, msg=name)
            assert shared[1].keys() == whole[1].keys()
            for weight, grad in whole[1].items():
                told = f"{name}: {weight}"
                torch.testing.assert_close(shared[1][weight], grad, rtol=0, atol=1e-12, msg=told)
            # Three and two tokens of prompts are not computed again.
            assert whole[2] != shared[2] == {rows // (2 if "sequence_parallel" in options else 1)}
