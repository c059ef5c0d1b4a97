"""Losses of labelled rows only: plain Megatron's losses and gradients, and stages that use it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import te_model
from tests.llm import letters
from tests.llm import preferences as pref
from tests.ranks import run_ranks
from tests.unit.mindspeed_llm.training import tiny_run

LENGTH = te_model.SEQUENCE
MASKS = {
    "some": torch.tensor([[0, 0, 0, 1, 1, 0, 1, 0], [0, 1, 1, 1, 0, 0, 0, 0]]),
    "none": torch.zeros(2, LENGTH, dtype=torch.int64),
    "all": torch.ones(2, LENGTH, dtype=torch.int64),
}
SP = {"tp": 2, "sequence_parallel": True}
TILES = {"tiled_loss_size": 3}


class _Seen:
    """The rows that the operator gets, and how many of them have a label."""

    def __init__(self) -> None:
        from mindspeed.ops.linear_cross_entropy import megatron

        self.rows: list[int] = []
        self.labels: list[int] = []
        operator = megatron.linear_cross_entropy

        def counted(hidden: Any, weight: Any, labels: Any, *args: Any, **kwargs: Any) -> Any:
            self.rows.append(labels.numel())
            self.labels.append(int((labels != -100).sum()))
            return operator(hidden, weight, labels, *args, **kwargs)

        megatron.linear_cross_entropy = counted

    def take(self) -> tuple[list[int], list[int]]:
        """Return what was seen since the last time."""
        found = self.rows, self.labels
        self.rows, self.labels = [], []
        return found


def _step(mask: torch.Tensor, options: dict[str, Any], *, picks: bool, **features: Any) -> Any:
    """Return the masked losses of one batch, the gradients by name, and the other losses."""
    import mindspeed
    from mindspeed.ops.linear_cross_entropy.labelled_rows import LabelledRows
    from mindspeed.ops.linear_cross_entropy.megatron import losses_of

    mindspeed.enable(**{"linear_cross_entropy": True} | features)
    model = te_model.build("te", "llama", params_dtype=torch.float64, **options).double()
    torch.manual_seed(4)
    tokens = torch.randint(te_model.VOCAB, (len(mask), LENGTH + 1))
    positions = torch.arange(LENGTH).expand(len(mask), -1)
    with losses_of(model, LabelledRows.of(mask) if picks else None):
        losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
    assert not hasattr(model.output_layer, "labelled_rows")
    (losses * mask).sum().backward()
    grads = te_model.gathered(model, te_model.gradients(model))
    return losses.detach() * mask, grads, losses.detach() * (1 - mask)


def _steps(options: dict[str, Any]) -> Any:
    found, seen = {}, {}
    counts = _Seen()
    for name, mask in MASKS.items():
        plain = _step(mask, options, picks=False, linear_cross_entropy=False)
        whole = _step(mask, options, picks=False)
        counts.take()
        found[name] = plain, whole, _step(mask, options, picks=True)
        seen[name] = counts.take()
    found["tiles"] = *found["some"][:2], _step(MASKS["some"], options, picks=True, **TILES)
    return found, seen


def _check(found: Any, expected: Any, tolerance: float) -> None:
    torch.testing.assert_close(found[0].double(), expected[0].double(), rtol=0, atol=tolerance)
    assert found[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        torch.testing.assert_close(found[1][name], grad, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize(("world", "options"), [(1, {}), (2, {"tp": 2}), (2, SP)])
def test_model_has_the_losses_and_gradients_of_all_rows(
    world: int, options: dict[str, Any]
) -> None:
    for found, seen in run_ranks(_steps, world, options):
        for name, (plain, whole, picked) in found.items():
            _check(picked, whole, 1e-12)
            _check(picked, plain, 1e-6)  # Megatron's own loss is in float32
            assert name == "tiles" or not picked[2].any()
        # Without a label one row stands in for them; where all have one none is picked.
        assert seen == {"some": ([6], [6]), "none": ([1], [0]), "all": ([16], [16])}


SAMPLES = 8
TRAINED = [int((labels[1:] != -100).sum()) for _, labels in tiny_run.make_samples(SAMPLES)]


def _settings(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the options of a stage by name."""
    data = tiny_run.write_samples(folder / "data", tiny_run.make_samples(SAMPLES))
    llama, policy = tiny_run.make_model(folder / "llama"), pref.save_llama(folder / "policy")
    pairs = pref.write_pairs(folder / "pairs", pref.make_pairs())
    unpaired = pref.write_unpaired(folder / "unpaired", pref.make_unpaired())
    kto = {"global_batch_size": 4, "micro_batch_size": 2, "variable_seq_lengths": True}
    sft = tiny_run.settings(llama, data, folder, micro_batch_size=2)
    runs = {
        "sft": sft,
        "lora": sft | {"lora_r": 4, "lora_alpha": 8},
        "dpo": pref.settings(policy, pairs, folder, stage="dpo"),
        "kto": pref.settings(policy, unpaired, folder, stage="kto", **kto),
        "grpo": letters.settings(
            letters.save_model(folder / "letters"),
            letters.write_prompts(folder / "prompts"),
            folder,
            reward_fn=letters.write_function(folder),
            ppo_epochs=2,
        ),
    }
    return {name: values | {"train_iters": 2} for name, values in runs.items()}


