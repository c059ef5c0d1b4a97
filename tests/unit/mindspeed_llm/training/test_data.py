"""What training says of options of preprocessing where its data is token files."""

import logging

import pytest

from mindspeed_llm.training.data import token_prefixes
from mindspeed_llm.training.options import TrainOptions


@pytest.mark.parametrize(
    ("stage", "flags"),
    [("prm", "--placeholder-token"), ("sft", "--placeholder-token, --reward-tokens")],
)
def test_reward_tokens_have_an_effect_on_tokens_of_steps(caplog, stage, flags):
    """The softmax over verdicts is restricted to them."""
    options = TrainOptions(
        load="m", data_path=("d",), stage=stage, placeholder_token="x", reward_tokens=("+", "-")
    )
    with caplog.at_level(logging.INFO):
        assert token_prefixes(options, "", None, None) == ("d",)
    assert caplog.messages == [f"{flags}: no effect, --data-path names token files"]
