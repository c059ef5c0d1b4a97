"""Tuned products: the numbers of torch, by another algorithm, only where that is allowed."""

import pytest
import torch
import torch.utils.flop_counter

from mindspeed.ops import product as room
from mindspeed.ops.matmul_add_fp32 import matmul_add_fp32
from mindspeed.ops.product import product, tuning

pytestmark = pytest.mark.gpu
M, N, K = 1024, 2304, 1536


@pytest.fixture(autouse=True)
def tuner(monkeypatch):
    """Try at the first call, and let an algorithm of cuBLAS win over torch's."""
    monkeypatch.setattr(room, "_tuner", room._Tuner())
    monkeypatch.setattr(room, "LARGE", 0)
    monkeypatch.setattr(room, "WORTH", 0)
    monkeypatch.setattr(room, "fastest", lambda runs, seconds: len(runs) - 1)
    with tuning():
        yield room._tuner


def chosen(tuner):
    return [run for run in tuner._chosen.values() if run is not None]


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def draw(rows, columns, dtype=torch.bfloat16):
    return torch.randn(rows, columns, device="cuda", dtype=dtype)


LAYOUTS = {
    "forward": lambda: (draw(M, K), draw(N, K).t()),
    "to the input": lambda: (draw(M, N), draw(N, K)),
    "to the weight": lambda: (draw(M, N).t(), draw(M, K)),
    "part of a wider one": lambda: (draw(M, 2 * K)[:, :K], draw(N, K).t()),
    "half": lambda: (draw(M, K, torch.float16), draw(N, K, torch.float16).t()),
    "odd": lambda: (draw(999, 520), draw(136, 520).t()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_matches_float64_no_worse_than_torch(layout, tuner):
    torch.manual_seed(0)
    a, b = LAYOUTS[layout]()
    want, plain, got = a.double() @ b.double(), a @ b, product(a, b)
    assert chosen(tuner), "cuBLAS listed nothing that computes this"
    assert got.dtype == plain.dtype and got.shape == plain.shape
    assert error(got, want) <= 1.02 * error(plain, want)
    assert torch.equal(got, product(a, b))


def test_every_algorithm_multiplies(tuner, monkeypatch):
    torch.manual_seed(0)
    a, b = draw(M, K), draw(N, K).t()
    want = a.double() @ b.double()
    plain = error(a @ b, want)
    tried = []

    def all_of_them(runs, seconds):
        for run in runs:
            run.args[2].fill_(float("nan"))
            run()
            tried.append(error(run.args[2], want))
        return 0

    monkeypatch.setattr(room, "fastest", all_of_them)
    product(a, b)
    assert len(tried) > 2 and max(tried) <= 1.02 * plain


def test_writes_and_adds_where_it_is_told(tuner):
    torch.manual_seed(0)
    rows, grad = draw(M, K), draw(M, N)
    out = torch.full((2 * N, K), float("nan"), device="cuda", dtype=torch.bfloat16)
    assert product(grad.t(), rows, out[:N]).data_ptr() == out.data_ptr()
    assert out[:N].isfinite().all() and out[N:].isnan().all()
    wide = torch.full((M, N + 64), float("nan"), device="cuda", dtype=torch.bfloat16)
    weight = draw(N, K)
    product(rows, weight.t(), wide[:, :N])
    assert wide[:, :N].isfinite().all() and wide[:, N:].isnan().all()
    torch.testing.assert_close(wide[:, :N], rows @ weight.t(), rtol=2e-2, atol=0.5)
    total = torch.randn(N, K, device="cuda")
    want = total.double() + grad.t().double() @ rows.double()
    matmul_add_fp32(rows, grad, total)
    assert len(chosen(tuner)) == 3
    assert error(total, want) < 1e-5


def test_more_dimensions(tuner):
    x, weight = torch.randn(8, 128, K, device="cuda", dtype=torch.bfloat16), draw(N, K)
    got = product(x, weight.t())
    assert chosen(tuner) and got.shape == (8, 128, N)
    torch.testing.assert_close(got, x @ weight.t(), rtol=2e-2, atol=0.5)


def test_stands_back(tuner):
    a, b = draw(M, K), draw(N, K).t()
    torch.use_deterministic_algorithms(True)
    assert torch.equal(product(a, b), a @ b)
    torch.use_deterministic_algorithms(False)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        product(a, b)
    assert counter.get_total_flops() == 2 * M * N * K
    assert torch.equal(product(a.float(), b.float()), a.float() @ b.float())
    assert not chosen(tuner)
    compiled = torch.compile(product, fullgraph=True)
    torch.testing.assert_close(compiled(a, b), a @ b)
    assert not chosen(tuner)


def test_in_a_graph(tuner):
    a, b = draw(M, K), draw(N, K).t()
    want = product(a, b).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = product(a, b)
        other = product(a, draw(N, K).t()[:, : N // 2])  # not tuned yet, and not to be timed here
    out.zero_()
    graph.replay()
    assert torch.equal(out, want) and other.isfinite().all()


def test_the_clock_finds_the_fastest(monkeypatch):
    monkeypatch.undo()
    a, b = draw(4096, 4096), draw(4096, 4096)
    out = torch.empty_like(a)
    runs = [lambda: [torch.mm(a, b, out=out) for _ in range(3)], lambda: torch.mm(a, b, out=out)]
    assert room.fastest(runs, room._seconds) == 1
