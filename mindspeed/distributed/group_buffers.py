"""Buffers of communicators: how large the largest message of each process group is.

S positions of a sequence, B samples of a micro-batch, H hidden size, Q and K width of all query and
all key heads, k experts of a token, w bytes of an activation; C, T, E and X ranks of CP, TP, EP and
of an expert's matrices, P = T with sequence parallelism, else 1. The largest message in bytes:

    tp        w S/C B H            twice that where it is all-reduced: P = 1
    pp        w S/C/P B H          hidden states between two stages
    cp        4 S/C B 2 K/T        ring: keys and values, and their gradients in float32
              4 S B 2 K/T          all-gather of keys and values, gradients as above
              w S/C B (Q + 2 K)/T  Ulysses: queries, keys and values
    hcp       the larger one of ring and Ulysses
    ep        f w S/C/P B H k      all-to-all; a rank receives f times what it would if balanced
    ep_tp     f w S/C/P B H k X    gathered by the ranks that share an expert
    tp_ep_mp  w S/C/P B H E X      all-gather dispatcher

Pure arithmetic: no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mindspeed.config import ConfigError, did_you_mean

MIB = 2**20
FLOAT = 4
COUNTS_ONLY = 10
"""MiB of groups whose messages are norms, flags and numbers of tokens."""
GROUPS = (
    *("dp", "dp_cp", "intra_dp_cp", "inter_dp_cp", "cp", "hcp", "mp", "tp", "pp", "embd"),
    *("pos_embd", "tp_dp_cp", "tp_dp", "tp_cp", "ep", "ep_tp", "tp_ep_mp", "tp_ep_pp", "ep_dp"),
    *("intra_ep_dp", "inter_ep_dp", "intra_dist_opt_instance"),
)
"""Names by which Megatron asks for the options of a group."""
OTHER_NAMES = {
    "exp": "ep",
    "tp_exp": "tp_ep_mp",
    "mp_exp": "tp_ep_pp",
    "dp_modulo_exp": "ep_dp",
}
"""Names of earlier releases, which scripts use."""


@dataclass(frozen=True, kw_only=True)
class Messages:
    """The sizes that the messages of a run follow from."""

    seq_length: int
    micro_batch_size: int
    hidden_size: int
    query_size: int
    kv_size: int
    head_size: int
    width: int = 2
    """Bytes of an activation."""
    stage_width: int | None = 2
    """Bytes of an element between pipeline stages; None where the model declares its own."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int = 1
    sequence_parallel: bool = False
    cp_comm_type: str = "p2p"
    """One of Megatron's: p2p, a2a, a2a+p2p, all_gather."""
    has_mask: bool = False
    """The ranks of a tensor-parallel group get attention masks of S x S bytes by a broadcast."""

    topk: int = 0
    """Experts of a token; 0 without experts."""
    dispatcher: str = "alltoall"
    ep_factor: float | None = None
    """Rows that the busiest rank gets, relative to balanced experts; None for an unknown number."""

    def largest(self) -> dict[str, int]:
        """Return the bytes of the largest message by group, of groups where that is known."""
        found: dict[str, float] = {}
        shared = self.tp if self.sequence_parallel else 1
        hidden = self.width * self._tokens * self.hidden_size
        if self.tp > 1:
            mask = self.micro_batch_size * self.seq_length**2 if self.has_mask else 0
            found["tp"] = max(hidden, mask)
        if self.pp > 1 and self.stage_width is not None:
            found["pp"] = self.stage_width * self._tokens * self.hidden_size // shared
        if self.cp > 1:
            found |= self._context()
        if self.topk and self.ep_factor is not None:
            found |= self._experts(hidden // shared)
        return {name: int(size) for name, size in found.items()}

    def buffers(self) -> dict[str, int]:
        """Return MiB by group."""
        large = self.largest()
        if not self.sequence_parallel and "tp" in large:
            large["tp"] *= 2
        small = ["mp", "tp_cp"]
        if self.topk and self.dispatcher == "alltoall":
            small += ["tp_ep_mp", "tp_ep_pp"]
        return dict.fromkeys(small, COUNTS_ONLY) | {
            name: max(-(-size // MIB), 1) for name, size in large.items()
        }

    @property
    def _tokens(self) -> int:
        return self.seq_length // self.cp * self.micro_batch_size

    def _context(self) -> dict[str, int]:
        accumulated = max(self.width, FLOAT)
        ring = accumulated * self._tokens * 2 * self.kv_size // self.tp
        # A key head goes to every rank that has a query head of its group.
        keys = max(self.kv_size // self.tp, self.head_size * self.cp)
        heads = self.width * self._tokens * (self.query_size // self.tp + 2 * keys)
        if self.cp_comm_type == "a2a+p2p":
            return {"hcp": max(ring, heads)}
        if self.cp_comm_type == "all_gather":
            return {"cp": self.cp * ring}
        return {"cp": heads if self.cp_comm_type == "a2a" else ring}

    def _experts(self, hidden: int) -> dict[str, float]:
        """Return the messages of a dispatcher; `hidden` is the bytes of this rank's tokens."""
        assert self.ep_factor is not None
        rows, ranks = self.ep_factor * hidden * self.topk, self.ep * self.expert_tp
        if self.dispatcher == "allgather":
            return {"tp_ep_mp": hidden * ranks} if ranks > 1 else {}
        if self.dispatcher not in ("alltoall", "alltoall_seq"):
            return {}  # it has buffers of its own
        found = {"ep": rows} if self.ep > 1 else {}
        return found | ({"ep_tp": rows * self.expert_tp} if self.expert_tp > 1 else {})


def parse(text: str, given: str) -> dict[str, int]:
    """Return MiB by group of a text such as "dp:200;tp:300"; `given` is how it was written."""
    sizes: dict[str, int] = {}
    for part in text.replace(",", ";").split(";"):
        name, colon, size = (piece.strip() for piece in part.partition(":"))
        if not colon or not name:
            raise ConfigError(f"{given}: {part.strip()!r} is not group:MiB, as in tp:300;pp:200")
        group = OTHER_NAMES.get(name, name)
        if group not in GROUPS:
            raise ConfigError(f"{given}: no group {name!r}: {_known(name)}")
        if not (size.isascii() and size.isdigit() and int(size) > 0):
            raise ConfigError(f"{given}: {name} has {size!r}: give a whole number of MiB above 0")
        if group in sizes:
            raise ConfigError(f"{given}: {name} is given twice: drop one")
        sizes[group] = int(size)
    return sizes


def _known(name: str) -> str:
    said = did_you_mean(name, (*GROUPS, *OTHER_NAMES))
    return said if said.startswith("did") else f"use {', '.join((*GROUPS, *OTHER_NAMES))}"


def in_words(sizes: Mapping[str, int]) -> str:
    """Return sizes as the flag takes them."""
    return ";".join(f"{name}:{size}" for name, size in sizes.items())
