"""The pattern language against a direct interpretation, and its errors."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed.config import ConfigError
from mindspeed.fsdp.patterns import Pattern, child_names, fold

PATHS = ["", "model", "model.norm", "model.layers"]
PATHS += [f"model.layers.{n}" for n in range(12)]
PATHS += [f"model.layers.{n}.{name}" for n in range(12) for name in ("mlp", "attention")]
PATHS += [f"model.layers.{n}.mlp.experts" for n in range(12)]
PATHS += [f"model.layers.{n}.mlp.experts.{m}" for n in range(12) for m in range(3)]
TREE = child_names(PATHS)

numbers = st.sets(st.integers(0, 11), min_size=1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [""]),
        ("model.norm", ["model.norm"]),
        ("model.layers.{*}", [f"model.layers.{n}" for n in range(12)]),
        ("model.layers.{0-2}", [f"model.layers.{n}" for n in range(3)]),
        ("model.layers.{1,3,5}", [f"model.layers.{n}" for n in (1, 3, 5)]),
        ("model.layers.{ 0 - 1 , 10 }", [f"model.layers.{n}" for n in (0, 1, 10)]),
        ("model.layers.{0-1,1,0}.mlp", ["model.layers.0.mlp", "model.layers.1.mlp"]),
        ("model.{*}", ["model.norm", "model.layers"]),
        ("{*}.la{*}rs.7", ["model.layers.7"]),
        ("model.layers.1{0-1}", ["model.layers.10", "model.layers.11"]),
        (
            "model.layers.{0,11}.mlp.experts.{1-2}",
            [f"model.layers.{n}.mlp.experts.{m}" for n in (0, 11) for m in (1, 2)],
        ),
    ],
)
def test_examples(text, expected):
    assert Pattern(text).match(TREE) == expected


@given(numbers, st.sets(st.integers(0, 2), min_size=1), st.randoms())
def test_any_notation_of_numbers_matches_those_numbers(layers, experts, random):
    text = f"model.layers.{write(layers, random)}.mlp.experts.{write(experts, random)}"
    pairs = itertools.product(sorted(layers), sorted(experts))
    assert Pattern(text).match(TREE) == [f"model.layers.{n}.mlp.experts.{m}" for n, m in pairs]


def write(numbers, random):
    """Write numbers as items of a brace: singles and ranges, overlapping, out of order, spaced."""
    items = [str(number) for number in numbers]
    for first, last in itertools.combinations(sorted(numbers), 2):
        if set(range(first, last)) <= numbers:
            items.append(f"{first}-{last}")
    random.shuffle(items)
    return "{" + random.choice([",", ", ", " , "]).join(items) + "}"


@given(numbers, st.integers(12, 2000))
def test_every_number_must_exist(some, beyond):
    listed = ",".join(map(str, [*some, beyond]))
    with pytest.raises(ConfigError, match=rf"model\.layers has no {beyond}, only \{{0-11\}}"):
        Pattern(f"model.layers.{{{listed}}}").match(TREE)


@given(st.sets(st.sampled_from(PATHS), min_size=1))
def test_matching_inverts_folding(paths):
    found = [path for text in fold(sorted(paths)) for path in Pattern(text).match(TREE)]
    assert sorted(found) == sorted(paths)


@given(st.text("mo{}*-,.0123 del", max_size=20))
def test_any_text_matches_or_raises_a_one_line_error(text):
    try:
        found = Pattern(text).match(TREE)
    except ConfigError as error:
        assert text in str(error) and "\n" not in str(error)
    else:
        assert found and set(found) <= set(PATHS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model.layer.{*}", "matches no module: model has no layer; did you mean layers?"),
        ("modl.layers.{*}", "the model has no modl; did you mean model?"),
        ("model.layers.{0-1}.mlpp", "model.layers.{0-1} has no mlpp; did you mean mlp?"),
        ("model.norm.{*}", "model.norm has no {*}; it has no submodules"),
        ("model.layers.{10-13}", "model.layers has no 12-13, only {0-11}"),
        ("model.layers.{5-2}", "5-2 is descending: write 2-5"),
        ("model.layers.{}", "{} contains 'nothing': give *, a number, or a range like 0-23"),
        ("model.layers.{a}", "{a} contains 'a'"),
        ("model.layers.{1", "unbalanced braces"),
        ("model.layers.1}", "unbalanced braces"),
        ("model..norm", "empty name between or beside dots"),
        ("model.layers.{0-99999999}", "too long"),
    ],
)
def test_errors_name_the_position(text, message):
    with pytest.raises(ConfigError) as caught:
        Pattern(text).match(TREE)
    assert message in str(caught.value)
