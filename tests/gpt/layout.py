"""What the tiny GPT of the proofs is and how a run cuts it over ranks."""

from dataclasses import dataclass, fields

HIDDEN = 32
FFN = 96
HEADS = 4
VOCABULARY = 80
SEQUENCE = 16
GLOBAL_BATCH = 8


@dataclass(frozen=True)
class Layout:
    """One run; the defaults are plain Megatron on one rank."""

    family: str = "gpt"
    """gpt: learned positions, biases, GELU, tied; llama: rotary, RMSNorm, SwiGLU, GQA, untied;
    experts: rotary, GELU, four experts, two a token, untied."""
    num_layers: int = 4
    bf16: bool = False
    dropout: float = 0.0
    dp: int = 1
    tp: int = 1
    pp: int = 1
    layers_per_virtual_stage: int | None = None
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    bucket_size: int | None = None
    recompute: tuple[str, str | None, int | None] | None = None
    """Granularity, method and number of layers, as in Megatron's flags."""
    micro_batch: int = 2
    spec: str = "local"
    """Whose layers: "local" for Megatron's own, "te" for those of transformer_engine."""

    def __str__(self) -> str:
        """Name the run by what is not the default, as the id of a test."""
        changed = {f.name: getattr(self, f.name) for f in fields(self)}
        defaults = {f.name: f.default for f in fields(self)}
        return " ".join(f"{k}={v}" for k, v in changed.items() if v != defaults[k]) or "plain"

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.dp * self.tp * self.pp

    @property
    def virtual_stages(self) -> int | None:
        """Return the number of model chunks on each rank, where there are several."""
        if self.layers_per_virtual_stage is None:
            return None
        return self.num_layers // self.pp // self.layers_per_virtual_stage

    @property
    def micro_batches(self) -> int:
        """Return how many micro-batches each replica runs in a step."""
        return GLOBAL_BATCH // self.dp // self.micro_batch

    def plain(self) -> "Layout":
        """Return the run of Megatron's own layers on one rank that this run has to equal."""
        return Layout(self.family, self.num_layers, self.bf16, self.dropout)
