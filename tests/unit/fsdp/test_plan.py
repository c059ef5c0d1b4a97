"""Plans of small models: ownership of parameters, sizes, errors, the tree."""

import pytest
import torch
from torch import nn

from mindspeed.config import ConfigError, build
from mindspeed.fsdp import FsdpOptions, make_plan
from mindspeed.fsdp.plan import describe


class Decoder(nn.Module):
    """Embedding, three blocks, a head that may be tied."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 4), nn.Linear(4, 11, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 3), nn.ReLU()) for _ in range(3))
        if tied:
            self.head.weight = self.embed.weight


def plan(model: nn.Module, ranks: int = 2, **values: object):
    return make_plan(model, build(FsdpOptions, {"sharding_size": "auto", **values}), ranks)


def test_the_innermost_unit_owns_a_parameter():
    made = plan(Decoder(), sub_modules_to_wrap=["blocks.{0-1}", "blocks.1.0"])
    owned = {unit.name: unit.parameters for unit in made.units}
    assert list(owned) == ["", "blocks.0", "blocks.1", "blocks.1.0"]
    assert owned["blocks.1"] == ()
    assert owned["blocks.1.0"] == ("blocks.1.0.weight", "blocks.1.0.bias")
    assert "blocks.2.0.weight" in owned[""]


def test_shards_count_padding_and_all_gathers_count_the_compute_dtype():
    made = plan(Decoder(), sub_modules_to_wrap=["blocks.{*}"], param_dtype="bf16")
    block = made.units[1]
    assert block.bytes_per_rank == 4 * (2 * 4 + 2)  # three rows are two and one, padded
    assert block.gathered_bytes == 2 * (3 * 4 + 3)


def test_nothing_is_allocated_on_meta():
    with torch.device("meta"):
        made = plan(nn.Sequential(nn.Linear(1 << 20, 1 << 20)), ranks=8)
    assert made.bytes_per_rank == 4 * ((1 << 40) + (1 << 20)) // 8


def test_units_are_in_definition_order():
    made = plan(Decoder(), sub_modules_to_wrap=["head", "blocks.{*}", "embed"])
    assert made.forward_order == ("embed", "head", "blocks.0", "blocks.1", "blocks.2")


def test_tied_weights_must_be_in_one_unit():
    assert (
        plan(Decoder(tied=True), sub_modules_to_wrap=["blocks.{*}"]).units[0].bytes_per_rank
        == 4 * 6 * 4
    )
    with pytest.raises(ConfigError, match="embed.weight and head.weight are one tied parameter"):
        plan(Decoder(tied=True), sub_modules_to_wrap=["embed"])


def test_a_module_with_two_names_is_one_unit():
    model = Decoder()
    model.again = model.blocks[1]
    made = plan(model, sub_modules_to_wrap=["again", "blocks.1"])
    assert [unit.name for unit in made.units] == ["", "blocks.1"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sub_modules_to_wrap": ["blocks"]}, "a ModuleList, which is never called itself"),
        ({"recompute_modules": ["blocks"]}, "write blocks.{*}"),
        ({"recompute_modules": ["block.{*}"]}, "recompute_modules: block.{*} matches no module"),
        ({"ignored_modules": ["blocks"], "sub_modules_to_wrap": ["blocks.{*}"]}, "one of the two"),
        ({"ignored_modules": [""]}, "the root is to be sharded"),
    ],
)
def test_impossible_plans_raise(values, message):
    with pytest.raises(ConfigError) as caught:
        plan(Decoder(), **values)
    assert message in str(caught.value)


def test_scalar_parameters_raise():
    model = Decoder()
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ConfigError, match="scale is a scalar"):
        plan(model)


class Odd(nn.Module):
    """Has one parameter, or a module with one, that cannot be sharded."""

    def __init__(self, **parts) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        for name, part in parts.items():
            setattr(self, name, part)


def hooked():
    layer = nn.Linear(4, 4)
    layer.weight.register_hook(lambda gradient: gradient * 0)
    return layer


def hooked_after():
    layer = nn.Linear(4, 4)
    layer.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    return layer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.LazyLinear(3), r"part.weight has no shape yet \(LazyLinear\): give its module"),
        (lambda: nn.Embedding(4, 2, sparse=True), "part has sparse gradients .*sparse=False"),
        (lambda: nn.EmbeddingBag(4, 2, sparse=True), "part has sparse gradients"),
        (lambda: nn.Parameter(torch.zeros(0, 4)), r"part has no elements \(shape \(0, 4\)\)"),
        (lambda: nn.Parameter(torch.ones(2, 3).T), "part is not contiguous in memory"),
        (
            lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
            "part.weight is not contiguous .*channels_last",
        ),
        (hooked, "part.weight has a hook on its gradient, which sharding would silently drop"),
        (hooked_after, "part.bias has a hook"),
    ],
)
def test_parameters_that_cannot_be_sharded_raise(make, message):
    with pytest.raises(ConfigError, match=message):
        plan(Odd(part=make()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: nn.ParameterList([nn.Parameter(torch.ones(2))]),
            "a ParameterList, .*: leave it out",
        ),
        (lambda: nn.ParameterDict({"a": torch.ones(2)}), "a ParameterDict, .*: leave it out"),
        (nn.Module, "a Module, which is never called itself: leave it out"),
    ],
)
@pytest.mark.parametrize("key", ["sub_modules_to_wrap", "recompute_modules"])
def test_modules_without_a_forward_raise(key, make, message):
    part = make()
    with pytest.raises(ConfigError, match=f"{key}: part is {message}"):
        plan(Odd(part=part), **{key: ["part"]})
    part.forward = lambda x: x  # one of this instance is called
    assert plan(Odd(part=part), **{key: ["part"]})


def test_frozen_ones_may_have_what_only_gradients_cannot():
    frozen = Odd(a=hooked(), b=nn.Embedding(4, 2, sparse=True), c=nn.Parameter(torch.zeros(0, 4)))
    assert plan(frozen.requires_grad_(False))


def test_trained_parameters_of_two_dtypes_in_one_unit_raise():
    model = Decoder()
    model.blocks[1].bfloat16()
    with pytest.raises(ConfigError, match=r"is torch.bfloat16, both trained as parts of the root"):
        plan(model)
    assert plan(model, sub_modules_to_wrap=["blocks.{1}"])
    model.blocks[1].requires_grad_(False)
    assert plan(model)


def test_trainable_ignored_parameters_are_listed():
    assert plan(Decoder(), ignored_modules=["head"]).trainable_ignored == ("head.weight",)


def test_the_tree_expands_where_modules_differ_and_sums_up():
    model = Decoder()
    values = {"sub_modules_to_wrap": ["blocks.{*}"], "recompute_modules": ["blocks.2"]}
    made = plan(model, **values, ignored_modules=["head"])
    rows = describe(model, made)
    assert [(row.depth, row.name, row.marks) for row in rows] == [
        (0, "", ("sharded",)),
        (1, "embed", ()),
        (1, "head", ("ignored",)),
        (1, "blocks", ()),
        (2, "{0-1}", ("sharded",)),
        (2, "2", ("sharded", "recomputed")),
    ]
    assert rows[0].bytes_per_rank == made.bytes_per_rank
