"""Where SwiGLU inside a GEMM is used, with the package's kernels stood in for by plain torch."""

import sys

import pytest
import torch
import torch.utils.flop_counter

from mindspeed import device
from mindspeed.device.hopper import QUACK
from mindspeed.ops.swiglu import gemm_swiglu
from tests.unit.ops import kernel_files, quack_stand_in


@pytest.fixture
def quack(monkeypatch):
    quack_stand_in.install(monkeypatch)
    answers = gemm_swiglu._passes_trial, gemm_swiglu._passes_evaluation, gemm_swiglu.prepare
    for answer in answers:
        answer.cache_clear()
    yield
    for answer in answers:
        answer.cache_clear()


def draw():
    return (torch.empty(rows, 64, dtype=torch.bfloat16) for rows in (1024, 32))


def test_supported_inputs(quack):
    x, weight = draw()
    assert gemm_swiglu.is_supported(x, weight) and gemm_swiglu.is_supported(x.half(), weight)
    assert gemm_swiglu.is_supported(x, weight, extra_columns=8)
    assert not gemm_swiglu.is_supported(x, weight, extra_columns=4)
    assert not gemm_swiglu.is_supported(x.float(), weight)
    assert not gemm_swiglu.is_supported(x[:1023], weight)
    assert not gemm_swiglu.is_supported(x, weight[:24])
    assert not gemm_swiglu.is_supported(x[:, :60], weight[:, :60])
    assert not gemm_swiglu.is_supported(x.to("meta"), weight)
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert not gemm_swiglu.is_supported(x, weight)


