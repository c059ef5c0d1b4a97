"""Options of post-training that can never work are refused before anything is loaded."""

from typing import Any

import pytest

from mindspeed.config import ConfigError
from mindspeed_llm.training.options import TrainOptions, check

GIVEN = {"load": "m", "data_path": ("d",), "train_iters": 1, "lr": 1e-5, "stage": "grpo"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "--reward-fn is missing"),
        ({"reward_fn": "a.py:f", "reward_model": "m"}, "exclude each other"),
        ({"reward_fn": "a.py:f", "num_generations": 1}, "--num-generations 1: give 2 or more"),
        ({"reward_fn": "a.py:f", "temperature": 0.0}, "--temperature 0"),
        ({"reward_fn": "a.py:f", "top_p": 0.0}, "--top-p 0"),
        ({"reward_fn": "a.py:f", "clip_ratio": float("nan")}, "--clip-ratio"),
        ({"reward_fn": "a.py:f", "max_new_tokens": 0}, "--max-new-tokens 0: give 1 or more"),
        ({"reward_fn": "a.py:f", "reward_timeout": 6000.0}, "--distributed-timeout-minutes"),
        ({"reward_fn": "a.py:f", "critic_model": "m"}, "--critic-model m: is for --stage trl_ppo,"),
        ({"reward_fn": "a.py:f", "stage": "sft"}, "is for --stage trl_ppo and grpo, not sft: drop"),
        (
            {"reward_fn": "a.py:f", "kl_coef": 0.1},
            "--kl-coef 0.1: is for --stage trl_ppo, not",
        ),
        (
            {"reward_fn": "a.py:f", "ref_model": "m"},
            "--ref-model m: has no effect with --grpo-beta 0",
        ),
        (
            {"reward_fn": "a.py:f", "stage": "trl_ppo", "kl_coef": 0.0, "kl_target": 0.1},
            "--kl-target 0.1: has no effect with --kl-coef 0: drop it, or give a weight above 0",
        ),
        (
            {"reward_fn": "a.py:f", "rollout_engine": "a.py:f", "rollout_batch_size": 2},
            "--rollout-batch-size 2: has no effect with --rollout-engine",
        ),
        ({"reward_fn": "a.py:f", "missing_eos_penalty": float("nan")}, "--missing-eos-penalty"),
        ({"reward_fn": "a.py:f", "log_completions": -1}, "--log-completions -1: give "),
        ({"reward_fn": "a.py:f", "log_completions": 2}, "its file is in --save, which is missing"),
        ({"stage": "dpo", "simpo_beta": 2.0}, "--simpo-beta 2.0: is for --stage simpo, not dpo"),
        (
            {"stage": "kto", "pref_ftx": 0.1},
            "--pref-ftx 0.1: is for --stage dpo and simpo, not",
        ),
        (
            {"stage": "kto", "kto_desirable_weight": 0.0, "kto_undesirable_weight": 0.0},
            "--kto-desirable-weight 0 and --kto-undesirable-weight 0: nothing would be trained: ",
        ),
        (
            {"stage": "dpo", "no_overlap_reference": True, "precompute_ref_log_probs": True},
            "--no-overlap-reference: has no effect with --precompute-ref-log-probs, which runs",
        ),
        ({"stage": "orm", "no_overlap_reference": True}, "is for --stage dpo and kto, not orm"),
        ({"stage": "orm", "no_post_layer_norm": True}, "follows the final norm"),
        (
            {"stage": "dpo", "calculate_per_token_loss": True},
            "--calculate-per-token-loss: is for pretraining and --stage sft and prm, not dpo: drop",
        ),
        (
            {"reward_fn": "a.py:f", "calculate_per_token_loss": True},
            "not grpo: drop it, and give --grpo-loss-type dapo",
        ),
        ({"stage": "sft", "no_scale_rewards": True}, "--no-scale-rewards: is for --stage grpo"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(TrainOptions(**GIVEN | changes))
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_accepted() -> None:
    check(TrainOptions(**GIVEN, reward_fn="a.py:f"))
    check(TrainOptions(**GIVEN | {"stage": "kto", "kto_desirable_weight": 0.0}))
    for stage in ("pretraining", "sft", "prm"):
        tokens = TrainOptions(**GIVEN | {"stage": "sft", "calculate_per_token_loss": True})
        check(tokens, stage)
    check(TrainOptions(**GIVEN | {"stage": "trl_ppo", "reward_model": "m", "ref_model": "m"}))
