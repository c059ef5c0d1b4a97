"""What a mixture of experts cannot be trained with, before a model is built."""

from mindspeed.config import ConfigError
from mindspeed.training.expert_options import check_has_no_experts, check_shared_sequence
from mindspeed.training.stages import ONLINE
from mindspeed_llm.models.config import ModelConfig, MoEConfig
from mindspeed_llm.training import model
from mindspeed_llm.training.options import TrainOptions


def check_experts(options: TrainOptions, shape: ModelConfig) -> None:
    """Raise ConfigError for a mixture of experts under parallel sizes that Megatron refuses."""
    if shape.moe is None:
        check_has_no_experts(options)
    else:
        _check_dispatch(options)
        _check_overlap(options)
        _check_capacity(options, shape.moe)
        _check_local_experts(options)
        _check_biases(options, shape)
        _check_router(options, shape.moe, shape.family)
        _check_shared_experts(options, shape.moe, shape.family)
        check_shared_sequence(options.tensor_model_parallel_size, options.sequence_parallel)


def _check_local_experts(options: TrainOptions) -> None:
    is_local = options.transformer_impl == "local"
    if is_local and options.moe_grouped_gemm and not options.bf16:
        raise ConfigError(
            "--moe-grouped-gemm: with --transformer-impl local Megatron has it for --bf16 only: "
            "add that, or drop one of the two"
        )


def _check_biases(options: TrainOptions, shape: ModelConfig) -> None:
    """Refuse to split experts with biases, which every rank would add, and local ones."""
    if shape.linear_bias and options.transformer_impl == "local":
        # Megatron adds the bias in place to a view that autograd does not allow to be changed.
        raise ConfigError("experts with biases need --transformer-impl transformer_engine")
    size = options.expert_tensor_parallel_size or options.tensor_model_parallel_size
    if shape.linear_bias and size > 1 and not options.moe_tp_extend_ep:
        raise ConfigError(
            f"experts with biases cannot be split over {size} ranks: add "
            "--expert-tensor-parallel-size 1, or --moe-tp-extend-ep"
        )


def _check_router(options: TrainOptions, moe: MoEConfig, family: str) -> None:
    if options.moe_router_bias_update_rate is not None and not moe.expert_bias:
        raise ConfigError(
            f"--moe-router-bias-update-rate {options.moe_router_bias_update_rate:g}: routers of "
            f"this {family} model choose experts without a bias: drop it"
        )
    if options.moe_router_load_balancing_type == "none" and options.moe_aux_loss_coeff:
        raise ConfigError(
            f"--moe-aux-loss-coeff {options.moe_aux_loss_coeff:g}: with "
            "--moe-router-load-balancing-type none no loss balances the load: drop one of the two"
        )
    if options.moe_router_fusion and not model.has_fused_router():
        raise ConfigError(
            "--moe-router-fusion: this megatron-core has no fused router: use 0.16, or drop it"
        )


def check_group_score(options: TrainOptions, moe: MoEConfig, family: str) -> None:
    """Raise ConfigError for another score of groups of experts than the model has."""
    given, has = options.moe_router_group_score, moe.group_score if moe.limits_groups else "none"
    if given is not None and given != has:
        raise ConfigError(
            f"--moe-router-group-score {given}: this {family} model has {has}, which its "
            "config.json decides: drop it"
        )
    if options.moe_router_fusion and moe.other_group_score:
        raise ConfigError(
            f"--moe-router-fusion: this {family} model scores groups of experts by "
            f"{moe.group_score}, which the fused kernel does not know: drop it"
        )


def _check_shared_experts(options: TrainOptions, moe: MoEConfig, family: str) -> None:
    """Refuse another number of shared experts than the model has."""
    given = options.n_shared_experts
    has = (moe.shared_ffn_hidden_size or 0) / moe.ffn_hidden_size
    if given is not None and given != has:
        raise ConfigError(
            f"--n-shared-experts {given}: this {family} model has {has:g}, which its config.json "
            "decides: drop it"
        )
    if options.moe_shared_expert_overlap and not has:
        raise ConfigError(
            f"--moe-shared-expert-overlap: this {family} model has no shared experts: drop it"
        )
    dispatcher = options.moe_token_dispatcher_type
    if options.moe_shared_expert_overlap and dispatcher != "alltoall":
        raise ConfigError(
            f"--moe-shared-expert-overlap: --moe-token-dispatcher-type {dispatcher} has no "
            "collectives to run shared experts beside: use alltoall, or drop it"
        )


