"""The learning rate, against Megatron's own scheduler."""

from types import SimpleNamespace
from typing import Any

import pytest

import mindspeed.megatron_adaptor  # noqa: F401
from mindspeed.config import ConfigError
from mindspeed.training.schedule import make_schedule
from mindspeed_llm.training.options import TrainOptions

STEPS = 40


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize(
    ("style", "wsd_style"),
    [
        ("constant", "linear"),
        ("linear", "linear"),
        ("cosine", "linear"),
        ("WSD", "linear"),
        ("WSD", "cosine"),
        ("WSD", "exponential"),
    ],
)
def test_rates_are_megatrons(style: str, wsd_style: str, warmup: int) -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    group: dict[str, Any] = {"lr": 0.0, "wd_mult": 0.0, "lr_mult": 1.0, "weight_decay": 9.0}
    theirs = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[dict(group)]),
        init_lr=1e-6,
        max_lr=1e-3,
        min_lr=1e-5,
        lr_warmup_steps=warmup,
        lr_decay_steps=30,
        lr_decay_style=style,
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=STEPS,
        wd_incr_style="constant",
        wsd_decay_steps=8,
        lr_wsd_decay_style=wsd_style,
    )
    options = TrainOptions(
        lr=1e-3,
        min_lr=1e-5,
        lr_warmup_init=1e-6,
        lr_warmup_iters=warmup,
        lr_decay_iters=30,
        lr_decay_style=style,
        lr_wsd_decay_iters=8,
        lr_wsd_decay_style=wsd_style,
        weight_decay=0.1,
    )
    ours = make_schedule(options, STEPS)
    optimizer = SimpleNamespace(param_groups=[dict(group)])
    for step in range(STEPS):
        rate = ours.apply(optimizer, step)
        assert rate == pytest.approx(theirs.optimizer.param_groups[0]["lr"], rel=1e-12), step
        assert optimizer.param_groups[0]["lr"] == rate
        assert optimizer.param_groups[0]["weight_decay"] == 0.0
        theirs.step(1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr_warmup_iters": 40}, "leaves none"),
        ({"min_lr": 1.0}, "--min-lr 1"),
        ({"lr_warmup_iters": 1, "lr_warmup_fraction": 0.1}, "one of"),
    ],
)
def test_impossible_schedules_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_schedule(TrainOptions(lr=1e-3, **changes), STEPS)
