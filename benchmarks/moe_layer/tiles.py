"""Times of one of our GEMMs by the tile of quack's kernel."""

import itertools
import statistics
import sys

import torch

from mindspeed.ops.expert_mlp import quack_impl
from mindspeed.ops.expert_mlp.reference import number_rows

GEMMS = ("gated", "project", "gated_gradient", "input_gradient", "first", "second")


def time_tiles(layer, gemm, clock, samples=10):
    """Print the TFLOP/s of a GEMM with each tile; those that do not compile are named.

    Tokens are gathered by the GEMM, or copied to rows before: the copy is not timed.
    """
    tiles = [(128, 128, True), (128, 160, True), (128, 192, True), (192, 128, True)]
    tiles += [(256, 128, False), (256, 192, False), (128, 256, False)]
    quack_impl.MIN_COPIED_COLUMNS = sys.maxsize  # copied here, or not at all
    for is_copied, tile, cluster_m in itertools.product((False, True), tiles, (1, 2)):
        call, flops = _calls(layer, is_copied)[gemm]
        _time_tile(
            f"{gemm}{' of rows' * is_copied}", call, flops, (*tile, cluster_m), clock, samples
        )


def _time_tile(gemm, call, flops, tile, clock, samples):
    from quack.gemm_config import GemmConfig

    tile_m, tile_n, pingpong, cluster_m = tile
    chosen = quack_impl._tiles
    config = GemmConfig(
        tile_m=tile_m,
        tile_n=tile_n,
        pingpong=pingpong,
        cluster_m=cluster_m,
        cluster_n=1,
        is_dynamic_persistent=False,
    )
    quack_impl._tiles = lambda: quack_impl._Tiles(*[config] * len(quack_impl._Tiles._fields))
    name = f"{gemm} {tile_m} x {tile_n}, {'pingpong, ' * pingpong}cluster {cluster_m}"
    try:
        call()
        call()
        seconds = statistics.median(clock.seconds(call)[1] for _ in range(samples))
    except Exception as error:  # the compiler raises anything
        print(f"{name}: {str(error).splitlines()[0][:120]}", flush=True)
        return
    finally:
        quack_impl._tiles = chosen
    print(f"{name}: {seconds * 1e3:.3f} ms, {flops / seconds / 1e12:.0f} TFLOP/s", flush=True)


def _calls(layer, is_copied):
    """Return each GEMM on a layer's tensors, and its floating-point operations."""
    mask, _ = layer.by_mask()
    rows, _ = number_rows(mask, layer.chosen.numel())
    x, grad = layer.x, layer.grad
    if is_copied:
        x, grad, rows = rows.spread(x)[0], *rows.spread(grad)
    quack = quack_impl.Quack()
    num_experts, columns, hidden = layer.first.shape
    num_rows = len(rows.row_ids)
    preact = torch.randn(num_rows, columns, device=layer.x.device, dtype=layer.x.dtype)
    y = preact[:, ::2].contiguous()
    weights = torch.rand(num_rows, device=layer.x.device)
    totals = [torch.zeros_like(one, dtype=torch.float32) for one in (layer.first, layer.second)]
    second_flops = num_rows * hidden * columns
    return {
        "gated": (lambda: quack.gated(x, layer.first, rows), 2 * second_flops),
        "project": (lambda: quack.project(y, layer.second, rows), second_flops),
        "gated_gradient": (
            lambda: quack.gated_gradient(grad, layer.second, preact, weights, rows),
            second_flops,
        ),
        "input_gradient": (
            lambda: quack.input_gradient(preact, layer.first, rows),
            2 * second_flops,
        ),
        "first": (
            lambda: quack.first_gradient(preact, x, rows, list(totals[0])),
            2 * second_flops,
        ),
        "second": (
            lambda: quack.second_gradient(grad, y, rows, list(totals[1])),
            second_flops,
        ),
    }
