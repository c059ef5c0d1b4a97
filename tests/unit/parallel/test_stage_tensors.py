"""Declarations of stages: exchanged as often as needed, refused on all ranks alike."""

from types import SimpleNamespace

import pytest
import torch

import mindspeed.megatron_adaptor  # noqa: F401  # before Megatron, as in a user's script
from mindspeed.config import ConfigError
from mindspeed.parallel.pipeline.stage_tensors import TensorSpec, _hops_of

SPECS = [TensorSpec((3, 2), torch.float32)]
TWO_STAGES = SimpleNamespace(pp_group=SimpleNamespace(size=lambda: 2))


class Chunk(torch.nn.Module):
    """A stage that declares given tensors, or nothing."""

    config = SimpleNamespace(variable_seq_lengths=False)

    def __init__(self, specs=None):
        super().__init__()
        if specs is not None:
            self.output_specs = lambda: specs


@pytest.fixture
def exchanges(monkeypatch):
    """The declarations that were exchanged; the other stage declares the same."""
    found = []

    def all_gather_object(everywhere, mine, group):
        everywhere[:] = [mine, mine]
        found.append(mine)

    monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather_object)
    return found


def test_a_model_without_declarations_is_asked_once(exchanges):
    chunks = [Chunk()]
    assert [_hops_of(chunks, TWO_STAGES) for _ in range(3)] == [None] * 3
    assert len(exchanges) == 1
    assert _hops_of([Chunk(SPECS)], TWO_STAGES).fixed == tuple(SPECS)


def test_declared_sizes_may_change_between_steps(exchanges):
    chunk = Chunk(SPECS)
    _hops_of([chunk], TWO_STAGES)
    longer = [TensorSpec((5, 2), torch.float32)]
    chunk.output_specs = lambda: longer
    assert _hops_of([chunk], TWO_STAGES).fixed == tuple(longer)


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        ([], "declares 0 tensors: use 1 to 8"),
        (SPECS * 9, "declares 9 tensors: use 1 to 8"),
        ([TensorSpec((1,) * 7, torch.float32)], "at most 6 dimensions"),
        ([TensorSpec((1,), torch.complex64)], "one of torch.float32"),
        ([TensorSpec((None, 2), torch.float32)], "needs --variable-seq-lengths"),
    ],
)
def test_what_no_stage_can_send_is_refused_after_the_exchange(exchanges, specs, said):
    with pytest.raises(ConfigError, match=said):
        _hops_of([Chunk(specs)], TWO_STAGES)
    assert len(exchanges) == 1


def test_all_stages_but_the_last_declare_or_none(exchanges):
    with pytest.raises(ConfigError, match=r"1 of 3 pipeline stages have no output_specs\(\)"):
        _hops_of([Chunk(SPECS), Chunk(None)], TWO_STAGES)
