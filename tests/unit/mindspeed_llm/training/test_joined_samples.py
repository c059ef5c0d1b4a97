"""Which models and options take rows of one sample only."""

from typing import Any

import pytest
from packaging.version import Version

import mindspeed.megatron_adaptor  # noqa: F401
from mindspeed.compat import megatron
from mindspeed.config import ConfigError
from mindspeed_llm.models.config import RotaryConfig
from mindspeed_llm.tasks.posttrain.rows import Rows
from mindspeed_llm.training.joined_samples import has_shortest_rows, why_not_joined
from mindspeed_llm.training.options import TrainOptions
from tests.unit.mindspeed_llm.training.shapes import DENSE, LATENT

YARN = {"mla": LATENT, "rotary": RotaryConfig(scaling="yarn")}
CP2 = {"context_parallel_size": 2}


@pytest.mark.parametrize(
    ("options", "shape", "expected"),
    [
        ({}, {}, None),
        (CP2, {}, None),
        ({}, YARN, None),
        ({"transformer_impl": "local"}, {}, "--transformer-impl local"),
        ({}, {"mtp_num_layers": 1}, "multi-token prediction of this megatron-core"),
        (CP2, YARN, "YaRN of this megatron-core, with latent attention"),
    ],
)
def test_what_takes_one_sample(
    options: dict[str, Any], shape: dict[str, Any], expected: str | None
) -> None:
    found = why_not_joined(TrainOptions(**options), DENSE.model_copy(update=shape))
    if expected and "megatron-core" in expected and megatron.version() >= Version("0.16"):
        expected = None
    assert found is None if expected is None else str(found).startswith(expected)


@pytest.mark.parametrize(
    ("options", "shape", "expected"),
    [
        ({}, {}, False),
        ({"variable_seq_lengths": True}, {}, False),
        ({"transformer_impl": "local"}, {}, False),
        ({"transformer_impl": "local", "variable_seq_lengths": True}, {}, True),
        ({}, {"attention_sinks": True}, True),
    ],
)
def test_rows_that_no_flag_makes_shorter(
    options: dict[str, Any], shape: dict[str, Any], expected: bool
) -> None:
    assert has_shortest_rows(TrainOptions(**options), DENSE.model_copy(update=shape)) == expected


class _PackedData:
    is_neat, longest = True, 8
    facts: dict[str, int] = {}


def test_packed_rows_are_refused_in_one_line() -> None:
    options = TrainOptions(transformer_impl="local")
    local = "--transformer-impl local takes rows of one sample only: use transformer_engine"
    with pytest.raises(ConfigError, match=f"^packed samples: {local}$"):
        Rows.of(options, DENSE, [_PackedData()], may_pack=True)  # type: ignore[list-item]
