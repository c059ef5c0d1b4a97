"""Which rank holds which layers and experts."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from mindspeed.config import ConfigError
from mindspeed.distributed.parallel_dims import check_divides
from mindspeed_llm.models.config import ModelConfig

TP, PP, EP, ETP = (
    "--target-tensor-parallel-size",
    "--target-pipeline-parallel-size",
    "--target-expert-parallel-size",
    "--expert-tensor-parallel-size",
)


@dataclass(frozen=True)
class Chunk:
    """The layers of one virtual pipeline stage: (number in the stage, number in the model)."""

    layers: tuple[tuple[int, int], ...]
    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class Rank:
    """A position in the tensor and expert parallel groups; every pipeline stage has all of them."""

    tp: int
    tp_size: int
    etp: int = 0
    etp_size: int = 1
    ep: int = 0
    ep_size: int = 1

    def experts(self, num_experts: int) -> range:
        """Return the numbers of the experts that this rank holds."""
        count = num_experts // self.ep_size
        return range(self.ep * count, (self.ep + 1) * count)


@dataclass(frozen=True)
class Layout:
    """Parallel sizes, and the chunks of every pipeline stage."""

    tp: int
    ep: int
    etp: int
    stages: tuple[tuple[Chunk, ...], ...]

    @property
    def pp(self) -> int:
        """Return the number of pipeline stages."""
        return len(self.stages)

    def ranks(self) -> Iterator[Rank]:
        """Yield the ranks of one pipeline stage that differ in what they hold."""
        for number in range(math.lcm(self.tp, self.etp * self.ep)):
            tp, etp = number % self.tp, number % self.etp
            ep = number // self.etp % self.ep
            yield Rank(tp, self.tp, etp, self.etp, ep, self.ep)

    def folder(self, rank: Rank, stage: int) -> str:
        """Return the name of the folder of a rank's file."""
        name = f"mp_rank_{rank.tp:02d}"
        name += f"_{stage:03d}" if self.pp > 1 else ""
        return name + (f"_{rank.ep:03d}" if self.ep > 1 else "")

    def as_plain(self) -> dict[str, object]:
        """Return lists and numbers that `from_plain` takes back."""
        stages = [[[list(pair) for pair in c.layers] for c in chunks] for chunks in self.stages]
        return {"tp": self.tp, "ep": self.ep, "etp": self.etp, "stages": stages}

    @classmethod
    def from_plain(cls, values: dict[str, object], source: str) -> "Layout":
        """Build from what `as_plain` returned and a file kept."""
        try:
            tp, ep, etp = (int(values[name]) for name in ("tp", "ep", "etp"))  # type: ignore[call-overload]
            stages = [
                [[(int(a), int(b)) for a, b in chunk] for chunk in chunks]
                for chunks in values["stages"]  # type: ignore[attr-defined]
            ]
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{source}: its layout entry is damaged") from None
        return cls(tp, ep, etp, _with_ends(stages))


