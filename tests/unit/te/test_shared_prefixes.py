"""Documents that share a prefix: the attention and the positions of whole documents."""

from typing import NamedTuple

import pytest
import torch

from mindspeed.ops.rotary_position_embedding import rotate_qkv
from mindspeed.ops.rotary_position_embedding.packed import document_positions, rotate_packed
from mindspeed.te.pytorch import DotProductAttention
from mindspeed.te.pytorch.attention import core
from mindspeed.te.pytorch.attention.shared_prefixes import KeyRows, key_bounds, register_prefixes
from tests.unit.te.dense_attention import H, N, band, check, dense

G = 2


class Layout(NamedTuple):
    """Rows of documents, and where each finds its prefix."""

    bounds: list[int]
    prefixes: list[tuple[int, int]]

    def documents(self):
        """Yield the first row of each document, its last, and all of its rows, the prefix first."""
        for start, end, (first, length) in zip(self.bounds, self.bounds[1:], self.prefixes):
            yield start, end, [*range(first, first + length), *range(start, end)]

    def register(self, device="cpu"):
        """Return the cumulative lengths of a batch that is registered, as arguments of a call."""
        bounds = torch.tensor(self.bounds, dtype=torch.int32, device=device)
        rows = KeyRows.of(self.bounds, self.prefixes)
        of_keys = key_bounds(self.bounds, self.prefixes).to(device)
        rows = KeyRows(rows.row_ids.to(device), rows.starts.to(device))
        positions = [p for start, _, rows in self.documents() for p in self.own(start, rows)]
        register_prefixes(bounds, of_keys, rows, torch.tensor(positions, device=device))
        return {"cu_seqlens_q": bounds, "cu_seqlens_kv": of_keys}

    def own(self, start, rows):
        """Return the positions of the rows that a document has for itself."""
        return range(rows.index(start), len(rows))


# Two take the beginning of the first document, one that of the third; the last is padding.
LAYOUT = Layout([0, 6, 9, 14, 18, 19, 21], [(0, 0), (0, 0), (0, 0), (0, 4), (9, 3), (0, 0)])
TWICE = Layout([0, 5, 8, 10], [(0, 0), (0, 4), (0, 4)])
NONE = Layout([0, 4, 7], [(0, 0), (0, 0)])


def draw(rows, dtype=torch.float64, device="cpu"):
    torch.manual_seed(0)
    shapes = (rows, N, H), (rows, G, H), (rows, G, H)
    return [torch.randn(s, dtype=dtype, device=device, requires_grad=True) for s in shapes]


def whole_documents(q, k, v, layout, left=None):
    """Attend whole documents, and keep what each has for itself: (T, N * H) in float64."""
    found = []
    for start, _, rows in layout.documents():
        document = (x[rows].unsqueeze(1) for x in (q, k, v))
        visible = band(len(rows), len(rows), left=left).to(q.device)
        out = dense(*document, visible, scale=q.shape[-1] ** -0.5).squeeze(1)
        found.append(out[rows.index(start) :])
    return torch.cat(found)


@pytest.mark.parametrize("layout", [LAYOUT, TWICE, NONE])
@pytest.mark.parametrize("left", [None, 2])
def test_outputs_and_gradients_are_those_of_whole_documents(layout, left):
    q, k, v = draw(layout.bounds[-1])
    window = None if left is None else (left, 0)
    attention = DotProductAttention(N, H, G, attn_mask_type="padding_causal", window_size=window)
    out = attention(q, k, v, qkv_format="thd", **layout.register())
    check(out, whole_documents(q, k, v, layout, left), [q, k, v], rtol=1e-12)


def test_long_documents_keep_no_mask_for_backward(monkeypatch):
    """Without flash attention either: a mask in every layer would take more than prompts do."""
    layout = Layout([0, 40, 72, 80], [(0, 0), (0, 8), (0, 0)])
    monkeypatch.setattr(core, "MAX_MASK", 500)
    q, k, v = draw(layout.bounds[-1])
    attention = DotProductAttention(N, H, G, attn_mask_type="padding_causal")
    kept = []

    def keep(x):
        kept.append(x.shape[-2:].numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = attention(q, k, v, qkv_format="thd", **layout.register())
    assert kept and 32 * 40 not in kept
    check(out, whole_documents(q, k, v, layout), [q, k, v], rtol=1e-12)


def test_the_largest_score_is_that_of_whole_documents():
    q, k, v = draw(LAYOUT.bounds[-1])
    attention = DotProductAttention(
        N, H, G, attn_mask_type="padding_causal", return_max_logit=True, softmax_scale=1.0
    )
    _, found = attention(q, k, v, qkv_format="thd", **LAYOUT.register())
    scores = []
    for start, _, rows in LAYOUT.documents():
        one_q, one_k = q[rows], k[rows].repeat_interleave(N // G, dim=1)
        every = torch.einsum("qnh,knh->nqk", one_q, one_k)
        every = every.masked_fill(~band(len(rows), len(rows)), -torch.inf)
        scores.append(every[:, rows.index(start) :].amax((1, 2)))
    # It is computed in float32, as it always is.
    torch.testing.assert_close(found.double(), torch.stack(scores).amax(0), rtol=1e-6, atol=1e-6)


def test_rows_are_rotated_where_they_are_in_their_document():
    q, k, _ = draw(LAYOUT.bounds[-1])
    freqs = torch.randn(8, 1, 1, H, dtype=torch.float64)
    lengths = LAYOUT.register()
    expected = []
    for start, _, rows in LAYOUT.documents():
        bounds = torch.tensor([0, len(rows)])
        whole = rotate_packed(q[rows], freqs, bounds, interleaved=False)
        expected.append(whole[rows.index(start) :])
    for bounds in lengths.values():
        found = rotate_packed(q, freqs, bounds, interleaved=False)
        torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=0)
    qkv = torch.cat([q.unflatten(1, (G, -1)).flatten(2), k, k], -1).unsqueeze(1)
    sizes = [N // G * H, H, H]
    positions = document_positions(qkv, lengths["cu_seqlens_q"])
    rotated, *_ = rotate_qkv(qkv, freqs, sizes, False, positions)
    torch.testing.assert_close(rotated.squeeze(1), torch.cat(expected), rtol=0, atol=0)


def test_what_cannot_share_says_so():
    q, k, v = draw(LAYOUT.bounds[-1])
    lengths = LAYOUT.register()
    for options, message in (
        ({"attn_mask_type": "padding"}, "padding: a shared prefix needs a causal one"),
        (
            {"core_attention_bias_type": "alibi", "alibi_slopes": torch.ones(N)},
            "no context parallelism and no ALiBi",
        ),
    ):
        given = {"attn_mask_type": "padding_causal"} | options | lengths
        with pytest.raises(ValueError, match=message):
            DotProductAttention(N, H, G)(q, k, v, qkv_format="thd", **given)


def test_prefixes_that_were_not_registered_are_no_other_rows():
    q, k, v = draw(LAYOUT.bounds[-1])
    lost = {name: bounds.clone() for name, bounds in LAYOUT.register().items()}
    attention = DotProductAttention(N, H, G, attn_mask_type="padding_causal")
    with pytest.raises(ValueError, match="cu_seqlens_kv ends at 28, after the 21 rows"):
        attention(q, k, v, qkv_format="thd", **lost)
