"""Which rows of a micro-batch have a label: found on the host, and part of the micro-batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mindspeed.ops.linear_cross_entropy.labelled_rows import LabelledRows

INDEX, COUNT = "labelled_rows", "num_labelled_rows"


def with_labelled_rows(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Add the rows in the loss mask to a micro-batch on the host, unless nearly all are."""
    rows = LabelledRows.of(batch["loss_mask"]) if "loss_mask" in batch else None
    if rows is None:
        return dict(batch)
    return {**batch, INDEX: rows.index, COUNT: torch.tensor(rows.count)}


def labelled_rows(batch: Mapping[str, torch.Tensor]) -> LabelledRows | None:
    """Return what with_labelled_rows has added."""
    return LabelledRows(batch[INDEX], int(batch[COUNT])) if INDEX in batch else None
