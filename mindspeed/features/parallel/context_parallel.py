"""Sequences that are split over ranks: ring attention, Ulysses, both, or gathered keys."""

import functools
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from mindspeed import config
from mindspeed.compat import megatron
from mindspeed.config import ConfigError
from mindspeed.distributed import context_rules as rules
from mindspeed.distributed.context_rules import ContextOptions
from mindspeed.distributed.parallel_dims import CP
from mindspeed.features.base import Context, Feature, Level, bind
from mindspeed.patching import Patch

SOCKET = "mindspeed.te.pytorch.attention.megatron"
LOCAL = "megatron.core.transformer.dot_product_attention:DotProductAttention"
ROTARY = "megatron.core.models.common.embeddings.rope_utils:apply_rotary_pos_emb"
NEXT = "megatron.core.transformer.multi_token_prediction:roll_tensor"
TE = "megatron.core.extensions.transformer_engine:TEDotProductAttention"


class ContextParallel(Feature):
    """Ranks that share each sequence, of any length, with any documents and numbers of heads."""

    name = "context_parallel"
    title = "Context parallel"
    group = "Parallel"
    level = Level.COMPAT
    megatron_flags = (CP, "--cp-comm-type", "--hierarchical-context-parallel-sizes")

    class Options(config.Options):
        """The algorithm, under the names that the documents use."""

        context_parallel_algo: (
            Literal["megatron_cp_algo", "ulysses_cp_algo", "hybrid_cp_algo", "kvallgather_cp_algo"]
            | None
        ) = None
        """How ranks share a sequence: keys travel round a ring (megatron_cp_algo), heads are
        exchanged (ulysses_cp_algo), both (hybrid_cp_algo), or keys are gathered. Default: what
        --cp-comm-type says, else the ring."""

        ulysses_degree_in_cp: int | None = None
        """Ranks that exchange heads, for hybrid_cp_algo; the others of --context-parallel-size make
        the ring."""

        cp_window_size: int = 1
        """Ranks of an inner ring, for the double ring; 1 is one ring."""

        cp_document_layout: Literal["zigzag", "whole"] | None = None
        """How packed documents are shared: each in pieces for all ranks (zigzag), or whole, but for
        those that must be cut for ranks with equal attention. Default: whole in the training
        commands of this package, zigzag in Megatron-LM's scripts, whose data loader cuts so."""

        use_cp_send_recv_overlap: bool = True
        """Accepted for scripts that use it: keys always travel while the ones before them are
        attended to."""

    def is_on(self, options: Any, context: Context) -> bool:
        """More than one rank shares a sequence; without Megatron's arguments, an algorithm does."""
        if context.megatron is None:
            asked = options.context_parallel_algo, options.cp_document_layout
            return any(asked) or options.cp_window_size > 1
        return bool(context.argument("context_parallel_size", 1) > 1)

    def check(self, options: Any, context: Context) -> None:
        """The sizes fit together, and nothing is asked for that ranks could not compute alike."""
        size = context.argument("context_parallel_size", 1)
        if size == 1:
            return
        _check_comm_type(options, context)
        chosen(options, context.megatron or {})
        if _is_script(context):
            rules.check_length(context.argument("seq_length", 0), size)
            _check_layout(options)
            _check_documents(options, context)
        rules.check_dropout(context.argument("attention_dropout", 0.0), size)

    def patches(self, options: Any) -> Iterator[Patch]:
        """Give the algorithm to Megatron, and attention over ranks to its local specs."""
        settings: dict[str, Any] = {"cp_window_size": options.cp_window_size}
        if options.cp_document_layout == "whole":
            settings["cp_document_layout"] = "whole"
            yield Patch.wrap(
                ROTARY,
                f"{SOCKET}:wrap_apply_rotary_pos_emb",
                why="Megatron takes every rank to hold two pieces of each packed document",
            )
            yield Patch.wrap(
                NEXT,
                bind("mindspeed.parallel.context.next_tokens:wrap_roll_tensor", "whole"),
                why="the token after one may be on any rank",
            )
        yield Patch.wrap(
            f"{LOCAL}.__init__",
            bind(f"{SOCKET}:wrap_local_init", settings),
            why="local specs name this class, which refuses context parallelism",
        )
        yield Patch.wrap(
            f"{LOCAL}.forward",
            f"{SOCKET}:wrap_local_forward",
            why="the attention that it builds sees this rank's part of the sequence only",
        )
        if settings != {"cp_window_size": 1}:
            yield Patch.wrap(
                f"{TE}.__init__",
                bind(f"{SOCKET}:wrap_init", settings),
                why="Megatron has no argument for windows of a ring, or layouts of documents",
            )
        # A suite of ours builds Megatron's config itself; a Megatron-LM script from its arguments.
        if options.context_parallel_algo and megatron.has_training():
            yield Patch.wrap(
                "megatron.training.arguments:validate_args",
                functools.partial(wrap_validate_args, options=options),
                why="Megatron knows the algorithms by other names",
            )


