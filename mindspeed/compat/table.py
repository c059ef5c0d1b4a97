"""What Megatron needs to run here at all: one table, always on, without switches.

`mindspeed.report()` lists the entries with their patches; docs/compat.md explains each.
"""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy

from mindspeed.patching import Aliases, Effect, Patch, find_without_import


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One obstacle and the patches and effects that remove it."""

    name: str
    reason: str
    """One sentence: what fails without it."""
    versions: str = "all"
    """The megatron-core releases that need it; its patches pass through on others."""
    devices: tuple[str, ...] | None = None
    """The devices that need it; None for all."""
    patches: tuple[Patch, ...] = ()
    effects: Callable[[], Iterable[Effect]] = tuple


def _serve(modules: dict[str, str], without: str | None = None) -> Callable[[], Iterator[Effect]]:
    """Serve our modules under foreign names that are absent, or useless without a package."""

    def effects() -> Iterator[Effect]:
        for name, stand_in in modules.items():
            what = f"{name} is {stand_in} unless {without or 'it'} is installed"
            yield Effect(what, _served(name, stand_in, without))

    return effects


@contextmanager
def _served(name: str, stand_in: str, without: str | None) -> Iterator[None]:
    aliases = Aliases()
    aliases.serve(name, stand_in, without)
    yield
    aliases.revert()


def _redirect_cuda() -> Iterator[Effect]:
    from mindspeed import device

    here = device.current()
    yield Effect(f"torch.cuda calls land on {here.name}", here.facade())


_DEPRECATIONS = (
    r"`torch\.distributed\.\w+` is deprecated",
    r"`(load|save)_state_dict` is deprecated",
    r"Please use DTensor instead and we are deprecating ShardedTensor",
    r"`torch\.jit\.script\w*` is deprecated",
    r"full scope is deprecated",  # Megatron warns of its own default
    r"MimoModelConfig is experimental",  # at import, whatever model is trained
)
_LOGGED_DEPRECATIONS = {
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.dist_checkpointing.strategies.torch": "MCore's async save is deprecated",
}


def _hide_deprecations() -> Iterator[Effect]:
    yield Effect("deprecation warnings about what Megatron itself does are hidden", _hidden())


@contextmanager
def _hidden() -> Iterator[None]:
    before = list(warnings.filters)
    for message in _DEPRECATIONS:
        warnings.filterwarnings("ignore", message, category=Warning)
    ours = [entry for entry in warnings.filters if entry not in before]
    logged = {name: _without(message) for name, message in _LOGGED_DEPRECATIONS.items()}
    for name, is_shown in logged.items():
        logging.getLogger(name).addFilter(is_shown)
    yield
    for name, is_shown in logged.items():
        logging.getLogger(name).removeFilter(is_shown)
    warnings.filters[:] = [entry for entry in warnings.filters if entry not in ours]  # type: ignore[index]


def _without(message: str) -> Callable[[logging.LogRecord], bool]:
    return lambda record: message not in record.getMessage()


# megatron-core 0.12 calls it by the name that numpy 2 removed.
_NUMPY_PRODUCT = (
    ()
    if hasattr(numpy, "product")
    else (Patch.add("numpy:product", numpy.prod, why="numpy 2 removed the name"),)
)
_WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async"
# Later releases gather the state of a parameter instead of reading parts of it.
_MODULE = "megatron.core.dist_checkpointing.strategies.resharding"
_RESHARDING = (
    ()
    if find_without_import(_MODULE) is None
    else (
        Patch.wrap(
            f"{_MODULE}:reformulate_single_nd_flattened_tensor",
            "mindspeed.compat.checkpoint:wrap_reformulate",
            why="it counts in parts of a rank, as if all shapes were the same",
        ),
    )
)
# megatron-core 0.12 has no such schedule.
_PLANS = "megatron.core.models.gpt.fine_grained_callables"
_FREED_INPUTS = (
    ()
    if find_without_import(_PLANS) is None
    else (
        Patch.wrap(
            f"{_PLANS}:should_free_input",
            "mindspeed.compat.layers:wrap_should_free_input",
            why="a single expert of a rank reads the tokens that arrive, which no sort has copied",
        ),
    )
)

_OURS = "mindspeed.compat.stand_ins"

TABLE = (
    Entry(
        name="apex_stand_in",
        reason="Local specs need apex's fused layer norm, softmax and weight-gradient GEMM.",
        effects=_serve(
            {
                "apex": f"{_OURS}.apex",
                "fused_weight_gradient_mlp_cuda": f"{_OURS}.fused_weight_gradient_mlp_cuda",
                "scaled_masked_softmax_cuda": f"{_OURS}.scaled_softmax.masked",
                "scaled_softmax_cuda": f"{_OURS}.scaled_softmax.plain",
                "scaled_upper_triang_masked_softmax_cuda": f"{_OURS}.scaled_softmax.causal",
            }
        ),
    ),
    Entry(
        name="argument_hook",
        reason="A Megatron-LM script parses Megatron's flags only; this adds MindSpeed's.",
        patches=(
            Patch.wrap(
                "megatron.training.arguments:parse_args",
                "mindspeed.features.argument_hook:wrap_parse_args",
                why="a script does not pass our flags through extra_args_provider by itself",
            ),
        ),
    ),
    Entry(
        name="biases_of_padded_experts",
        reason="Biases by which routers choose never move where experts are padded to a capacity.",
        patches=(
            Patch.wrap(
                "megatron.core.transformer.moe.router:TopKRouter.routing",
                "mindspeed.compat.layers:wrap_routing",
                why="it counts the padding of each expert as tokens, so that all loads are equal",
            ),
        ),
    ),
    Entry(
        name="checkpoint_writer",
        reason="Distributed checkpoints fail on newer torch and numpy, and leave a process behind "
        "when a run is stopped.",
        patches=(
            Patch.wrap(
                f"{_WRITER}:FileSystemWriterAsync.prepare_write_data",
                "mindspeed.compat.checkpoint:wrap_prepare_write_data",
                why="it starts a process that ends on SIGTERM to the group and outlives its rank",
            ),
            Patch.wrap(
                f"{_WRITER}:_write_item",
                "mindspeed.compat.checkpoint:wrap_write_item",
                why="newer torch requires an argument that has no default",
            ),
            Patch.wrap(
                f"{_WRITER}:FileSystemWriterAsync.finish",
                "mindspeed.compat.checkpoint:wrap_finish",
                why="torch 2.11 drops the shapes that megatron-core 0.12 adds to the metadata",
            ),
            *_NUMPY_PRODUCT,
        ),
    ),
    Entry(
        name="compiled_helpers",
        reason="compile_helpers() ends a run: wheels have the compiled module but no makefile.",
        patches=(
            Patch.wrap(
                "megatron.core.datasets.utils:compile_helpers",
                "mindspeed.compat.scripts:wrap_compile_helpers",
                why="it runs make where there is nothing to make",
            ),
        ),
    ),
    Entry(
        name="context_parallel_lists",
        reason="A cp_comm_type for each layer ends in an IndexError: layers count from 1.",
        versions="before 0.19",
        patches=(
            Patch.wrap(
                "megatron.core.transformer.transformer_layer:TransformerLayer.__init__",
                "mindspeed.compat.layers:wrap_layer_init",
                why="it indexes the list by the number of the layer",
            ),
        ),
    ),
    Entry(
        name="device_facade",
        reason="Megatron calls torch.cuda and creates tensors with device='cuda'.",
        devices=("cpu", "npu"),
        effects=_redirect_cuda,
    ),
    Entry(
        name="expert_gradients",
        reason="Gradients of experts replicated over tensor-parallel ranks are not reduced.",
        versions="before 0.19",
        patches=(
            Patch.wrap(
                "megatron.core.distributed.data_parallel_base:_BaseDataParallel.__init__",
                "mindspeed.compat.layers:wrap_data_parallel",
                why="experts with a tensor parallelism of their own are reduced in the wrong group",
            ),
        ),
    ),
    Entry(
        name="float32_loss_gradient",
        reason="Megatron's fused loss rounds the gradient of float32 logits to bfloat16.",
        patches=(
            Patch.wrap(
                "megatron.core.fusions.fused_cross_entropy:fused_vocab_parallel_cross_entropy",
                "mindspeed.ops.cross_entropy.megatron:wrap_unless_bfloat16",
                why="its gradient is bfloat16 whatever the logits are",
            ),
        ),
    ),
    Entry(
        name="frozen_embeddings",
        reason="Stages of a pipeline that share a frozen embedding reduce a gradient of None.",
        versions="before 0.16",
        patches=(
            Patch.wrap(
                "megatron.core.distributed.finalize_model_grads:_allreduce_word_embedding_grads",
                "mindspeed.compat.layers:wrap_allreduce_word_embedding_grads",
                why="it does not ask whether the weight is trained: with adapters it is not",
            ),
        ),
    ),
    Entry(
        name="fsdp_on_cpu",
        reason="FSDP refuses CUDA_DEVICE_MAX_CONNECTIONS=1, which tensor parallelism requires.",
        devices=("cpu",),
        patches=(
            Patch.wrap(
                "megatron.training.arguments:validate_args",
                "mindspeed.compat.scripts:wrap_validate_args",
                why="the environment was set before the arguments were known",
            ),
        ),
    ),
    Entry(
        name="grouped_gemm_stand_in",
        reason="The legacy GroupedMLP needs the package grouped_gemm, which exists for CUDA only.",
        effects=_serve({"grouped_gemm": f"{_OURS}.grouped_gemm"}),
    ),
    Entry(
        name="local_norm",
        reason="Norms of local specs refuse sequence parallelism without apex.",
        patches=(
            Patch.wrap(
                "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
                "mindspeed.compat.layers:wrap_torch_norm",
                why="it refuses sequence parallelism, which needs only a mark on the parameters",
            ),
            Patch.wrap(
                "megatron.core.transformer.transformer_block:_get_block_submodules",
                "mindspeed.compat.layers:wrap_block_submodules",
                why="a block of local layers would end with Transformer Engine's norm",
            ),
        ),
    ),
    Entry(
        name="megatron_training_stand_in",
        reason="Wheels before 0.19 lack megatron.training, and 0.19 lacks its tokenizer.",
        # The second name only counts where the first is real.
        effects=_serve(
            {
                "megatron.training": f"{_OURS}.megatron_training",
                "megatron.training.tokenizer": f"{_OURS}.megatron_training.tokenizer",
            }
        ),
    ),
    Entry(
        name="mixed_dtype",
        reason="A bare GPTModel with half-precision params_dtype cannot run a forward pass.",
        devices=("cpu", "cuda"),
        patches=(
            *(
                Patch.wrap(
                    f"megatron.core.tensor_parallel.layers:{name}",
                    "mindspeed.compat.layers:promote",
                    why="params_dtype leaves norms and positions in float32",
                )
                for name in (
                    "linear_with_grad_accumulation_and_async_allreduce",
                    "linear_with_frozen_weight",
                )
            ),
            Patch.wrap(
                "megatron.core.fusions.fused_softmax:FusedScaleMaskSoftmax.forward",
                "mindspeed.compat.layers:keep_type",
                why="config.bf16 alone turns the probabilities of float32 scores into bfloat16",
            ),
        ),
    ),
    Entry(
        name="model_without_arguments",
        reason="get_model reads a global namespace that only Megatron's own scripts fill.",
        patches=(
            Patch.wrap(
                "megatron.training.training:get_model",
                f"{_OURS}.megatron_training.training:wrap_get_model",
                why="without parsed arguments the model's own config decides",
            ),
        ),
    ),
    Entry(
        name="multi_token_prediction",
        reason="The tokens after those of a rank are looked up, and labels counted, without the "
        "other ranks of the sequence; full recomputation knows no packed rows.",
        patches=(
            Patch.wrap(
                "megatron.core.transformer.multi_token_prediction:roll_tensor",
                "mindspeed.parallel.context.next_tokens:wrap_roll_tensor",
                why="0.12 knows no other rank; later ones divide the loss by the labels of one, "
                "or of none, and wait for the device at each end of a packed document",
            ),
            Patch.wrap(
                "megatron.core.tensor_parallel.random:checkpoint",
                "mindspeed.compat.layers:wrap_checkpoint",
                why="it saves arguments as tensors, and is given where packed documents are",
            ),
            Patch.wrap(
                "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer.forward",
                "mindspeed.compat.layers:wrap_further_layer",
                why="it refuses a number of decoder layers that are recomputed at once",
            ),
        ),
    ),
    Entry(
        name="no_nvcc",
        reason="A Megatron-LM script runs nvcc at start and then compiles nothing.",
        patches=(
            Patch.replace(
                "megatron.legacy.fused_kernels:load",
                "mindspeed.compat.scripts:load_no_kernels",
                why="its only effect is to fail where nvcc is absent: the list of kernels is empty",
            ),
        ),
    ),
    Entry(
        name="optional_flash_attn",
        reason="Megatron asks for the version of flash-attn as if it were always installed.",
        patches=(
            Patch.wrap(
                "megatron.core.utils:is_fa_min_version",
                "mindspeed.compat.scripts:wrap_is_fa_min_version",
                why="it fails in an import where the caller has a message of its own",
            ),
        ),
    ),
    Entry(
        name="padded_optimizer_state",
        reason="Checkpoints of the distributed optimizer hold shifted weights and moments where a "
        "bucket is padded, or are not all read where the padding of the vocabulary differs.",
        patches=(
            Patch.wrap(
                "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_state_dict",
                "mindspeed.compat.checkpoint:wrap_optimizer_state",
                why="it looks for parameters where they are with padding, in state without it",
            ),
            *_RESHARDING,
        ),
    ),
    Entry(
        name="quiet_deprecations",
        reason="torch and Megatron warn, up to once a step, about what only Megatron can change.",
        effects=_hide_deprecations,
    ),
    Entry(
        name="single_local_expert",
        reason="--overlap-moe-expert-parallel-comm frees the input of experts before backward "
        "where a rank has one expert.",
        versions="0.16",
        patches=_FREED_INPUTS,
    ),
    Entry(
        name="transformer_engine_socket",
        reason="Megatron's default layer specs reach their accelerator through "
        "transformer_engine, which exists for CUDA only.",
        effects=_serve(
            {
                "transformer_engine": "mindspeed.te",
                "transformer_engine_torch": "mindspeed.te.torch_extension",
            }
        ),
    ),
    Entry(
        name="triton_module_stand_ins",
        reason="Megatron imports modules that import triton, also where it does not use them.",
        versions="from 0.16",
        # triton itself stays absent: where Megatron has a path without it, that path is taken.
        effects=_serve(
            {
                "megatron.core.transformer.custom_layers.batch_invariant_kernels": (
                    f"{_OURS}.batch_invariant_kernels"
                ),
                "megatron.core.inference.contexts.attention_context.triton.tensor_ops": (
                    f"{_OURS}.inference_tensor_ops"
                ),
            },
            without="triton",
        ),
    ),
    Entry(
        name="yarn_on_cpu",
        reason="YaRN rotary embeddings are built under torch.device(0), which needs a GPU.",
        devices=("cpu",),
        patches=(
            Patch.wrap(
                "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:"
                "YarnRotaryEmbedding.__init__",
                "mindspeed.compat.layers:wrap_yarn_init",
                why="latent attention does not pass use_cpu_initialization on to it",
            ),
        ),
    ),
)
