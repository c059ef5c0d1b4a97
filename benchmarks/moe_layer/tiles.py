"""Times of one of our GEMMs by the tile of quack's kernel."""

import itertools
import statistics

import torch

from mindspeed.ops.expert_mlp import quack_impl
from mindspeed.ops.expert_mlp.reference import number_rows

GEMMS = ("gated", "project", "gated_gradient", "input_gradient", "first", "second")


def time_tiles(layer, gemm, clock, samples=10):
    """Print the TFLOP/s of a GEMM with each tile; those that do not compile are named."""
    from quack.gemm_config import GemmConfig

    call, flops = _calls(layer)[gemm]
    tiles = [(128, 128, True), (128, 160, True), (128, 192, True), (192, 128, True)]
    tiles += [(256, 128, False), (256, 192, False), (128, 256, False)]
    chosen = quack_impl._config
    for (tile_m, tile_n, pingpong), cluster_m in itertools.product(tiles, (1, 2)):
        config = GemmConfig(
            tile_m=tile_m,
            tile_n=tile_n,
            pingpong=pingpong,
            cluster_m=cluster_m,
            cluster_n=1,
            is_dynamic_persistent=False,
        )
        quack_impl._config = lambda columns, config=config: config
        name = f"{gemm} {tile_m} x {tile_n}, {'pingpong, ' * pingpong}cluster {cluster_m}"
        try:
            call()
            call()
            seconds = statistics.median(clock.seconds(call)[1] for _ in range(samples))
        except Exception as error:  # the compiler raises anything
            print(f"{name}: {str(error).splitlines()[0][:120]}", flush=True)
            continue
        finally:
            quack_impl._config = chosen
        print(f"{name}: {seconds * 1e3:.3f} ms, {flops / seconds / 1e12:.0f} TFLOP/s", flush=True)


def _calls(layer):
    """Return each GEMM on a layer's tensors, and its floating-point operations."""
    mask, _ = layer.by_mask()
    rows, _ = number_rows(mask, layer.chosen.numel())
    quack = quack_impl.Quack()
    num_experts, columns, hidden = layer.first.shape
    num_rows = len(rows.tokens)
    preact = torch.randn(num_rows, columns, device=layer.x.device, dtype=layer.x.dtype)
    y = preact[:, ::2].contiguous()
    weights = torch.rand(num_rows, device=layer.x.device)
    totals = [torch.zeros_like(one, dtype=torch.float32) for one in (layer.first, layer.second)]
    second_flops = num_rows * hidden * columns
    return {
        "gated": (lambda: quack.gated(layer.x, layer.first, rows), 2 * second_flops),
        "project": (lambda: quack.project(y, layer.second, rows), second_flops),
        "gated_gradient": (
            lambda: quack.gated_gradient(layer.grad, layer.second, preact, weights, rows),
            second_flops,
        ),
        "input_gradient": (
            lambda: quack.input_gradient(preact, layer.first, rows),
            2 * second_flops,
        ),
        "first": (
            lambda: quack.first_gradient(preact, layer.x, rows, list(totals[0])),
            2 * second_flops,
        ),
        "second": (
            lambda: quack.second_gradient(layer.grad, y, rows, list(totals[1])),
            second_flops,
        ),
    }