@dataclass(frozen=True)
class LayoutRequest:
    """A layout as a user asks for it."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    layers_per_chunk: int | None = None
    """Layers of a virtual stage; nothing without virtual stages."""
    layer_list: tuple[int, ...] = ()
    """Layers of each stage, where they differ."""
    noop_layers: tuple[int, ...] = ()
    """Numbers, in the longer model, of layers that do nothing."""

    def layout(self, config: ModelConfig) -> Layout:
        """Place the layers of a model; raise ConfigError where they cannot be."""
        etp = self.tp if self.etp is None else self.etp
        for flag, size in ((TP, self.tp), (PP, self.pp), (EP, self.ep), (ETP, etp)):
            if size < 1:
                raise ConfigError(f"{flag} {size} is too small: it must be at least 1")
        self._check_widths(config, etp)
        if self.tp % etp:
            raise ConfigError(
                f"{ETP} {etp}: the files of ranks are named by their numbers in TP, PP and EP, so "
                f"it must divide {TP} {self.tp}; a training run takes any, and loads what is "
                "converted to another size"
            )
        numbers = _numbered(config.num_layers, self.noop_layers)
        starts = [0, *accumulate(self._chunk_sizes(len(numbers)))]
        chunks = [numbers[a:b] for a, b in zip(starts, starts[1:])]
        stages: list[list[list[tuple[int, int]]]] = [[] for _ in range(self.pp)]
        for index, chunk in enumerate(chunks):
            layers = [(i, number) for i, number in enumerate(chunk) if number is not None]
            stages[index % self.pp].append(layers)
        return Layout(self.tp, self.ep, etp, _with_ends(stages))

    def _chunk_sizes(self, total: int) -> list[int]:
        """Return the layers of each chunk, in the order of the model."""
        if self.layer_list:
            return self._given_sizes(total)
        check_divides(PP, self.pp, total, f"the {total} layers", "or give --num-layer-list")
        per_stage = total // self.pp
        size = per_stage if self.layers_per_chunk is None else self.layers_per_chunk
        if self.layers_per_chunk is not None:
            flag = "--num-layers-per-virtual-pipeline-stage"
            check_divides(flag, size, per_stage, f"the {per_stage} layers of a pipeline stage")
            if self.pp == 1:
                raise ConfigError(f"{flag} {size} needs {PP} of at least 2")
        return [size] * (total // size)

    def _given_sizes(self, total: int) -> list[int]:
        given = ",".join(map(str, self.layer_list))
        if self.layers_per_chunk is not None:
            raise ConfigError(
                f"--num-layer-list {given} cannot be given together with "
                "--num-layers-per-virtual-pipeline-stage: drop one of them"
            )
        if len(self.layer_list) != self.pp or sum(self.layer_list) != total:
            raise ConfigError(
                f"--num-layer-list {given} has {len(self.layer_list)} stages and "
                f"{sum(self.layer_list)} layers: {PP} is {self.pp} and the layers are {total}"
            )
        if min(self.layer_list) < 1:
            raise ConfigError(f"--num-layer-list {given}: every stage needs a layer")
        return list(self.layer_list)

    def _check_widths(self, config: ModelConfig, etp: int) -> None:
        widths = [
            (TP, self.tp, config.num_query_groups, "key/value heads"),
            (TP, self.tp, config.ffn_hidden_size, "MLP columns"),
        ]
        if config.moe is None:
            if self.ep > 1:
                raise ConfigError(f"{EP} {self.ep}: {config.family} has no experts, use 1")
        else:
            shared = config.moe.shared_ffn_hidden_size
            widths.append((EP, self.ep, config.moe.num_experts, "experts"))
            widths.append((ETP, etp, config.moe.ffn_hidden_size, "columns of an expert"))
            widths += [(TP, self.tp, shared, "shared expert columns")] if shared else []
        for flag, size, whole, what in widths:
            check_divides(flag, size, whole, f"the {whole} {what}")


def _with_ends(
    stages: Sequence[Sequence[Sequence[tuple[int, int]]]],
) -> tuple[tuple[Chunk, ...], ...]:
    """Mark the first chunk of the first stage and the last chunk of the last one."""
    ends = len(stages) - 1
    return tuple(
        tuple(
            Chunk(
                tuple(chunk),
                is_first=stage == 0 and number == 0,
                is_last=stage == ends and number == len(chunks) - 1,
            )
            for number, chunk in enumerate(chunks)
        )
        for stage, chunks in enumerate(stages)
    )


def _numbered(num_layers: int, noops: tuple[int, ...]) -> list[int | None]:
    """Return, for each layer of the longer model, its number in the model, nothing for no-ops."""
    total = num_layers + len(set(noops))
    if wrong := [noop for noop in noops if not 0 <= noop < total]:
        raise ConfigError(
            f"--noop-layers names layer {wrong[0]}: with {num_layers} layers and "
            f"{len(set(noops))} no-ops the numbers are 0 to {total - 1}"
        )
    numbers = iter(range(num_layers))
    return [None if layer in noops else next(numbers) for layer in range(total)]
