"""Experts that gather tokens in their GEMMs and keep tokens and pre-activations only."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from mindspeed import config
from mindspeed.config import ConfigError
from mindspeed.features.base import Context, Feature, Level, bind
from mindspeed.features.moe.experts import check_experts
from mindspeed.patching import Patch

OFFLOADED = {"expert_fc1", "moe_act"}
Read = Callable[[str], Any]
"""Gives the value of one of Megatron's arguments by name; None where it is not known."""


class Unserved(NamedTuple):
    """An argument of Megatron's, and the values with which a part of the path cannot run."""

    argument: str
    need: str
    """What that part needs instead, and what to do."""
    part: str = "experts"
    """What stays Megatron's: the experts, or only the dispatcher, which sorts their rows then."""
    is_unserved: Callable[[Any], bool] = bool
    only_with: str | None = None
    """A switch of Megatron's without which the argument has no effect."""


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, str) else value or []


TABLE = (
    Unserved("add_bias_linear", "experts without a bias: add --disable-bias-linear"),
    Unserved("quick_geglu", "plain SwiGLU: use --swiglu for --quick-geglu"),
    Unserved("swiglu", "SwiGLU experts: add --swiglu", is_unserved=lambda value: value is False),
    Unserved("glu_linear_offset", "plain SwiGLU: drop --glu-linear-offset"),
    Unserved("activation_func_clamp_value", "plain SwiGLU: drop --activation-func-clamp-value"),
    Unserved("moe_mlp_glu_interleave_size", "plain SwiGLU: drop --moe-mlp-glu-interleave-size"),
    Unserved("use_te_activation_func", "its own activation: drop --use-te-activation-func"),
    Unserved("moe_apply_probs_on_input", "weights on outputs: drop --moe-apply-probs-on-input"),
    Unserved("fp8", "GEMMs of 16 bits or more: drop --fp8-format"),
    Unserved("fp4", "GEMMs of 16 bits or more: drop --fp4-format"),
    Unserved(
        "activation_func_fp8_input_store",
        "pre-activations of 16 bits or more: drop --activation-func-fp8-input-store",
    ),
    Unserved(
        "offload_modules",
        "activations that stay on the device: drop expert_fc1 and moe_act of --offload-modules",
        is_unserved=lambda value: not OFFLOADED.isdisjoint(_listed(value)),
        only_with="fine_grained_activation_offloading",
    ),
    Unserved(
        "moe_use_legacy_grouped_gemm",
        "Megatron's TEGroupedMLP: drop --moe-use-legacy-grouped-gemm",
    ),
    Unserved(
        "moe_expert_capacity_factor", "rows that are neither dropped nor padded", "dispatcher"
    ),
    Unserved("moe_router_padding_for_fp8", "rows that are not padded", "dispatcher"),
    Unserved("moe_router_padding_for_quantization", "rows that are not padded", "dispatcher"),
    Unserved("overlap_moe_expert_parallel_comm", "layers that run as a whole", "dispatcher"),
    Unserved("enable_cuda_graph", "layers outside of CUDA graphs", "dispatcher"),
    Unserved("external_cuda_graph", "layers outside of CUDA graphs", "dispatcher"),
    Unserved(
        "cuda_graph_impl",
        "layers outside of CUDA graphs",
        "dispatcher",
        is_unserved=lambda value: value not in (None, "none"),
    ),
)
"""All of Megatron's arguments that the path does not serve, by the names of its versions."""


def find_need(part: str, read: Read) -> str | None:
    """Return what a part of the path needs and does not get; None where it can run."""
    for row in TABLE:
        has_effect = row.only_with is None or read(row.only_with)
        if row.part == part and has_effect and row.is_unserved(read(row.argument)):
            return row.need
    return None


class MoeFusedExperts(Feature):
    """Run dispatch on one rank, both grouped GEMMs, SwiGLU and combine as one path."""

    name = "moe_fused_experts"
    title = "Fused experts"
    group = "MoE"
    level = Level.ALGORITHM
    enabled_by = "moe_fused_experts"
    default_devices = ("cuda",)
    conflicts = {"moe_bmm_mc2": "its GEMMs and collectives are one operator"}

    class Options(config.Options):
        """The switch."""

        moe_fused_experts: bool | None = None
        """Gather tokens in the load of the experts' first grouped GEMM, apply SwiGLU in its
        epilogue, and keep the tokens and the pre-activation only. Needs --moe-grouped-gemm.
        Default: on CUDA."""

    def check(self, options: Any, context: Context) -> None:
        """There must be grouped experts, of the only kind that is fused."""
        if context.megatron is None:
            return
        flag = context.name_of(options, "moe_fused_experts")
        check_experts(flag, context)
        if not context.argument("moe_grouped_gemm", False):
            raise ConfigError(f"{flag} needs --moe-grouped-gemm: add that or drop {flag}")
        if need := find_need("experts", context.argument):
            raise ConfigError(f"{flag} needs {need}, or drop {flag}")

    def patches(self, options: Any) -> Iterator[Patch]:
        """Choose when experts and layers are built."""
        experts = "megatron.core.transformer.moe.experts:TEGroupedMLP"
        package = "mindspeed.te.fused_experts"
        yield Patch.wrap(
            f"{experts}.__init__",
            bind(
                f"{package}:wrap_experts_init",
                bool(options.moe_fused_experts),
                partial(find_need, "experts"),
            ),
            why="chosen when experts are built; a spec of each version names them its own way",
        )
        yield Patch.wrap(
            f"{experts}.forward",
            f"{package}:wrap_experts_forward",
            why="it runs the linears one after the other and reads the counts on the host",
        )
        yield Patch.wrap(
            "megatron.core.transformer.moe.moe_layer:MoELayer.__init__",
            bind(
                "mindspeed.moe.local_dispatcher:wrap_layer_init", partial(find_need, "dispatcher")
            ),
            why="the layer names its dispatchers itself; no spec or argument chooses others",
        )
