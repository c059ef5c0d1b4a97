"""Write the weights as an mcore checkpoint: one torch.save file for each rank."""

from pathlib import Path

import torch

from mindspeed_llm.checkpoint.detection import RANK_FILE
from mindspeed_llm.checkpoint.layout import Layout
from mindspeed_llm.checkpoint.output import PtOutput, typed
from mindspeed_llm.checkpoint.placement import Placement, Style
from mindspeed_llm.checkpoint.source import Source
from mindspeed_llm.models.families import family_named

VERSION = 3.0
"""Of Megatron's checkpoints: fused query, key and value are in today's order."""
ITERATION = 1


def padded_vocabulary(vocab_size: int, divisor: int, tp: int) -> int:
    """Return the rows of an embedding that every tensor parallel rank can have a share of."""
    multiple = divisor * tp
    return -(-vocab_size // multiple) * multiple


def mcore_outputs(
    folder: Path,
    source: Source,
    layout: Layout,
    style: Style,
    vocab_size: int,
    dtype: torch.dtype | None = None,
) -> list[PtOutput]:
    """Plan the files of every rank."""
    weights = list(family_named(source.shape.family).table.weights(source.shape))
    placement = Placement(source.shape, weights, style, vocab_size)
    values = {
        "checkpoint_version": VERSION,
        "iteration": ITERATION,
        "layout": layout.as_plain(),
    }
    outputs = []
    for stage, chunks in enumerate(layout.stages):
        for rank in layout.ranks():
            names = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
            models = {
                name: typed(placement.stored(chunk, rank), source.wholes, dtype)
                for name, chunk in zip(names, chunks)
            }
            path = folder / layout.folder(rank, stage) / RANK_FILE
            ranks = {"tp": rank.tp, "pp": stage, "ep": rank.ep}
            outputs.append(PtOutput(path, models, values, ranks))
    return outputs