def _check_dispatch(options: TrainOptions) -> None:
    """Refuse collectives of equal sizes where ranks have different numbers of tokens."""
    samples = options.stage in ONLINE
    tp = options.tensor_model_parallel_size
    is_wider = (options.expert_tensor_parallel_size or tp) > tp
    is_shared = options.expert_model_parallel_size > 1 or is_wider
    if is_shared and (samples or options.variable_seq_lengths):
        why = f"--stage {options.stage}" if samples else "--variable-seq-lengths"
        if options.moe_token_dispatcher_type != "alltoall":
            raise ConfigError(
                f"--moe-token-dispatcher-type {options.moe_token_dispatcher_type}: with {why} "
                "ranks have different numbers of tokens: use alltoall"
            )
        if options.moe_pad_expert_input_to_capacity:
            raise ConfigError(
                f"--moe-pad-expert-input-to-capacity: with {why} ranks have different numbers of "
                "tokens: drop it"
            )
    if samples and options.moe_expert_capacity_factor is not None:
        raise ConfigError(
            f"--moe-expert-capacity-factor {options.moe_expert_capacity_factor:g}: a completion "
            f"would depend on those sampled beside it: drop it for --stage {options.stage}"
        )
    _check_precomputed(options)


def _check_precomputed(options: TrainOptions) -> None:
    """Refuse to keep values that depend on the pairs, or places in a row, of one micro-batch."""
    given = []
    if options.moe_expert_capacity_factor is not None:
        given.append(f"--moe-expert-capacity-factor {options.moe_expert_capacity_factor:g}")
    if options.fix_router:
        given.append("--fix-router")
    if given and options.precompute_ref_log_probs:
        raise ConfigError(
            f"{given[0]}: what the reference says about a pair would depend on its micro-batch, "
            "and --precompute-ref-log-probs keeps it for all later ones: drop one"
        )


def _check_overlap(options: TrainOptions) -> None:
    """Refuse to take micro-batches in turns where no schedule does; Megatron refuses the rest."""
    flag = "--overlap-moe-expert-parallel-comm"
    if not options.overlap_moe_expert_parallel_comm:
        if options.delay_wgrad_compute:
            raise ConfigError(f"--delay-wgrad-compute: is for {flag}: add that, or drop it")
        return
    if not model.can_overlap_experts():
        raise ConfigError(f"{flag}: this megatron-core has no such schedule: use 0.16, or drop it")
    if options.stage != "sft":
        raise ConfigError(
            f"{flag}: is for pretraining and --stage sft, not {options.stage}: drop it"
        )
    if options.lora_r is not None or options.lora_load is not None:
        raise ConfigError(
            f"{flag}: Megatron wants a gradient of the embedding, which is frozen beside adapters: "
            "drop it"
        )
    if not (options.bf16 or options.fp16):
        raise ConfigError(f"{flag}: Megatron has it for --bf16 and --fp16: add one, or drop it")
    if options.expert_model_parallel_size == 1:
        raise ConfigError(
            f"{flag}: with --expert-model-parallel-size 1 no rank sends tokens to another: use 2 "
            "or more, or drop it"
        )
    has_smaller_stages = options.num_layers_per_virtual_pipeline_stage is not None
    if options.pipeline_model_parallel_size > 1 and not has_smaller_stages:
        raise ConfigError(
            f"{flag}: Megatron has it for pipelines of several smaller stages a rank: add "
            "--num-layers-per-virtual-pipeline-stage, or drop it"
        )
    if options.delay_wgrad_compute and options.transformer_impl == "local":
        raise ConfigError("--delay-wgrad-compute needs --transformer-impl transformer_engine")


def _check_capacity(options: TrainOptions, moe: MoEConfig) -> None:
    """Refuse to pad experts to no capacity, or to more tokens than there are."""
    factor = options.moe_expert_capacity_factor
    if not options.moe_pad_expert_input_to_capacity:
        return
    if factor is None:
        raise ConfigError(
            "--moe-pad-expert-input-to-capacity: there is no capacity: add "
            "--moe-expert-capacity-factor, or drop it"
        )
    if factor > moe.num_experts / moe.topk:
        raise ConfigError(
            f"--moe-expert-capacity-factor {factor:g}: with {moe.num_experts} experts, {moe.topk} "
            f"a token, none gets more than {moe.num_experts}/{moe.topk} of its even share: use at "
            "most that, or drop --moe-pad-expert-input-to-capacity"
        )
