"""The other names that projects import on NPUs, used as those projects use them."""

import argparse
import importlib
import importlib.util

import pytest
import torch

from mindspeed.core.ssm.chunk_gated_delta_rule import chunk_gated_delta_rule
from mindspeed.features.activation import current


def test_defaults_of_every_feature_as_mcore_bridge_reads_them():
    import mindspeed.features_manager as mfm
    from mindspeed.arguments import process_args

    before = list(mfm.FEATURES_LIST)
    every = mfm.create_features_list()
    assert every is not mfm.FEATURES_LIST
    mfm.FEATURES_LIST.clear()
    try:
        few = vars(process_args(argparse.ArgumentParser()).parse_args([]))
        mfm.FEATURES_LIST.extend(every)
        parser = argparse.ArgumentParser()
        assert process_args(parser) is parser
    finally:
        mfm.FEATURES_LIST[:] = before
    defaults, _ = parser.parse_known_args([])
    assert vars(defaults) == dict(current().registry.options_class())
    assert few == {"optimization_level": 2}
    assert parser.parse_args(["--use-fused-swiglu"]).use_fused_swiglu is True


def test_lengths_and_positions_can_be_set_and_read():
    from mindspeed.core.context_parallel import get_batch_utils
    from mindspeed.utils import get_position_ids, set_position_ids

    lengths, positions = torch.tensor([0, 3, 5]), torch.tensor([[0], [1], [2], [0], [1]])
    get_batch_utils.set_actual_seq_len(lengths)
    set_position_ids(positions)
    assert get_batch_utils.get_actual_seq_len() is lengths and get_position_ids() is positions
    get_batch_utils.set_actual_seq_len(None)
    set_position_ids(None)
    assert get_batch_utils.get_actual_seq_len() is None and get_position_ids() is None


def test_both_names_of_attention_are_the_one_of_megatrons_spec():
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    from mindspeed.core.context_parallel.adaptor import MindSpeedCPDotProductAttention

    name = "mindspeed.te.pytorch.attention.dot_product_attention.dot_product_attention"
    module = importlib.import_module(name)
    assert module.MindSpeedTEDotProductAttention is TEDotProductAttention
    assert MindSpeedCPDotProductAttention is TEDotProductAttention
    assert not hasattr(module, "SomethingElse")


def test_what_is_not_built_says_so_when_it_is_used():
    from mindspeed.core.ssm import gated_delta_net
    from mindspeed.te.pytorch.fp8 import reuse

    with pytest.raises(RuntimeError, match="fp8_reuse_quantized_weight asks for FP8"):
        reuse.clear_weight_quantization_reuse_cache(release_storage=True)
    with pytest.raises(RuntimeError, match="fp8_reuse_quantized_weight asks for FP8"):
        reuse.set_weight_release_enabled(True)
    for exchange in (gated_delta_net.tensor_a2a_cp2hp, gated_delta_net.tensor_a2a_hp2cp):
        with pytest.raises(NotImplementedError, match="megatron-core 0.18 or newer"):
            exchange(torch.ones(1), seq_dim=0, head_dim=1, cp_group=None)


def gated_delta_rule(q, k, v, g, beta):
    """The recurrence itself, one token after the other, in float64."""
    q, k, v, g, beta = (each.double().transpose(1, 2) for each in (q, k, v, g, beta))
    q = q * q.shape[-1] ** -0.5
    state = q.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    for t in range(q.shape[2]):
        state = state * g[:, :, t, None, None].exp()
        error = v[:, :, t] - (state * k[:, :, t, :, None]).sum(-2)
        state = state + k[:, :, t, :, None] * (error * beta[:, :, t, None])[..., None, :]
        outputs.append((state * q[:, :, t, :, None]).sum(-2))
    return torch.stack(outputs, 2).transpose(1, 2), state


def delta_inputs(length):
    torch.manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(1, length, 2, 4), dim=-1) for _ in range(2))
    v, g, beta = torch.randn(1, length, 2, 6), -torch.rand(1, length, 2), torch.rand(1, length, 2)
    return q, k, v, g, beta


HAS_RULE = importlib.util.find_spec("megatron.core.ssm.gated_delta_net") is not None
needs_rule = pytest.mark.skipif(not HAS_RULE, reason="megatron-core has it from 0.16 on")


@pytest.mark.skipif(HAS_RULE, reason="megatron-core has it from 0.16 on")
def test_gated_delta_rule_names_the_megatron_that_has_it():
    with pytest.raises(NotImplementedError, match="use megatron-core 0.16 or newer"):
        chunk_gated_delta_rule(*delta_inputs(4))


@needs_rule
def test_gated_delta_rule_is_the_recurrence():
    inputs = delta_inputs(20)
    output, state = chunk_gated_delta_rule(*inputs, chunk_size=8, output_final_state=True)
    want, last = gated_delta_rule(*inputs)
    torch.testing.assert_close(output.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.double(), last, rtol=1e-5, atol=1e-5)


@needs_rule
def test_packed_sequences_do_not_see_each_other():
    inputs, bounds = delta_inputs(20), [0, 7, 20]
    output, states = chunk_gated_delta_rule(
        *inputs, chunk_size=8, output_final_state=True, cu_seqlens=torch.tensor(bounds)
    )
    for index, (start, end) in enumerate(zip(bounds, bounds[1:])):
        want, last = gated_delta_rule(*(each[:, start:end] for each in inputs))
        torch.testing.assert_close(output[:, start:end].double(), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(states[index].double(), last[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrong", [{"scale": 0.3}, {"head_first": True}])
def test_gated_delta_rule_refuses_what_it_cannot_do(wrong):
    with pytest.raises(ValueError, match="leave it out|give"):
        chunk_gated_delta_rule(*delta_inputs(4), **wrong)


def test_when_set_up_functions_run():
    from mindspeed.deprecate import AutoExecuteFunction, Deprecated, NoExecuteFunction

    calls = []

    @AutoExecuteFunction
    def now():
        calls.append("now")
        return calls

    @NoExecuteFunction
    def later():
        calls.append("later")

    assert calls == ["now"] and now() == ["now", "now"]
    later()
    assert calls[-1] == "later"
    with pytest.warns(DeprecationWarning, match="twice is deprecated"):
        assert Deprecated(twice)(2) == 4


def twice(x):
    return 2 * x
