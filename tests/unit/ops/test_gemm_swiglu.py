"""Where SwiGLU inside a GEMM is used, with the package's kernels stood in for by plain torch."""

import sys

import pytest
import torch
import torch.utils.flop_counter

from mindspeed.ops.swiglu import gemm_swiglu
from tests.unit.ops import quack_stand_in


@pytest.fixture
def quack(monkeypatch):
    quack_stand_in.install(monkeypatch)
    gemm_swiglu._passes_trial.cache_clear()
    yield
    gemm_swiglu._passes_trial.cache_clear()


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
