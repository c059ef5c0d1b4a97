"""Parallel sizes of a run, and what must divide what. Pure arithmetic: no torch, no environment."""

import math
from dataclasses import dataclass

from mindspeed.config import ConfigError, one_of

TP, PP, CP, EP, ETP = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
)
VPP = "--num-layers-per-virtual-pipeline-stage"

MAX_MICRO_BATCHES = 100_000
"""A step of more would not end in a day: a number with too many zeros."""
MAX_DIVISORS_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """How the ranks of a run share the model and the batch.

    Ranks are numbered as in Megatron: neighbours are tensor-parallel, then context-parallel, then
    data-parallel; pipeline stages are farthest apart. ConfigError is raised for sizes that do not
    fit together.
    """

    world: int = 1
    rank: int = 0
    tp: int = 1
    """Ranks that share the matrices of a layer."""
    pp: int = 1
    """Pipeline stages."""
    vpp: int | None = None
    """Virtual stages of a pipeline rank; None without an interleaved schedule, as in Megatron."""
    cp: int = 1
    """Ranks that share each sequence."""
    ep: int = 1
    """Ranks among which the experts of a layer are distributed."""
    etp: int | None = None
    """Ranks that share the matrices of an expert, as given: None for tp; see `expert_tp`."""
    micro_batch_size: int = 1
    """Samples of one micro-batch."""
    global_batch_size: int = None  # type: ignore[assignment]  # set by __post_init__
    """Samples of one step on all ranks; one micro-batch of each data-parallel rank unless given."""

    def __post_init__(self) -> None:
        sizes = {TP: self.tp, PP: self.pp, CP: self.cp, EP: self.ep, ETP: self.expert_tp}
        for flag, size in sizes.items():
            if size < 1:
                raise ConfigError(f"{flag} {size} is too small: it must be at least 1")
        _check_world(self.world, {flag: sizes[flag] for flag in (TP, PP, CP)}, "model copy")
        _check_world(self.world, {flag: sizes[flag] for flag in (ETP, PP, EP)}, "set of experts")
        if self.global_batch_size is None:
            object.__setattr__(self, "global_batch_size", self.micro_batch_size * self.dp)
        self._check_micro_batches()

    @property
    def expert_tp(self) -> int:
        """Return the number of ranks that share the matrices of an expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def dp(self) -> int:
        """Return the number of data-parallel ranks: copies of the model."""
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def dp_rank(self) -> int:
        """Return the number of the copy of the model that this rank belongs to."""
        return self.rank // (self.tp * self.cp) % self.dp

    @property
    def cp_rank(self) -> int:
        """Return the number of this rank among those that share its sequences."""
        return self.rank // self.tp % self.cp

    @property
    def num_micro_batches(self) -> int:
        """Return the micro-batches of one data-parallel rank in a step."""
        return divide_batch(self.global_batch_size, self.micro_batch_size, self.dp)

    def _check_micro_batches(self) -> None:
        count = self.num_micro_batches
        if count > MAX_MICRO_BATCHES:
            most = MAX_MICRO_BATCHES * self.micro_batch_size * self.dp
            raise ConfigError(
                f"--global-batch-size {self.global_batch_size}: one step would be {count:,} "
                f"micro-batches of a rank: use at most {most}"
            )
        if self.vpp is not None and count % self.pp:
            raise ConfigError(
                f"{VPP}: the {count} micro-batches of a step are not a multiple of {PP} "
                f"{self.pp}: use a --global-batch-size that is a multiple of "
                f"{self.micro_batch_size * self.dp * self.pp}"
            )


def check_model(
    *,
    world: int,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    num_layers: int | None = None,
    num_attention_heads: int | None = None,
    num_query_groups: int | None = None,
    ffn_hidden_size: int | None = None,
    num_experts: int | None = None,
    etp: int | None = None,
    moe_ffn_hidden_size: int | None = None,
) -> None:
    """Raise ConfigError, with sizes that do, if these cannot share a model.

    It comes before ParallelDims, whose advice to start more ranks helps no size that the model
    rules out. What is not given is not checked; a model without experts has num_experts=0.
    """
    widths = {
        "--num-attention-heads": num_attention_heads,
        "--num-query-groups": num_query_groups,
        "--ffn-hidden-size": ffn_hidden_size,
    }
    _check_shares(PP, pp, {"--num-layers": num_layers}, world, tp * cp)
    _check_shares(TP, tp, widths, world, pp * cp)
    for flag, given in ((EP, ep), (ETP, etp or 1)):
        if num_experts == 0 and given > 1:
            raise ConfigError(f"{flag} {given}: the model has no experts: use 1")
    expert_tp = tp if etp is None else etp
    _check_shares(EP, ep, {"--num-experts": num_experts or None}, world, expert_tp * pp)
    widths = {"--moe-ffn-hidden-size": moe_ffn_hidden_size}
    _check_shares(TP if etp is None else ETP, expert_tp, widths, world, ep * pp)


def _check_shares(
    flag: str, size: int, wholes: dict[str, int | None], world: int, ranks: int
) -> None:
    """Raise if a size does not divide a whole; name sizes that divide all, and fit the ranks.

    `ranks` is the product of the other sizes, which `world` is shared with.
    """
    given = {name: whole for name, whole in wholes.items() if whole is not None}
    for name, whole in given.items():
        if size >= 1 and whole % size == 0:
            continue
        common = math.gcd(*given.values())
        fitting = _divisors(common)
        now = [n for n in fitting if ranks >= 1 and world % (n * ranks) == 0]
        later = [n for n in fitting if n not in now]
        advice = [one_of(now)] if now else []
        if later:
            advice.append(f"another number of ranks with {_shown(later, common)}")
        raise ConfigError(
            f"{flag} {size} does not divide {name} {whole}: use {', or '.join(advice)}"
        )


def divide_batch(global_batch_size: int, micro_batch_size: int, dp: int) -> int:
    """Return the micro-batches of one data-parallel rank in a step."""
    step = micro_batch_size * dp
    count, rest = divmod(global_batch_size, step)
    if rest or not count:
        raise ConfigError(
            f"--global-batch-size {global_batch_size} is not a multiple of {step} "
            f"(--micro-batch-size {micro_batch_size} x {dp} data-parallel ranks): use {step} or a "
            "multiple"
        )
    return count


def virtual_stages(num_layers: int, pp: int, layers_per_stage: int | None) -> int | None:
    """Return how many virtual stages a pipeline rank holds, None if it holds one."""
    if layers_per_stage is None or pp == 1:
        return None
    check_divides(PP, pp, num_layers, f"--num-layers {num_layers}")
    per_rank = num_layers // pp
    check_divides(VPP, layers_per_stage, per_rank, f"the {per_rank} layers of a pipeline rank")
    stages = per_rank // layers_per_stage
    return stages if stages > 1 else None


def check_divides(flag: str, size: int, whole: int, what: str, otherwise: str = "") -> None:
    """Raise ConfigError, with the sizes that do, if a flag's size does not divide the whole.

    `what` names the whole with its value; `otherwise` is another way out for the user.
    """
    if size >= 1 and whole % size == 0:
        return
    hint = f"use {_shown(_divisors(whole), whole)} {otherwise}".strip()
    raise ConfigError(f"{flag} {size} does not divide {what}: {hint}")


def _divisors(whole: int) -> list[int]:
    return [n for n in range(1, whole + 1) if whole % n == 0]


def _shown(divisors: list[int], whole: int) -> str:
    is_short = len(divisors) <= MAX_DIVISORS_SHOWN
    return one_of(divisors) if is_short else f"a divisor of {whole}"


def _check_world(world: int, sizes: dict[str, int], what: str) -> None:
    ranks = 1
    for size in sizes.values():
        ranks *= size
    if world % ranks:
        given = " x ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)
        raise ConfigError(
            f"{world} rank(s) cannot hold {given} = {ranks} ranks a {what}: start a multiple of "
            f"{ranks} ranks or lower a size"
        )


def padded_vocabulary(vocab_size: int, divisor: int, tp: int) -> int:
    """Return the vocabulary size, padded so that tensor-parallel ranks can shard it."""
    multiple = divisor * tp
    return -(-vocab_size // multiple) * multiple
