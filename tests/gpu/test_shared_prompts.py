"""Prompts that pairs share on the GPU: attention, and a whole model."""

import pytest
import torch

import mindspeed.megatron_adaptor  # noqa: F401
from mindspeed.features.activation import current
from mindspeed.ops.packed_batch import host_bounds
from mindspeed.te.pytorch import DotProductAttention
from tests.distributed import te_model
from tests.distributed.test_shared_prompts import activate, make_batches, step
from tests.gpu.test_te_modules import one_rank, relative_error  # noqa: F401
from tests.unit.te.test_shared_prefixes import Layout, whole_documents

pytestmark = pytest.mark.gpu
HEADS, GROUPS, SIZE = 6, 2, 128
# Two pairs: prompts of 600 and 41 tokens of which all but one are shared; padding.
LAYOUT = Layout([0, 1500, 1900, 2500, 3000, 3008], [(0, 0), (0, 0), (0, 599), (1500, 40), (0, 0)])


def attend(inputs, grad, lengths):
    given = [x.detach().requires_grad_() for x in inputs]
    attention = DotProductAttention(HEADS, SIZE, GROUPS, attn_mask_type="padding_causal")
    out = attention(*given, qkv_format="thd", **lengths)
    return [out, *torch.autograd.grad(out, given, grad)]


def test_attention_is_that_of_whole_documents_and_repeats_its_bits():
    torch.manual_seed(0)
    rows = LAYOUT.bounds[-1]
    shapes = (rows, HEADS, SIZE), (rows, GROUPS, SIZE), (rows, GROUPS, SIZE)
    inputs = [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]
    grad = torch.randn(rows, HEADS * SIZE, device="cuda").bfloat16()
    lengths = LAYOUT.register("cuda")
    exact = [x.double().requires_grad_() for x in inputs]
    out = whole_documents(*exact, LAYOUT)
    expected = [out, *torch.autograd.grad(out, exact, grad.double())]
    for found, true in zip(attend(inputs, grad, lengths), expected):
        assert relative_error(found, true) < 5e-3
    torch.use_deterministic_algorithms(True)
    try:
        runs = [attend(inputs, grad, lengths) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    for other in runs[1:]:
        assert all(torch.equal(one, two) for one, two in zip(runs[0], other))
    for found, true in zip(runs[0], expected):
        assert relative_error(found, true) < 5e-3


def test_attention_does_not_wait_for_the_device():
    rows = LAYOUT.bounds[-1]
    shapes = (rows, HEADS, SIZE), (rows, GROUPS, SIZE), (rows, GROUPS, SIZE)
    inputs = [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]
    grad, lengths = (
        torch.randn(rows, HEADS * SIZE, device="cuda").bfloat16(),
        LAYOUT.register("cuda"),
    )
    for bounds in lengths.values():
        host_bounds(bounds)  # the trainer registers them
    attend(inputs, grad, lengths)  # compiles kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(inputs, grad, lengths)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def same_features():
    before = current().options, current().context
    yield
    current().activate(*before)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("is_fused", [True, False])
def test_a_model_has_the_losses_and_gradients_of_whole_sequences(
    one_rank,  # noqa: F811
    same_features,
    monkeypatch,
    is_fused,
    dtype,
    limit,
):
    monkeypatch.setattr(te_model, "HIDDEN", 256)  # heads of 64, which flash attention takes
    activate({}, use_fused_rotary_pos_emb=is_fused)
    model = te_model.build("te", "llama", params_dtype=dtype).to(dtype).cuda()
    whole, shared = (
        {name: values.cuda() if values.dim() else values for name, values in batch.items()}
        for batch in make_batches(1)
    )
    expected, found = step(model, whole), step(model, shared)
    assert relative_error(found[0], expected[0]) < limit
    for name, grad in expected[1].items():
        assert relative_error(found[1][name], grad) < limit, name
    assert found[2] == {shared["tokens"].numel()} != expected[2]
