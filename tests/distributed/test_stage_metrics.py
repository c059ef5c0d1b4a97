"""Every stage of post-training: the metrics that its page names, in the log and on boards."""

import json
from pathlib import Path
from typing import Any

from tests.llm import letters
from tests.llm.preferences import (
    make_pairs,
    make_steps,
    make_unpaired,
    save_llama,
    settings,
    write_pairs,
    write_steps,
    write_unpaired,
)
from tests.ranks import run_ranks

SIDES = {f"rewards/{name}" for name in ("chosen", "rejected", "margins")}
LOG_PROBS = {"logps/chosen", "logps/rejected"}
POLICY = {"reward", "reward std", "completion length", "ended", "policy loss", "entropy"}
POLICY |= {"clip fraction", "ratio", "kl", "sampling difference"}
METRICS: dict[str, set[str]] = {
    "dpo": {"lm loss", "rewards/accuracies", "sft loss"} | SIDES | LOG_PROBS,
    "simpo": {"lm loss", "rewards/accuracies"} | SIDES | LOG_PROBS,
    "kto": {"lm loss", "kl"} | SIDES | LOG_PROBS,
    "orm": {"lm loss", "accuracy"} | SIDES,
    "prm": {"lm loss", "accuracy"},
    "grpo": POLICY | {"equal rewards"},
    "trl_ppo": POLICY
    | {"value loss", "value clip fraction", "returns", "critic grad norm", "kl coef"},
}
OF_EVERY_RUN = {
    *("iteration", "consumed samples", "elapsed time per iteration (ms)", "learning rate"),
    *("global batch size", "loss scale", "grad norm", "number of skipped iterations"),
    *("number of nan iterations", "tokens/s"),
}


def train_each(runs: list[dict[str, Any]]) -> None:
    """Train several runs, one after the other, as one rank."""
    for values in runs:
        letters.train(values)


def make_runs(folder: Path) -> list[dict[str, Any]]:
    """Return a run of one step of every stage."""
    model, asked = save_llama(folder / "hf"), letters.save_model(folder / "letters")
    pairs = write_pairs(folder / "pairs", make_pairs(4))
    judged = [one._replace(label=bool(n % 2)) for n, one in enumerate(make_unpaired(4))]
    data = {
        "kto": write_unpaired(folder / "judged", judged),
        "prm": write_steps(folder / "steps", make_steps(4)),
    }
    prompts, function = letters.write_prompts(folder / "prompts"), letters.write_function(folder)
    changes: dict[str, dict[str, Any]] = {"dpo": {"pref_ftx": 0.5}, "grpo": {"grpo_beta": 0.1}}
    runs = []
    for stage in METRICS:
        more = {"stage": stage, "train_iters": 1, "save": str(folder / stage)}
        more |= {"report_to": ("tensorboard",), "log_file": None} | changes.get(stage, {})
        if stage in ("grpo", "trl_ppo"):
            more |= {"reward_fn": function} | ({} if stage == "grpo" else {"num_generations": 8})
            runs.append(letters.settings(asked, prompts, folder, **more))
        else:
            runs.append(settings(model, data.get(stage, pairs), folder, **more))
    return runs


def test_every_stage_logs_its_metrics_everywhere(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_ranks(train_each, 1, make_runs(tmp_path))
    for stage, expected in METRICS.items():
        (line,) = map(json.loads, (tmp_path / stage / "log.jsonl").read_text().splitlines())
        assert line.keys() - OF_EVERY_RUN == expected, stage
        board = EventAccumulator(str(tmp_path / stage / "tensorboard"))
        board.Reload()
        assert set(board.Tags()["scalars"]) | {"iteration"} == set(line), stage