def _train_each(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train every run with plain and with deferred logits; return what operator and logs say."""
    seen, found = _Seen(), {}
    for name, values in runs.items():
        loss = "policy loss" if name == "grpo" else "lm loss"
        logs = []
        for is_deferred in (False, True):
            path = f"{values['log_file']}.{name}.{is_deferred}"
            given = values | {"log_file": path, "linear_cross_entropy": is_deferred}
            tiny_run.train(given)
            logs.append([tiny_run.read_losses(path, each) for each in (loss, "grad norm")])
            if name == "grpo":
                logs[-1].append(tiny_run.read_losses(path, "completion length"))
        found[name] = logs, *seen.take()
    return found


def test_stages_compute_the_losses_that_count(tmp_path: Path) -> None:
    (found,) = run_ranks(_train_each, 1, _settings(tmp_path))
    for name, ((plain, deferred), rows, labels) in found.items():
        for expected, values in zip(plain, deferred):
            assert values == pytest.approx(expected, rel=1e-5), name
        assert rows == labels, name  # so few tokens are not rounded up
    assert sum(found["sft"][1]) == sum(found["lora"][1]) == sum(TRAINED)
    pairs = pref.make_pairs()[: 2 * pref.BATCH]
    completions = sum(len(pair.chosen) + len(pair.rejected) for pair in pairs)
    assert sum(found["dpo"][1]) == 2 * completions  # of the policy and of the reference
    judged = pref.make_unpaired()[: 2 * pref.KTO_BATCH]
    # Each completion also behind the prompt of another.
    assert sum(found["kto"][1]) == 4 * sum(len(one.completion) for one in judged)
    (*_, lengths), completions = found["grpo"][0][1], 4 * 4
    # The log-probabilities before the updates, and two updates.
    assert sum(found["grpo"][1]) == pytest.approx(3 * completions * sum(lengths))


CP2 = {"context_parallel_size": 2}
LAYOUTS = {
    "sft, cp": CP2,
    "sft, pp, concatenated": {"pipeline_model_parallel_size": 2, "variable_seq_lengths": True},
    "kto, cp": CP2,
}


def test_ranks_compute_the_losses_of_their_rows(tmp_path: Path) -> None:
    stages = _settings(tmp_path)
    runs = {name: stages[name[:3]] | layout for name, layout in LAYOUTS.items()}
    ranks = run_ranks(_train_each, 2, runs)
    (alone,) = run_ranks(_train_each, 1, {name: stages[name] for name in ("sft", "kto")})
    for name in runs:
        plain_alone, expected_rows = alone[name[:3]][0][0], alone[name[:3]][1]
        for expected, *found in zip(plain_alone, *ranks[0][name][0]):
            assert found == [pytest.approx(expected, rel=1e-5)] * 2, name
        assert sum(sum(rank[name][2]) for rank in ranks) == sum(expected_rows), name
        assert all(rank[name][1] for rank in ranks) == ("cp" in name)  # not on a first stage