def wrap_validate_args(original: Callable[..., Any], options: Any) -> Callable[..., Any]:
    """Write the algorithm of context parallelism as Megatron does, before it checks it."""

    @functools.wraps(original)
    def validate_args(args: Namespace, *others: Any, **kwargs: Any) -> Any:
        choice = chosen(options, vars(args))
        if choice.size > 1:
            args.cp_comm_type = [choice.comm_type]
            args.hierarchical_context_parallel_sizes = choice.hierarchical_sizes
        return original(args, *others, **kwargs)

    return validate_args


def chosen(options: Any, arguments: Mapping[str, Any]) -> ContextOptions:
    """Return what the options and Megatron's arguments choose; ConfigError if it is not legal."""
    return ContextOptions(
        size=arguments.get("context_parallel_size") or 1,
        algo=options.context_parallel_algo or _algo_of(arguments.get("cp_comm_type")),
        ulysses_degree=options.ulysses_degree_in_cp or _degree(arguments),
        window=options.cp_window_size,
    )


def _algo_of(comm_type: Any) -> str:
    """Return the algorithm of Megatron's cp_comm_type; that of the first layer in a list."""
    first = comm_type[0] if isinstance(comm_type, (list, tuple)) and comm_type else comm_type
    return {v: k for k, v in rules.COMM_TYPES.items()}.get(first or "p2p", str(first))


def _degree(arguments: Mapping[str, Any]) -> int | None:
    sizes = arguments.get("hierarchical_context_parallel_sizes")
    return sizes[0] if sizes else None


def _check_comm_type(options: Any, context: Context) -> None:
    """Both spellings of an algorithm may be given if they agree; Megatron's default is p2p."""
    given = context.argument("cp_comm_type") or ["p2p"]
    given = [given] if isinstance(given, str) else given
    algo = options.context_parallel_algo
    if algo and set(given) - {"p2p", rules.COMM_TYPES[algo]}:
        raise ConfigError(
            f"{rules.ALGO} {algo} and --cp-comm-type {' '.join(given)} contradict each other: "
            "drop one"
        )


def _check_layout(options: Any) -> None:
    if options.cp_document_layout == "whole":
        raise ConfigError(
            "--cp-document-layout whole: Megatron-LM's data loader cuts documents in zigzag order: "
            "drop it"
        )


def _check_documents(options: Any, context: Context) -> None:
    """Documents that only a mask keeps apart would see each other."""
    if context.argument("reset_attention_mask") and options.attention_mask_type == "causal":
        raise ConfigError(
            "--reset-attention-mask: a causal layer takes no mask, and documents would mix: add "
            "--attention-mask-type general"
        )


def _is_script(context: Context) -> bool:
    """Return whether Megatron-LM's own data loader cuts the batch; suites pad theirs."""
    return "create_attention_mask_in_dataloader" in (context.megatron or {})
