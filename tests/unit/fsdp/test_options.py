"""The file: the document's example, its defaults, and what is refused."""

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


def test_the_file_of_the_document_is_read(tmp_path):
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
    ("text", "said"),
    [
        ("sharding_sise: 2", "unknown key sharding_sise: 2; did you mean sharding_size?"),
        ("sharding_size: 0", "give auto (all ranks) or a whole number of at least 1"),
        ("sharding_size: true", "sharding_size: true is not allowed"),
        ("sharding_size: all", "sharding_size: all is not allowed"),
        ("param_dtype: bf17", "give bf16, fp16 or fp32"),
        ("use_reentrant: yes please", "give true or false"),
        ("reshard_after_forward: 1", "give true, false, or the number of ranks"),
        ("num_to_forward_prefetch: -1", "greater than or equal to 0"),
        ("num_to_forward_prefetch: '2'", "give a whole number"),
        ("ignored_modules: image_encoder", "give a list, each element text"),
        ("recompute_modules: ['layers.{']", "a brace is not closed or not opened"),
        ("expert_parallel_size: 2", "needs moe_modules"),
    ],
)
def test_slips_are_told(tmp_path, text, said):
    path = tmp_path / "fsdp2_config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_yaml(path, FsdpOptions)
    assert str(caught.value).startswith(f"{path}: ") and said in str(caught.value)


@pytest.mark.parametrize(
    ("size", "ranks", "layout"), [("auto", 8, (1, 8)), (1, 8, (8, 1)), (2, 8, (4, 2))]
)
def test_layout(size, ranks, layout):
    assert FsdpOptions(sharding_size=size).layout(ranks) == layout


def test_a_part_to_reshard_to_divides_the_shards():
    options = build(FsdpOptions, {"sharding_size": "auto", "reshard_after_forward": 4})
    assert options.layout(8) == (1, 8)
    with pytest.raises(ConfigError, match="use 2, 3, true, false"):
        options.layout(6)
