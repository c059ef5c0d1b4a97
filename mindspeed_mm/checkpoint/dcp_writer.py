"""Write a torch.distributed.checkpoint of weights that are read one at a time."""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

from mindspeed.checkpoint.dcp_writer import DigestWriter
from mindspeed.checkpoint.digests import FileRecord
from mindspeed_llm.checkpoint.mapped_file import aligned
from mindspeed_llm.checkpoint.output import Progress, must_be_finite
from mindspeed_mm.models.hf_weights import HfWeights


def write_dcp(
    folder: Path,
    source: HfWeights,
    prefix: str,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    *,
    check_finite: bool = False,
) -> dict[str, FileRecord]:
    """Write every tensor under its name with a prefix, and return the digests of the files.

    No process group is needed.
    """
    state = {prefix + name: _typed(tensor, dtype) for name, tensor in source.shapes.items()}
    planner = _Planner(source, prefix, dtype, progress, check_finite)
    writer = DigestWriter(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")  # not there, as it is meant
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    return writer.files


class _Planner(DefaultSavePlanner):
    """Plans with tensors on meta and reads the numbers when they are written."""

    def __init__(
        self,
        source: HfWeights,
        prefix: str,
        dtype: torch.dtype | None,
        progress: Progress | None,
        check_finite: bool,
    ) -> None:
        super().__init__()
        self._check_finite = check_finite
        self._source, self._prefix, self._dtype = source, prefix, dtype
        self._progress = progress

    def resolve_data(self, write_item: Any) -> torch.Tensor:
        """Read a tensor."""
        values = self._source.read(write_item.index.fqn.removeprefix(self._prefix))
        if self._progress is not None:
            self._progress(values.nbytes, self._source.nbytes)
        typed = _typed(aligned(values), self._dtype)
        if self._check_finite:
            must_be_finite(write_item.index.fqn, typed)
        return typed


def _typed(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
