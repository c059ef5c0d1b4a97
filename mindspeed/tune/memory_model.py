"""The memory of one rank while it trains a GPT, part by part, in closed form.

Kept for backward of one token in one layer, in elements (the test compares with what autograd
saves; H hidden size, Q and A width of all query heads and of attention's output, K width of all key
heads, F width of the MLP):

    layer input, residual sum   2 H         what norms and residual sums read
    norm outputs                2 H         what the linears behind them read
    queries, keys               Q + K       rotated
    fused query, key, value     Q + 2 K     values are a view of it
    attention output            A           and one float32 a head, the log of the softmax's sum
    MLP                         2 F + F     output of the first linear, activation (not if fused)
    norm factors                2           float32

TP divides what heads and MLP keep, and with sequence parallelism the rest. Beside that: weights,
gradients and optimizer state, hidden states and logits of the output layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mindspeed.tune.run_sizes import FLOAT

GIB = 2**30
TILE = 2048
"""Positions of a tile in advice."""
FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}

Changes = Mapping[str, Any]
"""Options that would be added to those of a run."""


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """Sizes of a model, its batch and its ranks, and the options that change its memory."""

    num_layers: int
    hidden_size: int
    mlp_size: int
    """Width of the MLPs that a token goes through in one layer."""
    query_size: int
    kv_size: int
    attention_size: int
    num_heads: int
    vocab_size: int
    """Columns of the logits, 0 of a model with a value head."""
    num_parameters: int
    """Parameters on this rank."""
    trained_fraction: float = 1.0
    """Share of the parameters that is trained, less than one with adapters."""
    frozen_parameters: int = 0
    """Parameters of further models, of which this rank keeps the weights alone."""
    seq_length: int
    micro_batch_size: int = 1
    loss_rows: int | None = None
    """Rows of a micro-batch of this rank whose losses are computed, if not of all."""
    max_tokens: int | None = None
    """Tokens that a micro-batch of this rank has at most, where they vary."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    width: int = 2
    """Bytes of a weight and an activation."""

    distributed_optimizer: bool = False
    reuse_fp32_param: bool = False
    swap_optimizer: bool = False
    recomputed_layers: int = 0
    """Layers of a pipeline stage that are recomputed as a whole."""
    swap_layer_input: bool = False
    recompute_keep_attention: bool = False
    swap_attention: bool = False
    recompute_norm: bool = False
    recompute_activation: bool = False
    fused_mlp: bool = False
    has_rotary_tables: bool = False
    """Rotary tables are kept for every layer, four of them in float32: where they are not fused."""
    tiled_mlp_size: int | None = None
    tiled_loss_size: int | None = None

    @property
    def positions(self) -> int:
        """Positions of the sequence whose activations this rank has in heads and MLPs."""
        return self.seq_length // self.cp

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch of this rank."""
        return self.positions * self.micro_batch_size

    @property
    def stage_layers(self) -> int:
        """Layers of a pipeline stage."""
        return -(-self.num_layers // self.pp)

    @property
    def batch(self) -> str:
        """The micro-batch whose memory this is, in words."""
        most = self.max_tokens or 0
        return (
            f"a micro-batch of {self.tokens} tokens"
            + (f", logits of {self._picked_rows} of them" if self._picked_rows is not None else "")
            + (f"; others have up to {most}" if most > self.tokens else "")
        )

    @property
    def _shared(self) -> int:
        return self.tp if self.sequence_parallel else 1

    @property
    def _picked_rows(self) -> int | None:
        """Rows that are picked for their loss; a tile has all of its rows."""
        return None if self.tiled_loss_size else self.loss_rows

    @property
    def _logits(self) -> int:
        rows = self.tokens if self._picked_rows is None else self._picked_rows
        return FLOAT * rows * self.vocab_size // self.tp

    def layer_parts(self) -> dict[str, int]:
        """Return the bytes that backward of one layer needs of one micro-batch, by part."""
        token, tp = self.width * self.tokens, self.tp
        hidden = token * self.hidden_size // self._shared
        projection = token * (self.query_size + 2 * self.kv_size) // tp
        rotary = 4 * FLOAT * self.positions * self.query_size // self.num_heads
        activation = 0 if self.fused_mlp else token * self.mlp_size // tp
        return {
            "layer input": hidden,
            "residual sum": hidden,
            "norm outputs": 2 * hidden,
            "norm factors": 2 * FLOAT * self.tokens // self._shared,
            "queries and keys": token * (self.query_size + self.kv_size) // tp,
            "query, key, value projection": projection,
            "attention output": token * self.attention_size // tp
            + FLOAT * self.tokens * self.num_heads // tp,
            "rotary tables": rotary if self.has_rotary_tables else 0,
            "first linear of the MLP": token * 2 * self.mlp_size // tp,
            "activation of the MLP": activation,
        }

    def kept_parts(self, *, is_recomputed: bool = False) -> dict[str, int]:
        """Return the bytes that one layer keeps of one micro-batch on the device, by part."""
        parts = self.layer_parts()
        if is_recomputed:
            kept = {"layer input": 0 if self.swap_layer_input else parts["layer input"]}
            if self.recompute_keep_attention:
                kept["attention output"] = parts["attention output"]
            return kept
        factors = parts["norm factors"]
        if self.recompute_norm:
            parts["norm outputs"] = 0
        if self.recompute_activation or self.tiled_mlp_size:
            parts["activation of the MLP"] = 0
        if self.tiled_mlp_size:
            parts["norm outputs"] //= 2
            parts["norm factors"] = factors // 2
            parts["first linear of the MLP"] = 0
        if self.swap_attention:
            for name in ("queries and keys", "query, key, value projection", "attention output"):
                parts[name] = 0
        return parts

    def output_parts(self) -> dict[str, int]:
        """Return what output layer and loss keep of one micro-batch: logits in float32."""
        hidden, picked = self.width * self.hidden_size, self._picked_rows
        norm_input = hidden * self.tokens // self._shared
        return {
            "final norm": norm_input + FLOAT * self.tokens // self._shared,
            # What is picked is a copy; its losses are kept for their shape.
            "hidden states": norm_input if picked is None else (hidden + FLOAT) * picked,
            "logits": 0 if self.tiled_loss_size else self._logits,
        }

    def state_parts(self) -> dict[str, int]:
        """Return the bytes of weights, gradients and optimizer state."""
        trained = int(self.num_parameters * self.trained_fraction)
        share = self.dp if self.distributed_optimizer else 1
        masters = 0 if self.width == FLOAT else 2 if self.reuse_fp32_param else FLOAT
        optimizer = 0 if self.swap_optimizer else (masters + 2 * FLOAT) * trained // share
        frozen = {"frozen models": self.width * self.frozen_parameters}
        return (frozen if self.frozen_parameters else {}) | {
            "weights": self.width * self.num_parameters,
            "gradients": FLOAT * trained,
            "optimizer state": optimizer,
        }

    def workspace(self) -> int:
        """Return what one layer, or the loss, needs while it runs and does not keep."""
        parts = self.layer_parts()
        mlp = parts["first linear of the MLP"] + parts["activation of the MLP"]
        mlp = self._of_tile(mlp, self.tiled_mlp_size)
        attention = parts["queries and keys"] + parts["query, key, value projection"]
        logits = self._of_tile(self._logits, self.tiled_loss_size)
        # A gradient beside each value.
        return 2 * max(mlp, attention, logits)

    def kept_by_stage(self) -> int:
        """Return the bytes that the layers of a pipeline stage keep of one micro-batch."""
        recomputed, whole = self.recomputed_layers, self.stage_layers - self.recomputed_layers
        kept = whole * sum(self.kept_parts().values())
        return kept + recomputed * sum(self.kept_parts(is_recomputed=True).values())

    def parts(self) -> dict[str, int]:
        """Return all bytes of the first pipeline stage with the output layer, by part."""
        # The first stage has as many micro-batches in flight as there are stages.
        return self.state_parts() | {
            "activations": self.pp * self.kept_by_stage() + sum(self.output_parts().values()),
            "one layer at work": self.workspace(),
        }

    def total(self) -> int:
        """Return the peak of this rank."""
        return sum(self.parts().values())

    def savings(self) -> list[tuple[Changes, int]]:
        """Return options that would save memory and the bytes, the largest first."""
        found = [(changes, self.total() - other.total()) for changes, other in self._changes()]
        return sorted((pair for pair in found if pair[1] > 0), key=lambda pair: -pair[1])

    def _changes(self) -> Iterator[tuple[Changes, MemoryModel]]:
        if not self.swap_optimizer:
            yield {"swap_optimizer": True}, replace(self, swap_optimizer=True)
            if self.width < FLOAT and not self.reuse_fp32_param:
                yield {"reuse_fp32_param": True}, replace(self, reuse_fp32_param=True)
        if self.dp > 1 and not self.distributed_optimizer:
            changed = replace(self, distributed_optimizer=True)
            yield {"use_distributed_optimizer": True}, changed
        if self.tp > 1 and not self.sequence_parallel:
            yield {"sequence_parallel": True}, replace(self, sequence_parallel=True)
        if self.recomputed_layers:
            if not self.swap_layer_input:
                yield {"swap_layer_input": True}, replace(self, swap_layer_input=True)
        if self.recomputed_layers < self.stage_layers:
            yield FULL_RECOMPUTE, replace(self, recomputed_layers=self.stage_layers)
            if not self.swap_attention:
                yield {"swap_attention": True}, replace(self, swap_attention=True)
        size = max(min(TILE, self.positions // 4), 1)
        if self.tiled_mlp_size is None:
            yield {"tiled_mlp_size": size}, replace(self, tiled_mlp_size=size)
        if self.tiled_loss_size is None:
            yield {"tiled_loss_size": size}, replace(self, tiled_loss_size=size)

    def _of_tile(self, whole: int, size: int | None) -> int:
        return whole if size is None else whole * min(size, self.positions) // self.positions


def advice(model: MemoryModel, available: int, accepts: Callable[[Changes], bool]) -> str:
    """Return one line: what a run needs, the three features that would save most, what would fit.

    Args:
        model: the memory of the run.
        available: bytes of the device.
        accepts: whether the run would accept further options.
    """
    parts = ", ".join(f"{name} {in_gib(size)}" for name, size in model.parts().items())
    best = ", ".join(
        f"{as_flags(changes)} ({in_gib(size)})" for changes, size in best_savings(model, accepts)
    )
    changes, smaller = fitting(model, available, accepts)
    does = "what would fit" if smaller.total() <= available else "too much still"
    return (
        f"a rank of this run needs about {in_gib(model.total())} ({parts}) for {model.batch}, the "
        f"device has {in_gib(available)}"
        + (f"; what would save most: {best}" if best else "")
        + (f"; {does}: {as_flags(changes)} ({in_gib(smaller.total())})" if changes else "")
    )


def best_savings(
    model: MemoryModel, accepts: Callable[[Changes], bool], count: int = 3
) -> list[tuple[Changes, int]]:
    """Return the options that would save most, of those that the run would accept."""
    return [(changes, size) for changes, size in model.savings() if accepts(changes)][:count]


def fitting(
    model: MemoryModel, available: int, accepts: Callable[[Changes], bool]
) -> tuple[Changes, MemoryModel]:
    """Add what saves most until the run fits; return the options, empty if it does, and the model.

    Where nothing makes it fit, these are all options that save something.
    """
    chosen: dict[str, Any] = {}
    while model.total() > available:
        better = [
            (other.total(), chosen | dict(changes), other)
            for changes, other in model._changes()
            if other.total() < model.total() and accepts(chosen | dict(changes))
        ]
        if not better:
            break
        _, chosen, model = min(better, key=lambda each: each[0])
    return chosen, model


def as_flags(changes: Changes) -> str:
    """Return options as they are typed."""
    flags = {"--" + name.replace("_", "-"): value for name, value in changes.items()}
    return " ".join(flag if value is True else f"{flag} {value}" for flag, value in flags.items())


def in_gib(size: int) -> str:
    """Return bytes in GiB, or in MiB if they are few."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
