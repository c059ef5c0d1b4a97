"""PPO and GRPO: the numbers of plain torch on recorded rollouts, layouts, resume, a solved task."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mindspeed_llm.tasks.posttrain.completion_log import FILE_NAME
from tests.llm import letters, tiny
from tests.llm.plain_rl import Recorded, grpo_steps, ppo_steps
from tests.ranks import RankFailed, run_ranks
from tests.unit.mindspeed_llm.checkpoint.test_round_trip import mtp_model
from tests.unit.mindspeed_llm.training.tiny_run import (
    OWN_REFERENCE,
    log_of_references,
    read_checkpoint,
)

SEVERAL = {"ppo_epochs": 2, "num_mini_batches": 2, "lr": 5e-3, "clip_ratio": 0.1}
VARIABLE = {"variable_seq_lengths": True}
GSPO = {"importance_sampling_level": "sequence"}
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
PPO = {"stage": "trl_ppo"}


class _Task:
    def __init__(self, folder: Path) -> None:
        self.model = letters.save_model(folder / "hf")
        self.critic = letters.save_model(
            folder / "critic", "LlamaForSequenceClassification", seed=1, num_labels=1
        )
        # Where both start alike, the gradient of the divergence is 0 but for rounding, which Adam
        # scales up.
        self.reference = letters.save_model(folder / "reference", seed=2)
        self.data = letters.write_prompts(folder / "data")
        self.function = letters.write_function(folder)

    def settings(self, folder: Path, **changes: Any) -> dict[str, Any]:
        folder.mkdir(exist_ok=True)
        critic = {"critic_model": self.critic} if changes.get("stage") == "trl_ppo" else {}
        given = {} if "reward_model" in changes else {"reward_fn": self.function}
        if changes.get("grpo_beta") and "lora_r" not in changes:
            given["ref_model"] = self.reference
        return letters.settings(self.model, self.data, folder, **critic | given | changes)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> _Task:
    return _Task(tmp_path_factory.mktemp("letters"))


def record(values: dict[str, Any]) -> list[list[Recorded]]:
    """Train as one rank; return the completions of every step."""
    from mindspeed_llm.tasks.posttrain.launcher import AutoTrainer
    from mindspeed_llm.training.options import TrainOptions

    trainer: Any = AutoTrainer(TrainOptions(**values)).trainer
    prepare, steps = trainer.prepare, []

    def prepare_recorded(rollouts: Any, batches: Any) -> Any:
        steps.append(
            [Recorded(r.prompt.tokens, r.completion.tokens, r.reward, r.is_ended) for r in rollouts]
        )
        return prepare(rollouts, batches)

    trainer.prepare = prepare_recorded
    trainer.train()
    return steps


def export(saved: str, folder: Path, role: str | None = None) -> dict[str, torch.Tensor]:
    from mindspeed_llm.checkpoint.conversion import convert
    from mindspeed_llm.checkpoint.options import ConvertOptions

    convert(
        ConvertOptions(
            load_model_type="mg",
            save_model_type="hf",
            load_dir=saved,
            save_dir=str(folder),
            model_role=role,
        )
    )
    return load_file(folder / "model.safetensors")


def check_weights(found: dict[str, torch.Tensor], expected: torch.nn.Module) -> None:
    wanted = dict(expected.named_parameters())
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight.detach(), rtol=0, atol=1e-4)


def check_lines(values: dict[str, Any], expected: list[dict[str, float]]) -> None:
    for line, wanted in zip(letters.read_log(values), expected, strict=True):
        for name in wanted.keys() & line.keys():
            rel = 1e-4 if "norm" in name else 1e-5
            assert line[name] == pytest.approx(wanted[name], rel=rel, abs=1e-5), name
        assert line["sampling difference"] < 1e-4


@pytest.mark.parametrize(
    "changes",
    [
        {},
        SEVERAL | {"grpo_beta": 0.1, "temperature": 0.7, **VARIABLE},
        {"grpo_loss_type": "dapo", "entropy_coeff": 0.02, "num_mini_batches": 2},
        {"grpo_loss_type": "dr_grpo", "no_scale_rewards": True, "clip_ratio_high": 0.3},
        SEVERAL | GSPO | {"grpo_beta": 0.1, "clip_ratio": 0.01},
        SEVERAL | GSPO | {"mask_truncated_completions": True, "grpo_beta": 0.1, **VARIABLE},
        {"grpo_loss_type": "dapo", "mask_truncated_completions": True, "num_mini_batches": 2},
    ],
)
def test_grpo_is_that_of_plain_torch(task: _Task, tmp_path: Path, changes: dict[str, Any]) -> None:
    values = task.settings(tmp_path, save=str(tmp_path / "saved"), **changes)
    (steps,) = run_ranks(record, 1, values)
    lines, model = grpo_steps(task.model, steps, values)
    check_lines(values, lines)
    check_weights(export(values["save"], tmp_path / "exported"), model)


@pytest.mark.parametrize(
    "changes", [{}, SEVERAL | VARIABLE | {"kl_target": 0.01, "gamma": 0.9, "entropy_coeff": 0.0}]
)
def test_ppo_is_that_of_plain_torch(task: _Task, tmp_path: Path, changes: dict[str, Any]) -> None:
    values = task.settings(tmp_path, save=str(tmp_path / "saved"), **PPO, **changes)
    (steps,) = run_ranks(record, 1, values)
    lines, actor, critic = ppo_steps((task.model, task.critic), steps, values)
    check_lines(values, lines)
    check_weights(export(values["save"], tmp_path / "actor"), actor)
    check_weights(export(values["save"], tmp_path / "critic", "critic"), critic)


def decoders_of_steps(values: dict[str, Any]) -> list[int]:
    """Train as one rank that decodes on fixed buffers; return the number of decoders so far."""
    from mindspeed_llm.generation.rollout import MegatronRollout
    from mindspeed_llm.tasks.posttrain.launcher import AutoTrainer
    from mindspeed_llm.training.options import TrainOptions

    trainer: Any = AutoTrainer(TrainOptions(**values)).trainer
    trainer.engine = MegatronRollout(
        trainer.primary, trainer.setup.shape, trainer.sampling.max_length, static=True
    )
    prepare, made, counts = trainer.prepare, [], []

    def prepare_counted(rollouts: Any, batches: Any) -> Any:
        decoder = trainer.engine._decoders._kept[1]
        assert decoder._replay is not None
        made.extend([] if decoder in made else [decoder])
        counts.append(len(made))
        return prepare(rollouts, batches)

    trainer.prepare = prepare_counted
    trainer.train()
    weight = next(trainer.primary.chunks[0].parameters())
    assert made[-1].is_current
    weight.data = weight.data.clone()  # a recorded step would read the old one
    assert not made[-1].is_current
    return counts


def test_rollouts_with_adapters_record_one_decoder(task: _Task, tmp_path: Path) -> None:
    values = task.settings(tmp_path, lora_r=4, train_iters=3)
    (counts,) = run_ranks(decoders_of_steps, 1, values)
    assert counts == [1, 1, 1]


def test_the_start_says_that_the_reference_is_the_policy(task: _Task, tmp_path: Path) -> None:
    cases = [
        ({"grpo_beta": 0.1}, [OWN_REFERENCE]),
        ({"grpo_beta": 0.0}, []),
        (PPO | {"kl_coef": 0.1}, [OWN_REFERENCE]),
        (PPO | {"kl_coef": 0.0}, []),
    ]
    runs = [task.settings(tmp_path, lora_r=4, **changes) for changes, _ in cases]
    assert run_ranks(log_of_references, 1, runs) == [[said for _, said in cases]]


RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
DISTRIBUTED = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}
EP2 = {"expert_model_parallel_size": 2}
SP2 = TP2 | {"sequence_parallel": True}
DEEP = {"load": "deep"}
VPP2 = PP2 | {"num_layers_per_virtual_pipeline_stage": 1}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "dp": (2, {"micro_batch_size": 1}, {"num_mini_batches": 2, "log_completions": 14}),
    "tp": (2, TP2, PPO | {"kl_target": 0.1}),
    "pp, concatenated": (2, PP2 | VARIABLE, PPO),
    "tp, completions": (2, TP2 | VARIABLE, SEVERAL | GSPO | {"mask_truncated_completions": True}),
    "tp, adapters": (2, TP2 | {"lora_r": 4}, {"lora_r": 4, "grpo_beta": 0.1}),
    "sp, temperature": (2, SP2, {"num_mini_batches": 2, "temperature": 0.7}),
    "sp, recompute": (2, SP2 | VARIABLE | RECOMPUTE, PPO),
    "sp, adapters": (2, SP2 | {"lora_r": 4}, {"lora_r": 4, "lora_dropout": 0.0}),
    "vpp": (2, VPP2, PPO | DEEP | {"critic_model": None}),
    "distributed optimizer": (2, DISTRIBUTED, PPO),
    "bf16": (2, DISTRIBUTED, {"bf16": True}),
    "bf16, vpp": (2, VPP2, DEEP | {"bf16": True}),
    "ep": (2, EP2, {"load": "experts"}),
    "etp": (2, {"expert_tensor_parallel_size": 2}, {"load": "experts"}),
    "ep, pp": (4, EP2 | PP2, {"load": "experts"}),
    "vpp, sp": (4, SP2 | VPP2 | VARIABLE, DEEP),
}


def train_all(runs: list[dict[str, Any]]) -> None:
    """Train several runs as one rank, one after the other."""
    for values in runs:
        letters.train(values)


@pytest.fixture(scope="module")
def layouts(task: _Task, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run every layout, and the same on one rank; return the options of both."""
    folder = tmp_path_factory.mktemp("layouts")
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    models = {
        "deep": letters.save_model(folder / "deep", num_hidden_layers=4),
        "experts": letters.save_model(folder / "experts", "MixtralForCausalLM", **experts),
    }
    runs: dict[int, dict[str, dict[str, Any]]] = {1: {}, 2: {}, 4: {}}
    for name, (world, layout, stage) in LAYOUTS.items():
        load = models[stage["load"]] if "load" in stage else task.model
        for ranks, more in ((1, {}), (world, layout)):
            where = folder / f"{name} {ranks}"
            saved = {"save": str(where / "saved")} if "log_completions" in stage else {}
            runs[ranks][name] = task.settings(where, **stage | more | saved | {"load": load})
    for world, few in runs.items():
        run_ranks(train_all, world, list(few.values()), timeout=600)
    return runs


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_give_the_numbers_of_one_rank(layouts: Any, name: str) -> None:
    world, _, stage = LAYOUTS[name]
    whole, parts = (letters.read_log(layouts[ranks][name]) for ranks in (1, world))
    clocks = ("elapsed time per iteration (ms)", "tokens/s", "sampling difference")
    for one, other in zip(whole, parts, strict=True):
        for key in one.keys() - set(clocks):
            assert other[key] == pytest.approx(one[key], rel=1e-3, abs=2e-5), key
        assert other["sampling difference"] < (0.05 if stage.get("bf16") else 1e-4)
    if "log_completions" in stage:
        said, again = (read_completions(layouts[ranks][name]) for ranks in (1, world))
        assert len(said) == stage["log_completions"] * len(whole)
        assert again == said


