"""Micro-batches of pairs that hold the common prompt of each pair once.

    [prompt 1, chosen 1] [prompt 2, chosen 2] ... [last of prompt 1, rejected 1] ... [padding]

Each is a document, whose bounds are `cu_seqlens`. A rejected one begins with the last token of its
prompt, computed again: it predicts another label there than in the chosen one. The tokens before it
are rows of the chosen one, of which attention takes keys and values (`cu_seqlens_kv` counts them).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mindspeed_llm.data.collate import Batch, Samples, collate_packed, split_pairs
from mindspeed_llm.data.indexed import IGNORE_INDEX, Array

KEY_BOUNDS, ROW_IDS, STARTS = "cu_seqlens_kv", "key_row_ids", "key_starts"


def collate_shared_pairs(samples: Samples, *, multiple: int = 1, pad_id: int = 0) -> Batch:
    """Concatenate the sequences of pairs in the order of `split_pairs`, each prompt once."""
    from mindspeed.te.pytorch.attention.shared_prefixes import KeyRows, key_bounds

    count, sequences, row = len(samples), split_pairs(samples), 0
    prefixes = [(0, 0)] * count
    for chosen, rejected in zip(sequences[:count], sequences[count:], strict=True):
        length = shared_length(chosen, rejected)
        prefixes.append((row, length))
        rejected.update({name: values[length:] for name, values in rejected.items()})
        row += len(chosen["input_ids"])
    batch = collate_packed(sequences, multiple=multiple, pad_id=pad_id)
    bounds = batch["cu_seqlens"].tolist()
    prefixes += [(0, 0)] * (len(bounds) - 1 - len(prefixes))  # padding is a document
    sizes, rows = torch.tensor([length for _, length in prefixes]), KeyRows.of(bounds, prefixes)
    batch["position_ids"] += sizes.repeat_interleave(torch.tensor(bounds).diff())
    batch[KEY_BOUNDS] = key_bounds(bounds, prefixes)
    batch["max_seqlen"] = batch[KEY_BOUNDS].diff().max()
    return batch | {ROW_IDS: rows.row_ids, STARTS: rows.starts}


def shared_length(chosen: Mapping[str, Array], rejected: Mapping[str, Array]) -> int:
    """Return how many tokens before the last one of their common prompt both begin with."""
    sides = chosen, rejected
    size = min(len(side["input_ids"]) for side in sides)
    ids, labels = ([side[name][:size] for side in sides] for name in ("input_ids", "labels"))
    is_other = (ids[0] != ids[1]) | (labels[0] != IGNORE_INDEX) | (labels[1] != IGNORE_INDEX)
    prompt = int(is_other.argmax()) if is_other.any() else size
    return max(prompt - 1, 0)


def register_shared(batch: Mapping[str, torch.Tensor]) -> None:
    """Let layers find where the keys of a micro-batch on the device are, if prompts are shared."""
    from mindspeed.te.pytorch.attention.shared_prefixes import KeyRows, register_prefixes

    if KEY_BOUNDS in batch:
        rows, positions = KeyRows(batch[ROW_IDS], batch[STARTS]), batch["position_ids"].flatten()
        register_prefixes(batch["cu_seqlens"], batch[KEY_BOUNDS], rows, positions)
