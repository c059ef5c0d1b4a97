"""The example of the document, the defaults, and errors for wrong values."""

import pytest

from mindspeed.config import ConfigError, build, load_yaml
from mindspeed.fsdp import FsdpOptions

DOCUMENT = """\
sharding_size: auto
sub_modules_to_wrap:
  - "text_decoder.output_layer"
  - "text_decoder.embedding"
  - "text_decoder.rotary_pos_emb"
  - "text_decoder.decoder.layers.{*}"
param_dtype: "bf16"
reduce_dtype: "fp32"
cast_forward_inputs: True
ignored_modules:
  - "image_encoder"
recompute_modules:
  - "text_decoder.decoder.layers.{*}"
num_to_forward_prefetch: 2
num_to_backward_prefetch: 2
offload_to_cpu: False
"""


def test_the_example_of_the_document_loads(tmp_path):
    path = tmp_path / "fsdp2_config.yaml"
    path.write_text(DOCUMENT)
    options = load_yaml(path, FsdpOptions)
    assert options.sharding_size == "auto"
    assert options.sub_modules_to_wrap[-1] == "text_decoder.decoder.layers.{*}"
    assert (options.param_dtype, options.reduce_dtype, options.output_dtype) == (
        "bf16",
        "fp32",
        None,
    )
    assert options.num_to_backward_prefetch == 2


def test_defaults_are_those_of_the_document():
    options = FsdpOptions()
    assert options.sharding_size == 1
    assert options.use_reentrant is True
    assert options.offload_to_cpu is options.pin_memory is False
    assert (options.num_to_forward_prefetch, options.num_to_backward_prefetch) == (0, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sharding_sise: 2", "unknown key sharding_sise: 2; did you mean sharding_size?"),
        ("sharding_size: 0", "give auto (all ranks) or an integer of at least 1"),
        ("sharding_size: true", "sharding_size: true is not allowed"),
        ("sharding_size: all", "sharding_size: all is not allowed"),
        ("param_dtype: bf17", "give bf16, fp16 or fp32"),
        ("use_reentrant: yes please", "give true or false"),
        ("reshard_after_forward: 1", "give true, false, or the number of ranks"),
        ("num_to_forward_prefetch: -1", "greater than or equal to 0"),
        ("num_to_forward_prefetch: '2'", "give a whole number"),
        ("ignored_modules: image_encoder", "give a list, each element text"),
        ("recompute_modules: ['layers.{']", "unbalanced braces"),
        ("expert_parallel_size: 2", "needs moe_modules"),
    ],
)
def test_wrong_values_name_the_file_and_the_allowed_values(tmp_path, text, message):
    path = tmp_path / "fsdp2_config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_yaml(path, FsdpOptions)
    assert str(caught.value).startswith(f"{path}: ") and message in str(caught.value)


@pytest.mark.parametrize(
    ("size", "world_size", "shape"), [("auto", 8, (1, 8)), (1, 8, (8, 1)), (2, 8, (4, 2))]
)
def test_mesh_shape(size, world_size, shape):
    assert FsdpOptions(sharding_size=size).mesh_shape(world_size) == shape


def test_reshard_after_forward_divides_the_shards():
    options = build(FsdpOptions, {"sharding_size": "auto", "reshard_after_forward": 4})
    assert options.mesh_shape(8) == (1, 8)
    with pytest.raises(ConfigError, match="use 2, 3, true, false"):
        options.mesh_shape(6)