def read_completions(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a run wrote of its completions."""
    text = Path(values["save"], FILE_NAME).read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("stage", [{"ppo_epochs": 2}, PPO | {"kl_target": 0.01}])
def test_a_resumed_run_is_bit_exact(task: _Task, tmp_path: Path, stage: dict[str, Any]) -> None:
    runs = {
        name: task.settings(
            tmp_path / name,
            save=str(tmp_path / name / "saved"),
            train_iters=4,
            log_completions=3,
            **stage,
        )
        for name in ("whole", "resumed")
    }
    run_ranks(letters.train, 1, runs["whole"])
    run_ranks(letters.train, 1, runs["resumed"] | {"train_iters": 2})
    run_ranks(letters.train, 1, runs["resumed"])
    whole, resumed = (letters.read_log(values) for values in runs.values())
    for name in ("reward", "policy loss", "grad norm"):
        assert [line[name] for line in resumed] == [line[name] for line in whole]
    one, other = (read_checkpoint(Path(values["save"])) for values in runs.values())
    assert one.keys() == other.keys()
    assert all(torch.equal(values, other[name]) for name, values in one.items())
    assert any(name.startswith("critic.") for name in one) == ("stage" in stage)
    said, again = (Path(values["save"], FILE_NAME).read_text() for values in runs.values())
    assert again == said
    check_completions(read_completions(runs["whole"]))


def test_a_resumed_run_that_logs_none_drops_those_of_lost_steps(
    task: _Task, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    values = task.settings(tmp_path, save=str(saved), log_completions=2, train_iters=2)
    run_ranks(letters.train, 1, values)
    kept = (saved / FILE_NAME).read_text()
    lost = {"iteration": 3, "completion": "of a step that was killed before it was saved"}
    (saved / FILE_NAME).write_text(kept + json.dumps(lost) + "\n")
    run_ranks(letters.train, 1, values | {"log_completions": 0, "train_iters": 4})
    assert (saved / FILE_NAME).read_text() == kept
    run_ranks(letters.train, 1, values | {"train_iters": 5})
    assert [line["iteration"] for line in read_completions(values)] == [1, 1, 2, 2, 5, 5]


def check_completions(lines: list[dict[str, Any]]) -> None:
    """Check that each is what was rewarded: texts with special tokens, which count for nothing."""
    assert [line["iteration"] for line in lines] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    for line in lines:
        answer, text = line["fields"]["answer"], line["completion"]
        assert line["prompt"].startswith("<ask>") and line["prompt"].endswith(answer)
        assert line["ended"] == text.endswith("<eos>")
        for special in letters.SPECIAL:
            text = text.replace(special, "")
        assert line["reward"] == text.count(answer) / 4


PARTS = '''
def parts(prompts, completions, answer):
    """Return what makes a reward."""
    right = [text.count(letter) / 4 for text, letter in zip(completions, answer)]
    return {"right": right, "brief": [-len(text) / 16 for text in completions]}
def whole(prompts, completions, answer):
    found = parts(prompts, completions, answer)
    return [sum(each) for each in zip(*found.values())]
def by_rank(prompts, completions, answer):
    return {prompts[0][-1]: [1.0] * len(completions)}
def at_times(prompts, completions, answer):
    found = by_rank(prompts, completions, answer)
    return found.get("a", found)
'''


def test_parts_of_rewards_are_logged_and_added_up(task: _Task, tmp_path: Path) -> None:
    path = letters.write_function(tmp_path, PARTS, "parts").rpartition(":")[0]
    runs = {
        name: task.settings(tmp_path / name, reward_fn=f"{path}:{function}", **layout)
        for name, function, layout in (
            ("whole", "whole", {}),
            ("parts", "parts", {}),
            ("dp", "parts", {"micro_batch_size": 1}),
            ("pp", "parts", PP2),
        )
    }
    run_ranks(train_all, 1, [runs["whole"], runs["parts"]])
    run_ranks(train_all, 2, [runs["dp"], runs["pp"]], timeout=600)
    whole, *others = (letters.read_log(values) for values in runs.values())
    for lines in others:
        for line, expected in zip(lines, whole, strict=True):
            for name in ("reward", "reward std", "policy loss", "grad norm"):
                assert line[name] == pytest.approx(expected[name], rel=1e-3, abs=2e-5), name
            both = line["rewards/right"] + line["rewards/brief"]
            assert both == pytest.approx(line["reward"], rel=1e-6)
    wrong = task.settings(tmp_path / "wrong", micro_batch_size=1)
    with pytest.raises(RankFailed, match="rewards named . on one rank and rewards named . on an"):
        run_ranks(letters.train, 2, wrong | {"reward_fn": f"{path}:by_rank"})
    with pytest.raises(RankFailed, match="rewards named b on one rank and one list of rewards on"):
        run_ranks(letters.train, 2, wrong | {"reward_fn": f"{path}:at_times"})


BAD_UPDATE = 1
REWARDS = ((1e5, 1e5 + 1.5, 1e5 - 0.25), (1e5 + 0.5, 1e5 - 2.0))
"""The rewards of each rank: in float32 their squares differ by no more than they are rounded."""


def spoil_an_update(values: dict[str, Any]) -> tuple[list[tuple[bool, bool]], dict[str, float]]:
    """Train as one rank; the advantages of an update are not finite on rank 1.

    Returns whether the weights of actor and critic were changed by each update, and the metrics of
    REWARDS.
    """
    from mindspeed_llm.generation.rollout import Completion
    from mindspeed_llm.tasks.posttrain.launcher import AutoTrainer
    from mindspeed_llm.tasks.posttrain.online import ADVANTAGES
    from mindspeed_llm.tasks.posttrain.rollouts import Prompt, Rollout
    from mindspeed_llm.training.options import TrainOptions

    trainer: Any = AutoTrainer(TrainOptions(**values)).trainer
    update, changed = trainer.update, []
    rank = torch.distributed.get_rank()

    def weights(role: str) -> list[torch.Tensor]:
        return [p.detach().clone() for c in trainer.model(role).chunks for p in c.parameters()]

    def watched(batches: Any, stop: Any) -> Any:
        if len(changed) == BAD_UPDATE and rank == 1:
            batches = [{**batch, ADVANTAGES: batch[ADVANTAGES] * torch.nan} for batch in batches]
        before = [weights(role) for role in ("policy", "critic")]
        result = update(batches, stop)
        after = [weights(role) for role in ("policy", "critic")]
        changed.append(tuple(not all(map(torch.equal, *both)) for both in zip(before, after)))
        return result

    trainer.update = watched
    trainer.train()
    one = Prompt(0, (2,)), Completion((letters.EOS,), (0.0,)), True
    return changed, trainer.report([Rollout(*one, reward) for reward in REWARDS[rank]])


def test_the_critic_is_left_alone_where_the_actor_is(task: _Task, tmp_path: Path) -> None:
    values = task.settings(tmp_path, micro_batch_size=1, train_iters=3, **PPO)
    found = run_ranks(spoil_an_update, 2, values)
    for changed, metrics in found:
        assert changed == [(number != BAD_UPDATE,) * 2 for number in range(3)]
        rewards = [reward for few in REWARDS for reward in few]
        assert metrics["reward"] == pytest.approx(statistics.fmean(rewards), rel=1e-7)
        assert metrics["reward std"] == pytest.approx(statistics.pstdev(rewards), rel=1e-4)
    lines = letters.read_log(values)  # those with metrics
    assert [line["iteration"] for line in lines] == [1, 3]
    assert lines[-1]["number of nan iterations"] == 1


ENGINES = str(Path(__file__).parents[1] / "llm" / "other_engine.py")
OTHER = {"rollout_engine": f"{ENGINES}:make", "temperature": 0.7}


def live_weights(runs: list[dict[str, Any]]) -> list[tuple[bool, int]]:
    """Return whether the weights of each policy are, on this rank too, those of its HF files.

    And how many values this rank sent for them.
    """
    from megatron.core import parallel_state

    from mindspeed_llm.tasks.posttrain.launcher import AutoTrainer
    from mindspeed_llm.tasks.posttrain.rollout_engine import RolloutPolicy
    from mindspeed_llm.training.options import TrainOptions

    gather, sent, equal = torch.distributed.all_gather_object, [0], []

    def counting(found: list[Any], held: Any, *others: Any, **named: Any) -> None:
        if isinstance(held, list):
            sent[0] += sum(values.numel() for _, values in held)
        gather(found, held, *others, **named)

    for values in runs:
        trainer: Any = AutoTrainer(TrainOptions(**values)).trainer
        policy = RolloutPolicy(trainer.primary, trainer.setup.shape, 8, None)
        sent[0] = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "all_gather_object", counting)
            found = dict(policy.weights())
        wanted = load_file(Path(values["load"], "model.safetensors"))
        same = found.keys() == wanted.keys()
        same = same and all(torch.equal(found[name], wanted[name]) for name in wanted)
        equal.append((same, sent[0]))
        trainer._scores.close()
        parallel_state.destroy_model_parallel()
    return equal


def test_another_engine_samples_what_is_trained(task: _Task, tmp_path: Path) -> None:
    whole = task.settings(tmp_path / "one", save=str(tmp_path / "saved"), **OTHER)
    (steps,) = run_ranks(record, 1, whole)
    lines, model = grpo_steps(task.model, steps, whole)
    check_lines(whole, lines)  # also: its log-probabilities are those of training, to 1e-4
    check_weights(export(whole["save"], tmp_path / "exported"), model)
    names = ("reward", "completion length", "policy loss", "grad norm")
    layouts = {"dp": {"micro_batch_size": 1, **DISTRIBUTED}, "tp": TP2, "pp": PP2}
    runs = [task.settings(tmp_path / name, **OTHER | more) for name, more in layouts.items()]
    run_ranks(train_all, 2, runs, timeout=600)
    for values in runs:
        for one, other in zip(letters.read_log(whole), letters.read_log(values), strict=True):
            for name in names:
                assert other[name] == pytest.approx(one[name], rel=1e-3, abs=2e-5), name
            assert other["sampling difference"] < 1e-4


def test_an_engine_gets_the_weights_of_every_layout(task: _Task, tmp_path: Path) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    deep = letters.save_model(tmp_path / "deep", num_hidden_layers=4, tie_word_embeddings=True)
    moe = letters.save_model(tmp_path / "experts", "MixtralForCausalLM", **experts)
    runs = [
        task.settings(tmp_path / "run", **{"load": deep} | SP2 | VPP2),
        task.settings(tmp_path / "run", **{"load": moe} | EP2 | PP2),
        task.settings(tmp_path / "run", **{"load": moe} | EP2 | TP2 | {"sequence_parallel": True}),
        task.settings(tmp_path / "run", load=_with_mtp(tmp_path), **PP2),
    ]
    found = run_ranks(live_weights, 4, runs, timeout=600)
    assert all(same for rank in found for same, _ in rank)
    wanted = load_file(Path(moe, "model.safetensors"))
    assert sum(rank[1][1] for rank in found) == sum(each.numel() for each in wanted.values())


def _with_mtp(folder: Path) -> str:
    """Save a DeepSeek-V3 that predicts more tokens than the next."""
    groups = {"n_routed_experts": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    sizes = tiny.MODELS["deepseek3"][1] | groups | {"vocab_size": 7}
    source = letters.save_model(folder / "deepseek", "DeepseekV3ForCausalLM", **sizes)
    mtp_model(Path(source), folder / "mtp")
    return str(folder / "mtp")


def test_an_engine_that_cannot_be_used_is_one_line(task: _Task, tmp_path: Path) -> None:
    answers = (
        "returned 15 completions for 16 prompts: return one for each",
        "a completion has 0 tokens: it may have 1 to 4",
        "a completion has 2 tokens and 1 log-probabilities: return one for each token",
        "token 99: the model has 7 tokens",
        "the log-probability of token 1 is nan",
        "ranks that share a model got different completions: sample on one of them",
        "a completion is a NoneType: return Completion(tokens, log_probs)",
        "a completion goes on after token 1, which ends it",
    )
    wrong = {"rollout_engine": f"{ENGINES}:make_wrong"}
    cases = {text: wrong | {"seed": seed} for seed, text in enumerate(answers, 1)}
    cases |= {
        "MemoryError (line": {"rollout_engine": f"{ENGINES}:fails_on_rank_1"},
        "SystemExit (line": {"rollout_engine": f"{ENGINES}:exits_on_rank_1"},
        "has no function nothing": {"rollout_engine": f"{ENGINES}:nothing"},
        "there is no file": {"rollout_engine": "nowhere.py:make"},
        "give a file and a function, as in engines.py:make": {"rollout_engine": ENGINES},
        "returned a list without the method generate": {"rollout_engine": f"{_list(tmp_path)}"},
        "the weights of adapters are not merged": OTHER | {"lora_r": 4},
    }
    runs = [task.settings(tmp_path / "run", **TP2 | changes) for changes in cases.values()]
    first, second = run_ranks(refused, 2, runs)
    assert first == second
    for expected, text in zip(cases, first, strict=True):
        assert expected in text and text.startswith("--rollout-engine") and "\n" not in text


def _list(folder: Path) -> str:
    path = folder / "engines.py"
    path.write_text("def make(policy):\n    return [policy]\n")
    return f"{path}:make"


@pytest.mark.parametrize("end", [[], [letters.EOS, 3, 6], [5, 3]])
def test_a_reward_model_gives_the_scores_of_transformers(
    task: _Task, tmp_path: Path, end: list[int]
) -> None:
    """Of whole answers, which end as those of the chat template do."""
    from transformers import LlamaForSequenceClassification

    data = letters.write_prompts(tmp_path / "data")
    Path(f"{data}.summary.json").write_text(json.dumps({"answer_end_ids": end}))
    given = {"reward_model": task.critic, "data_path": (data,), "max_new_tokens": 8}
    (steps,) = run_ranks(record, 1, task.settings(tmp_path, train_iters=1, **given))
    model = LlamaForSequenceClassification.from_pretrained(task.critic, dtype=torch.float32)
    assert {one.completion[-1] == letters.EOS for one in steps[0]} == {True, False}
    for one in steps[0]:
        answer = list(one.completion)
        if end and answer[-1] == letters.EOS:
            answer[-1:] = end
        ids = torch.tensor([[*one.prompt, *answer]])
        with torch.no_grad():
            score = model.score(model.model(ids).last_hidden_state)[0, -1, 0]
        assert one.reward == pytest.approx(score.item(), abs=1e-5)


def test_the_task_is_solved(task: _Task, tmp_path: Path) -> None:
    sizes = {"global_batch_size": 8, "num_generations": 8, "micro_batch_size": 8}
    values = task.settings(tmp_path, train_iters=45, lr=3e-3, **sizes)
    run_ranks(letters.train, 1, values)
    rewards = [line["reward"] for line in letters.read_log(values)]
    assert rewards[0] < 0.2 and sum(rewards[-5:]) / 5 > 0.9


def refused(cases: list[dict[str, Any]]) -> list[str]:
    """Return the error of every run."""
    from megatron.core import parallel_state

    from mindspeed.config import ConfigError

    found = []
    for values in cases:
        with pytest.raises(ConfigError) as error:
            letters.train(values)
        found.append(str(error.value))
        parallel_state.destroy_model_parallel()
    return found


def _critic(folder: Path, layers: int) -> dict[str, Any]:
    path = folder / f"critic{layers}"
    critic = letters.save_model(path, "LlamaForSequenceClassification", num_hidden_layers=layers)
    return {"stage": "trl_ppo", "critic_model": critic}


def test_what_goes_wrong_is_one_line_on_every_rank(task: _Task, tmp_path: Path) -> None:
    broken = "def broken(**fields):\n    raise KeyError('answer')\n"
    cases = {
        "KeyError (line 2)": {"reward_fn": letters.write_function(tmp_path, broken, "broken")},
        "has no function nothing": {  # before weights are loaded
            "reward_fn": f"{tmp_path / 'broken.py'}:nothing",
            "stage": "trl_ppo",
            "critic_model": str(tmp_path / "none"),
        },
        "has no value head": {"reward_model": task.model},
        "--reward-model nowhere: does not exist": {"reward_model": "nowhere"},
        "its num_layers is 1, the policy's 2: the critic must": _critic(tmp_path, layers=1),
        "its num_layers is 3, the policy's 2: the critic must": _critic(tmp_path, layers=3),
        "16 of 16 samples are longer than --max-prompt-length 1": {"max_prompt_length": 1},
        "with its completion there may be 4": {"max_length": 4},
        "cannot be divided by it: give 1, 2 or 4": {"num_mini_batches": 3},
        "--context-parallel-size 2: --stage grpo needs whole sequences": {
            "context_parallel_size": 2
        },
        "the 1 micro-batches of an update are not a multiple": VPP2
        | {
            "load": letters.save_model(tmp_path / "deep", num_hidden_layers=4),
            "num_mini_batches": 8,
        },
    }
    runs = [task.settings(tmp_path, **changes) for changes in cases.values()]
    first, second = run_ranks(refused, 2, runs)
    assert first == second
    for expected, text in zip(cases, first, strict=True):
        assert expected in text and "\n" not in text
