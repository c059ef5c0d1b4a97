"""The options of all features are one object, whichever way they come in."""

import argparse

import hypothesis.strategies as st
import yaml
from hypothesis import given

from mindspeed.config import add_flags, build, from_namespace, load_yaml
from mindspeed.features.registry import registry

VALUES = st.fixed_dictionaries(
    {},
    optional={
        "optimization_level": st.sampled_from([0, 1, 2]),
        "noop_layers": st.lists(st.integers(0, 50), unique=True, max_size=4),
        "use_fused_swiglu": st.booleans(),
        "use_fused_rmsnorm": st.booleans(),
        "npu_deterministic": st.booleans(),
    },
)

UNDECIDED = {feature.enabled_by for feature in registry() if feature.default_devices}


def command_line(values):
    for field, value in values.items():
        flag = "--" + field.replace("_", "-")
        if isinstance(value, bool):
            off = ["--no-" + flag[2:]] if field in UNDECIDED else []
            yield from [flag] if value else off
        elif isinstance(value, list):
            yield from [flag, ",".join(map(str, value))]
        else:
            yield f"{flag}={value}"


@given(VALUES)
def test_flags_yaml_and_keywords_are_equal(tmp_path_factory, values):
    options_class = registry().options_class
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, options_class)
    from_flags = from_namespace(options_class, parser.parse_args(list(command_line(values))))
    file = tmp_path_factory.getbasetemp() / "features.yaml"
    file.write_text(yaml.safe_dump(values))
    assert from_flags == load_yaml(file, options_class) == build(options_class, values)


def test_level_comes_first_then_the_features_by_level():
    fields = list(registry().options_class.model_fields)
    assert fields[0] == "optimization_level"
    owners = {field: feature for feature in registry() for field in feature.fields}
    levels = [owners[field].level for field in fields[1:]]
    assert levels == sorted(levels)
