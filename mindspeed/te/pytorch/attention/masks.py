"""Which query may see which key: mask types, sliding windows and mask tensors.

A mask tensor of a caller follows Megatron: True means hidden. Inside, `visible` tensors mean the
opposite, as torch's attention wants them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MASK_TYPES = (
    "no_mask",
    "causal",
    "causal_bottom_right",
    "padding",
    "padding_causal",
    "padding_causal_bottom_right",
    "arbitrary",
)
Window = tuple[int, int]
MaskTensors = Tensor | tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class MaskRule:
    """One mask type together with a window: (left, right) neighbours a query sees, -1 for all."""

    kind: str
    window: Window = (-1, -1)

    @classmethod
    def of(cls, mask_type: str, window: Window | None) -> MaskRule:
        """Read a mask type and a window as Megatron passes them."""
        if mask_type not in MASK_TYPES:
            raise ValueError(
                f"attn_mask_type={mask_type} is not known: use {', '.join(MASK_TYPES)}"
            )
        left, right = (-1, -1) if window is None else window
        return cls(mask_type, (left, 0 if "causal" in mask_type else right))

    def bottom_right(self) -> MaskRule:
        """Return the causal rule with the last query at the last key."""
        if "causal" not in self.kind:
            raise ValueError(f"attn_mask_type={self.kind}: a shared prefix needs a causal one")
        return MaskRule(f"{self.kind.removesuffix('_bottom_right')}_bottom_right", self.window)

    @property
    def reads_mask(self) -> bool:
        """Whether a mask tensor takes part; causal and no_mask ignore one."""
        return "padding" in self.kind or self.kind == "arbitrary"

    def is_plain_causal(self, num_q: int, num_k: int) -> bool:
        """Return whether torch's own causal flag describes the whole band."""
        aligned = num_q == num_k or "bottom_right" not in self.kind
        return "causal" in self.kind and self.window[0] < 0 and aligned

    def is_end_of_causal(self, num_q: int, num_k: int) -> bool:
        """Return whether the queries are the last ones of a plain causal sequence of the keys."""
        is_aligned = "causal_bottom_right" in self.kind
        return is_aligned and self.window[0] < 0 and num_q < num_k

    def is_window(self, num_q: int, num_k: int) -> bool:
        """Return whether the window, with the last query at the last key, is the whole band."""
        return self.window != (-1, -1) and (num_q == num_k or not self._is_top_left)

    @property
    def _is_top_left(self) -> bool:
        # Query i sits at key i for causal and padding_causal, else the last query at the last key.
        return "causal" in self.kind and "bottom_right" not in self.kind

    def visible_band(self, num_q: int, num_k: int, device: torch.device) -> Tensor | None:
        """Return the (num_q, num_k) band that causality and window leave, None when it is all."""
        left, right = self.window
        if left < 0 and right < 0:
            return None
        query = torch.arange(num_q, device=device).unsqueeze(1)
        query = query if self._is_top_left else query + (num_k - num_q)
        key = torch.arange(num_k, device=device)
        visible = torch.ones(num_q, num_k, dtype=torch.bool, device=device)
        if right >= 0:
            visible &= key <= query + right
        if left >= 0:
            visible &= key >= query - left
        return visible


def alibi_bias(slopes: Tensor, num_q: int, num_k: int) -> Tensor:
    """Return -slope * distance, (1, N, num_q, num_k), with the last query at the last key."""
    query = torch.arange(num_q, device=slopes.device).unsqueeze(1) + (num_k - num_q)
    distance = (query - torch.arange(num_k, device=slopes.device)).abs()
    return -slopes.view(1, -1, 1, 1) * distance


def visible_keys(mask: MaskTensors, kind: str) -> Tensor:
    """Turn a mask, (B, 1, 1, K), (B, 1, Q, K) or a pair for cross attention, into `visible`."""
    if isinstance(mask, (tuple, list)):
        mask = mask[1]  # (of queries, of keys): what a padded query computes is never read
    if mask is None:
        raise ValueError(
            f"attn_mask_type={kind} needs an attention_mask (True = hidden) of shape "
            "(B, 1, 1, K) or (B, 1, Q, K)"
        )
    if mask.dim() == 3 and len(mask) == 1:
        mask = mask.unsqueeze(0)  # Megatron's T5 may give one mask for all samples so
    if mask.dtype != torch.bool or mask.dim() != 4:
        raise ValueError(
            "attention_mask must be a bool tensor of 4 dimensions (True = hidden), "
            f"got {mask.dtype} of shape {tuple(mask.shape)}"
        )
    return ~mask
