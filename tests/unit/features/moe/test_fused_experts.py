"""What fused experts do not serve: the check, the fallback, its warning and the page are one table.

`python -m tests.unit.features.moe.test_fused_experts` writes the table of the page.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from mindspeed.config import ConfigError, Spelling
from mindspeed.features.base import Context
from mindspeed.features.moe.fused_experts import TABLE, MoeFusedExperts
from mindspeed.moe.local_dispatcher import LocalDispatcher

PAGE = Path(__file__).resolve().parents[4] / "docs" / "features" / "moe_fused_experts.md"
SERVED = {"num_experts": 8, "moe_grouped_gemm": True, "swiglu": True, "add_bias_linear": False}
OF_EXPERTS = {  # a value that is not served, and what the error says
    "add_bias_linear": (True, "add --disable-bias-linear"),
    "quick_geglu": (True, "use --swiglu for --quick-geglu"),
    "swiglu": (False, "add --swiglu"),
    "glu_linear_offset": (1.0, "drop --glu-linear-offset"),
    "activation_func_clamp_value": (7.0, "drop --activation-func-clamp-value"),
    "moe_mlp_glu_interleave_size": (32, "drop --moe-mlp-glu-interleave-size"),
    "use_te_activation_func": (True, "drop --use-te-activation-func"),
    "moe_apply_probs_on_input": (True, "drop --moe-apply-probs-on-input"),
    "fp8": ("hybrid", "drop --fp8-format"),
    "fp4": ("e2m1", "drop --fp4-format"),
    "activation_func_fp8_input_store": (True, "drop --activation-func-fp8-input-store"),
    "offload_modules": ("moe_act", "drop expert_fc1 and moe_act of --offload-modul"),
    "moe_use_legacy_grouped_gemm": (True, "drop --moe-use-legacy-grouped-gemm"),
}
BESIDE = {  # what Megatron has where it has such a value
    "quick_geglu": {"swiglu": False},
    "offload_modules": {"fine_grained_activation_offloading": True},
}
OF_DISPATCHER = {
    "moe_expert_capacity_factor": 1.0,
    "moe_router_padding_for_fp8": True,
    "moe_router_padding_for_quantization": True,
    "overlap_moe_expert_parallel_comm": True,
    "enable_cuda_graph": True,
    "external_cuda_graph": True,
    "cuda_graph_impl": "local",
}


def page():
    """Return the page with its table written from the rows."""
    lines = ["| Megatron's argument | needed instead | what stays Megatron's |", "|---|---|---|"]
    for row in TABLE:
        need = re.sub(r"--[a-z0-9-]+", r"`\g<0>`", row.need)
        lines.append(f"| `{row.argument}` | {need} | {row.part} |")
    table = "\n".join(["<!-- table -->", *lines, "<!-- /table -->"])
    return re.sub("<!-- table -->.*<!-- /table -->", table, PAGE.read_text(), flags=re.DOTALL)


def test_the_page_has_the_table():
    assert PAGE.read_text() == page(), __doc__


def test_every_row_is_tried_here():
    parts = {"experts": OF_EXPERTS, "dispatcher": OF_DISPATCHER}
    for part, tried in parts.items():
        assert [row.argument for row in TABLE if row.part == part] == list(tried)
    assert {row.part for row in TABLE} == set(parts)


def check(**arguments):
    feature = MoeFusedExperts()
    options = feature.Options(moe_fused_experts=True)
    feature.check(options, Context(Spelling.FLAG, SERVED | arguments))


@pytest.mark.parametrize("argument", OF_EXPERTS)
def test_what_experts_do_not_serve_is_refused_at_the_start(argument):
    check()
    value, said = OF_EXPERTS[argument]
    with pytest.raises(ConfigError, match=f"--moe-fused-experts needs .*{said}.*, or drop --moe-f"):
        check(**{argument: value}, **BESIDE.get(argument, {}))


def test_what_only_the_dispatcher_does_not_serve_is_accepted():
    check(**OF_DISPATCHER)


def test_what_has_no_effect_is_accepted():
    check(offload_modules=["core_attn", "moe_act"])
    check(offload_modules=["core_attn"], fine_grained_activation_offloading=True)
    check(offload_modules="core_attn", fine_grained_activation_offloading=True)
    with pytest.raises(ConfigError, match="drop expert_fc1 and moe_act"):
        check(offload_modules=["core_attn", "moe_act"], fine_grained_activation_offloading=True)


def built(target, init, is_requested=True):
    """Return a class whose constructor is `init` in the wrapper that the feature puts there."""
    feature = MoeFusedExperts()
    patches = feature.patches(feature.Options(moe_fused_experts=is_requested))
    [wrap] = [patch.value for patch in patches if patch.target.endswith(target)]
    return type("Built", (), {"__init__": wrap(init)})


def config(**fields):
    """Return what Megatron's config has made of the arguments that are served."""
    if fields.pop("swiglu", True) is False:
        fields["activation_func"] = F.gelu
    served = {"gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False}
    sizes = {"num_moe_experts": 8, "expert_tensor_parallel_size": 1, "cuda_graph_impl": "none"}
    return SimpleNamespace(params_dtype=torch.bfloat16, **served | sizes | fields)


def init_experts(self, config):
    self.config, self.linear_fc1, self.linear_fc2 = config, None, None


@pytest.mark.parametrize("is_requested", [True, False])
@pytest.mark.parametrize("argument", OF_EXPERTS)
def test_experts_that_are_built_with_it_are_reported_once(argument, is_requested, caplog):
    value, said = OF_EXPERTS[argument]
    kind = built("TEGroupedMLP.__init__", init_experts, is_requested)
    fields = {argument: value} | BESIDE.get(argument, {})
    layers = [kind(config(**fields)) for _ in range(2)]
    assert [layer.fused_linears for layer in layers] == [None] * 2
    said = f"--moe-fused-experts has no effect on experts of this model: it needs .*{said}"
    assert len(caplog.messages) == is_requested
    assert all(re.match(said, line) for line in caplog.messages)


def test_linears_of_other_classes_are_reported(caplog):
    assert built("TEGroupedMLP.__init__", init_experts)(config()).fused_linears is None
    assert "linears of the Transformer Engine socket" in caplog.text


def init_layer(self, config):
    linear = SimpleNamespace(in_features=64, out_features=128)
    self.config = config
    self.experts = SimpleNamespace(fused_linears=(object, object), linear_fc2=linear)
    self.num_local_experts, self.shared_expert_overlap = 8, False
    self.token_dispatcher = "Megatron's"


def test_the_dispatcher_stays_megatrons_for_its_rows_only():
    kind = built("MoELayer.__init__", init_layer)
    assert isinstance(kind(config()).token_dispatcher, LocalDispatcher)
    for argument, value in OF_DISPATCHER.items():
        assert kind(config(**{argument: value})).token_dispatcher == "Megatron's", argument


if __name__ == "__main__":
    PAGE.write_text(page())