def test_kernels_that_fail_are_not_used(quack, monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise TypeError("no fail-closed semantic key\nfor this source")

    monkeypatch.setattr(sys.modules["quack.gemm_interface"], "gemm_dgated", fail)
    x, weight = draw()
    assert not gemm_swiglu.is_supported(x, weight) and not gemm_swiglu.is_supported(x, weight)
    (line,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert line == (
        "quack-kernels is not used for SwiGLU inside GEMMs (torch.bfloat16): "
        "no fail-closed semantic key"
    )


def test_not_supported_without_the_package():
    assert not gemm_swiglu.is_supported(*draw())


@pytest.mark.parametrize(
    ("columns", "extra", "tile"), [(1536, 0, 192), (1536, 32, 160), (2048, 32, 208), (4096, 0, 192)]
)
def test_the_tile_that_leaves_least_of_its_pairs_empty(columns, extra, tile):
    assert gemm_swiglu.tile_for(columns, extra) == tile


@pytest.mark.parametrize(
    ("rows", "tile_n", "height"),
    [(8192, 192, 256), (14336, 192, 128), (16384, 192, 256), (14336, 208, 256)],
)
def test_tiles_are_short_where_tall_ones_leave_more_of_the_last_wave_empty(
    quack, monkeypatch, rows, tile_n, height
):
    """448 tall tiles on 132 processors take four waves, 896 short ones seven of half the time."""
    monkeypatch.setattr(type(device.current()), "multiprocessors", lambda _: 132)
    gemm_swiglu._tile_rows.cache_clear()
    package, heights = sys.modules["quack.gemm_interface"], []
    gemm = package.gemm_tuned.fn

    def noting(*args, config, **options):
        heights.append(config.tile_m)
        return gemm(*args, config=config, **options)

    monkeypatch.setattr(package.gemm_tuned, "fn", staticmethod(noting))
    grad, weight = torch.randn(rows, 8, 2).bfloat16(), torch.randn(16, 1536).bfloat16()
    found = gemm_swiglu.input_gradient(grad, weight, tile_n)
    assert heights == [height]
    expected = grad.transpose(1, 2).flatten(1).float() @ weight.float()
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)
    gemm_swiglu._tile_rows.cache_clear()


@pytest.mark.parametrize("tile_n", [160, 192])
def test_processes_compile_the_kernels_of_the_trial(quack, monkeypatch, tile_n):
    calls, package = kernel_files.Calls(), sys.modules["quack.gemm_interface"]
    for name in ("gemm_gated", "gemm_dgated"):
        monkeypatch.setattr(package, name, calls.noting(name, getattr(package, name)))
    gemm = calls.noting("gemm", package.gemm_tuned.fn)
    monkeypatch.setattr(package.gemm_tuned, "fn", staticmethod(gemm))
    needed = calls.of(lambda: gemm_swiglu._trial(torch.bfloat16, tile_n))
    kernels = gemm_swiglu._trial_kernels(torch.bfloat16, tile_n)
    compiled = [calls.of(lambda kernel=kernel: kernel.run(*kernel.arguments)) for kernel in kernels]
    assert all(len(each) == 1 for each in compiled)
    assert len(needed) == 5 and set.union(*compiled) == needed


def test_a_pass_without_gradients_has_a_kernel_of_its_own(quack, monkeypatch, tmp_path):
    """Compiled by the first such pass: others need neither the kernel nor its time."""
    calls, package = kernel_files.Calls(), sys.modules["quack.gemm_interface"]
    monkeypatch.setattr(package, "gemm_gated", calls.noting("gemm_gated", package.gemm_gated))
    compiled = calls.of(lambda: gemm_swiglu.run_kernel("evaluation", "bfloat16", 0))
    trained = calls.of(lambda: gemm_swiglu.run_kernel("forward", "bfloat16", 0))
    needed = calls.of(lambda: gemm_swiglu._try_evaluation(torch.bfloat16))
    assert len(compiled) == 1 and needed == compiled | trained and compiled != trained
    kernel_files.keep(monkeypatch, tmp_path)
    calls.made.clear()
    assert gemm_swiglu.needs_preact(torch.bfloat16) and not calls.made
    with torch.no_grad():
        assert not gemm_swiglu.needs_preact(torch.bfloat16)
    assert set(calls.made) == needed and len(list(tmp_path.iterdir())) == 1


def test_without_such_a_kernel_it_is_kept(quack, monkeypatch, caplog):
    package = sys.modules["quack.gemm_interface"]
    gated = package.gemm_gated

    def kept(*args, store_preact=True, **options):
        assert store_preact, "no such kernel"
        return gated(*args, **options)

    monkeypatch.setattr(package, "gemm_gated", kept)
    assert gemm_swiglu.is_supported(*draw())
    with torch.no_grad():
        assert gemm_swiglu.needs_preact(torch.bfloat16)
    (line,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert "(torch.bfloat16) without gradients: no such kernel" in line


def test_a_layer_that_is_built_has_its_kernels_compiled(quack, monkeypatch, tmp_path):
    kernel_files.keep(monkeypatch, tmp_path)
    gemm_swiglu.prepare(torch.float32, 64)  # no kernel takes it
    gemm_swiglu.prepare(torch.bfloat16, 60)
    assert not list(tmp_path.iterdir())
    gemm_swiglu.prepare(torch.bfloat16, 64)
    kernels = gemm_swiglu._trial_kernels(torch.bfloat16, gemm_swiglu.TILES_N[0])
    assert kernel_files.started(QUACK, kernels) == kernels
    assert gemm_swiglu.is_supported(*draw())
    assert all(file.read_bytes() for file in tmp_path.iterdir())  # the trial has compiled them
    gemm_swiglu.prepare.cache_clear()
    gemm_swiglu.prepare(torch.bfloat16, 1536, extra_columns=32)  # another tile in one of them
    assert len(list(tmp_path.iterdir())) == 7


def test_a_weight_in_a_wider_buffer_is_not_copied(quack, monkeypatch):
    """As a frozen weight that adapters are beside lies, in passes without them."""
    package, read = sys.modules["quack.gemm_interface"], []
    gated, gemm = package.gemm_gated, package.gemm_tuned.fn
    monkeypatch.setattr(package, "gemm_gated", lambda a, b, **o: read.append(b) or gated(a, b, **o))
    noting = staticmethod(lambda a, b, *args, **o: read.append(b) or gemm(a, b, *args, **o))
    monkeypatch.setattr(package.gemm_tuned, "fn", noting)
    torch.manual_seed(0)
    x, weight = (torch.randn(rows, 64, dtype=torch.bfloat16) for rows in (128, 256))
    grad = torch.randn(128, 128, 2, dtype=torch.bfloat16)

    def run(weight):
        return *gemm_swiglu.gemm_swiglu(x, weight), gemm_swiglu.input_gradient(grad, weight)

    expected = run(weight)
    for width, is_copied in ((72, False), (66, True), (64, False)):
        buffer = torch.randn(256, width, dtype=torch.bfloat16)
        part = buffer[:, :64]
        part.copy_(weight)
        read.clear()
        assert all(map(torch.equal, run(part), expected))
        assert [b.data_ptr() != part.data_ptr() for b in read] == [is_copied] * 2
    read.clear()
    run(weight[:1].expand(256, 64))  # rows that lie on each other
    assert all(64 in b.stride() for b in read)
