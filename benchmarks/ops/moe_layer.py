"""The experts of one mixture layer: sort, two grouped products around a SwiGLU, weigh and sum."""

import torch
from op_case import PRODUCTS, Case, Work, optional
from op_gate import run_pass

from mindspeed.ops.gmm import gmm
from mindspeed.ops.moe_token_permute import moe_token_permute
from mindspeed.ops.swiglu import swiglu
from mindspeed.ops.token_rows import gather_rows


def ours(x, gate_up, down, chosen, probs):
    """Run all experts at once; weights are applied where rows are shortest."""
    rows, places = moe_token_permute(x, chosen)
    experts = torch.arange(len(gate_up), device=x.device)
    ends = (chosen.reshape(-1, 1) == experts).sum(0).cumsum(0)
    weights = probs.reshape(-1).scatter(0, places.long(), probs.reshape(-1))
    hidden = gmm(rows, gate_up.transpose(1, 2), group_list=ends)
    hidden = swiglu(hidden, weights=weights.unsqueeze(-1))
    out = gmm(hidden, down.transpose(1, 2), group_list=ends)
    return gather_rows(out, places.view(chosen.shape))


def loop(x, gate_up, down, chosen, probs):
    """Run one expert after the other."""
    out = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        token, choice = torch.where(chosen == expert)
        gate, up = (x[token] @ gate_up[expert].t()).chunk(2, dim=-1)
        y = (torch.nn.functional.silu(gate) * up) @ down[expert].t()
        weighted = y * probs[token, choice].unsqueeze(-1)
        out = out.index_add(0, token, weighted.to(x.dtype))
    return out


def products(x, gate_up, down, chosen, probs):
    """Multiply rows that lie in the order of their experts, both ways, and nothing else."""
    ends = chosen.reshape(-1).bincount(minlength=len(gate_up)).cumsum(0)
    rows = moe_token_permute(x.detach(), chosen)[0].requires_grad_()
    middle = torch.randn_like(rows[:, :1]).expand(-1, down.shape[2]).clone()

    def both(rows, gate_up, middle, down):
        wide = gmm(rows, gate_up.transpose(1, 2), group_list=ends)
        return wide, gmm(middle, down.transpose(1, 2), group_list=ends)

    inputs = rows, gate_up, middle.requires_grad_(), down
    return {which: run_pass(both, inputs, which) for which in ("fwd", "bwd", "full")}


def case(tokens, hidden, ffn, experts, choices, dtype=torch.bfloat16):
    """Race one layer."""
    liger = optional("liger_kernel.ops.fused_moe:LigerFusedMoEFunction")

    def of_size(count):
        def make_inputs(device):
            x = torch.randn(count, hidden, device=device, dtype=dtype, requires_grad=True)
            gate_up = torch.randn(experts, 2 * ffn, hidden, device=device, dtype=dtype)
            down = torch.randn(experts, hidden, ffn, device=device, dtype=dtype)
            scores = torch.rand(count, experts, device=device).topk(choices, dim=-1)
            gate_up = (gate_up / hidden**0.5).requires_grad_()
            down = (down / ffn**0.5).requires_grad_()
            return x, gate_up, down, scores.indices, scores.values.requires_grad_()

        return make_inputs

    def liger_moe(x, gate_up, down, chosen, probs):
        return liger.apply(x, gate_up, down, chosen.int(), probs)

    rows, matrices = tokens * choices, 3 * experts * hidden * ffn
    forward = Work(
        bytes=dtype.itemsize * (2 * tokens * hidden + matrices), flops=6 * rows * hidden * ffn
    )
    backward = forward + forward
    return Case(
        op="moe_layer",
        shape=f"{tokens}x{hidden}x{ffn} top {choices} of {experts}",
        dtype=dtype,
        make_inputs=of_size(tokens),
        gate_inputs=of_size(min(tokens, 1024)),
        peers={"ours": ours, "loop": loop, "liger": liger and liger_moe},
        reference=loop,
        yardsticks={PRODUCTS: products},
        work={"fwd": forward, "bwd": backward, "full": forward + backward},
    )


CASES = [case(16384, 2048, 1024, 64, 8)]
TINY = [case(24, 16, 8, 4, 2, torch.float32)]
