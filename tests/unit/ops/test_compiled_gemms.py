"""The GEMM operators compile without a graph break, in a process without the adaptor.

Its cpu device is not one that torch.compile knows.
"""

import subprocess
import sys

PROGRAM = """
import torch
from mindspeed.ops.gmm import gmm, gmm_v2
from mindspeed.ops.ffn import ffn
from mindspeed.ops.matmul_add_fp32 import matmul_add_fp32
from mindspeed.ops.moe_token_permute import moe_token_permute
from mindspeed.ops.moe_token_permute import moe_token_unpermute

def compiled(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True)

x, dy, plain = torch.randn(8, 6), torch.randn(8, 5), torch.zeros(5, 6)
fused = plain.clone()
matmul_add_fp32(x, dy, plain)
compiled(lambda *given: matmul_add_fp32(*given))(x, dy, fused)
assert torch.equal(plain, fused) and plain.any()

x.requires_grad_()
weight = torch.randn(3, 6, 4, requires_grad=True)
for op, groups in ((gmm, [3, 3, 8]), (gmm_v2, [3, 0, 5])):
    groups = torch.tensor(groups)
    run = lambda x, weight, groups: op(x, weight, group_list=groups)
    results = []
    for function in (run, compiled(run)):
        out = function(x, weight, groups)
        results.append((out, *torch.autograd.grad(out.sin().sum(), [x, weight])))
    torch.testing.assert_close(*results)

def layer(x, w1, w2, experts, probs):
    rows, row_ids = moe_token_permute(x, experts)
    counts = (experts.reshape(-1, 1) == torch.arange(3)).sum(0)
    return moe_token_unpermute(ffn(rows, w1, w2, "silu", expert_tokens=counts), row_ids, probs)

w2 = torch.randn(3, 4, 6, requires_grad=True)
experts, probs = torch.rand(8, 3).argsort(1)[:, :2], torch.rand(8, 2, requires_grad=True)
results = []
for function in (layer, compiled(layer)):
    out = function(x, weight, w2, experts, probs)
    results.append((out, *torch.autograd.grad(out.sin().sum(), [x, weight, w2, probs])))
torch.testing.assert_close(*results)
"""


def test_they_compile():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=240)
