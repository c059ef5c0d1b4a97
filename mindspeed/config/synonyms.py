"""Options of LLaMA-Factory, transformers, TRL, peft and Megatron under the names they have here.

{name} is an option of the command that is run, {section.key} a key of the model, data or FSDP2 file
of the multimodal suite. Of several answers the first counts whose options the command has.
"""

import re
from collections.abc import Callable, Collection

FILES = {"model": "mm_model", "data": "mm_data", "fsdp2_config": "fsdp2_config_path"}
"""The flags that name the files of sections: a command that has them has their keys."""

_LENGTH = ("{seq_length}", "{cutoff_len}", "{max_length}")
_MICRO = ("{micro_batch_size}", "{batch_size}")
_MODEL = ("{model.init_from_hf_path}", "{load}", "{load_dir}", "{tokenizer_name_or_path}")
_DATA = ("{data_path}", "{data.dataset_param.basic_parameters.dataset}", "{input}", "{prompts}")
_OUTPUT = ("{save}", "{save_dir}", "{output_prefix}", "{output}")
_WANDB = ("{report_to} wandb",)
_BETA = ("{dpo_beta}, {simpo_beta} or {kto_beta}",)
_LOSS = ("{dpo_loss_type} or {simpo_loss_type}",)
_EVALUATE = ("{eval_interval} and {eval_iters}",)
_VALIDATE = (
    "{data.dataset_param.basic_parameters.val_dataset}",
    "{split}, such as 95,5,0, for shares of {data_path}",
)
_RECOMPUTE = ("{fsdp2_config.recompute_modules}", "{recompute_granularity}")
_ATTENTION = ("{model.attn_implementation}", "{use_flash_attn}")
_DTYPE = ("{bf16} or {fp16}", "{params_dtype}", "{param_dtype}")
_ACCUMULATION = (
    "{global_batch_size} = accumulation steps x {micro_batch_size} x data-parallel size",
)
_LORA = ("{lora_r}, which makes it a training of adapters", "{model.lora}")
_TARGETS = ("{lora_target_modules}", "{target_modules}", "{model.lora.target_modules}")
_RANK = ("{lora_r}", "{r}", "{model.lora.r}")
_RESUME = ("{load}; a run whose {save} holds a checkpoint resumes without it",)
_SHARDING = ("{fsdp2_config_path}", "{use_distributed_optimizer}")
_TP = ("{tensor_model_parallel_size}", "{target_tensor_parallel_size}")
_PP = ("{pipeline_model_parallel_size}", "{target_pipeline_parallel_size}")
_EP = ("{expert_model_parallel_size}", "{target_expert_parallel_size}", "{expert_parallel_size}")
_VIRTUAL = ("{num_layers_per_virtual_pipeline_stage} = layers / stages / virtual stages",)
_TEMPLATE = ("{prompt_type}", "{template}", "{data.dataset_param.basic_parameters.template}")
_TOKENIZER = ("{tokenizer_name_or_path}", "{model_name_or_path}")
_SEE = "model.image_encoder."

SYNONYMS: dict[str, tuple[str, ...]] = {
    # the model and what of it is trained
    "model_name_or_path": _MODEL,
    "model_name": _MODEL,
    "model_path": _MODEL,
    "model": _MODEL,
    "base_model": _MODEL,
    "pretrained_model_name_or_path": _MODEL,
    "pretrained_checkpoint": ("{load}",),
    "checkpoint": ("{load}", "{load_dir}"),
    "resume_from_checkpoint": _RESUME,
    "resume": _RESUME,
    "finetuning_type": _LORA,
    "use_lora": _LORA,
    "use_peft": _LORA,
    "lora_rank": _RANK,
    "lora_dim": _RANK,
    "rank": _RANK,
    "lora_target": _TARGETS,
    "lora_modules": _TARGETS,
    "target_modules": _TARGETS,
    "lora_r": _RANK,
    "lora_alpha": ("{alpha}", "{model.lora.alpha}"),
    "lora_dropout": ("{dropout}", "{model.lora.dropout}"),
    "lora_target_modules": _TARGETS,
    "adapter_name_or_path": ("{lora_load}",),
    "freeze_vision_tower": ("{" + _SEE + "vision_encoder.freeze}",),
    "freeze_multi_modal_projector": ("{" + _SEE + "vision_projector.freeze}",),
    "freeze_language_model": ("{model.text_decoder.freeze}",),
    "freeze_trainable_layers": ("{model.freeze}",),
    "use_ema": ("{optimizer_selection} fused_ema_adamw and {ema_decay}",),
    "ema": ("{optimizer_selection} fused_ema_adamw and {ema_decay}",),
    # data
    "dataset": _DATA,
    "dataset_name": _DATA,
    "dataset_path": _DATA,
    "dataset_dir": _DATA,
    "train_file": _DATA,
    "train_data_path": _DATA,
    "train_data": _DATA,
    "data": _DATA,
    "input_file": ("{input}", "{prompts}"),
    "eval_dataset": _VALIDATE,
    "validation_file": _VALIDATE,
    "valid_data_path": _VALIDATE,
    "val_size": ("{data.dataset_param.basic_parameters.val_rate}", _VALIDATE[1]),
    "dataset_text_field": ("{json_keys}",),
    "json_key": ("{json_keys}",),
    "template": _TEMPLATE,
    "chat_template": _TEMPLATE,
    "cutoff_len": _LENGTH,
    "max_seq_length": _LENGTH,
    "max_seq_len": _LENGTH,
    "max_sequence_length": _LENGTH,
    "model_max_length": _LENGTH,
    "max_length": _LENGTH,
    "sequence_length": _LENGTH,
    "context_length": _LENGTH,
    "seq_len": _LENGTH,
    "block_size": _LENGTH,
    "decoder_seq_length": _LENGTH,
    "encoder_seq_length": _LENGTH,
    "packing": ("{pack}", "{data.dataset_param.basic_parameters.packing}"),
    "neat_packing": ("{neat_pack}", "{data.dataset_param.basic_parameters.neat_packing}"),
    "preprocessing_num_workers": ("{workers}", "{num_workers}"),
    "dataset_num_proc": ("{workers}", "{preprocessing_num_workers}", "{num_workers}"),
    "num_proc": ("{workers}", "{preprocessing_num_workers}", "{num_workers}"),
    "num_workers": ("{workers}",),
    "partitions": ("{n_subs}",),
    "dataloader_num_workers": ("{num_workers}",),
    "data_cache_path": ("{cache_dir}",),
    "tokenizer": _TOKENIZER,
    "tokenizer_name": _TOKENIZER,
    "tokenizer_path": _TOKENIZER,
    "tokenizer_model": _TOKENIZER,
    # batches, length and learning rate
    "per_device_train_batch_size": _MICRO,
    "per_device_eval_batch_size": _MICRO,
    "per_gpu_train_batch_size": _MICRO,
    "train_micro_batch_size_per_gpu": _MICRO,
    "batch_size": _MICRO,
    "train_batch_size": ("{global_batch_size}",),
    "gradient_accumulation_steps": _ACCUMULATION,
    "gradient_accumulation": _ACCUMULATION,
    "grad_accum_steps": _ACCUMULATION,
    "learning_rate": ("{lr}",),
    "num_train_epochs": ("{epochs}",),
    "num_epochs": ("{epochs}",),
    "max_steps": ("{train_iters}",),
    "total_steps": ("{train_iters}",),
    "train_steps": ("{train_iters}",),
    "train_samples": ("{train_iters} = samples / {global_batch_size}",),
    "lr_scheduler_type": ("{lr_decay_style}",),
    "lr_scheduler": ("{lr_decay_style}",),
    "warmup_ratio": ("{lr_warmup_fraction}",),
    "warmup_steps": ("{lr_warmup_iters}",),
    "warmup": ("{lr_warmup_fraction} or {lr_warmup_iters}",),
    "lr_warmup_samples": ("{lr_warmup_iters} = samples / {global_batch_size}",),
    "lr_decay_samples": ("{lr_decay_iters} = samples / {global_batch_size}",),
    "min_learning_rate": ("{min_lr}",),
    "max_grad_norm": ("{clip_grad}",),
    "gradient_clipping": ("{clip_grad}",),
    "optim": ("{optimizer}",),
    "adam_epsilon": ("{adam_eps}",),
    # what is kept and logged
    "output_dir": _OUTPUT,
    "output_path": _OUTPUT,
    "output": _OUTPUT,
    "save_path": _OUTPUT,
    "overwrite_output_dir": ("{no_auto_resume}", "{overwrite}"),
    "save_steps": ("{save_interval}",),
    "save_strategy": ("{save_interval}",),
    "save_total_limit": ("{keep_last}",),
    "logging_steps": ("{log_interval}",),
    "logging_dir": ("{tensorboard_dir}",),
    "use_wandb": _WANDB,
    "wandb_project": _WANDB,
    "plot_loss": ("{log_file}, which mindspeed-llm plot draws",),
    "eval_steps": _EVALUATE,
    "eval_strategy": _EVALUATE,
    "evaluation_strategy": _EVALUATE,
    "do_eval": _EVALUATE,
    # preferences
    "beta": _BETA,
    "pref_beta": _BETA,
    "loss_type": _LOSS,
    "pref_loss": _LOSS,
    "label_smoothing": ("{dpo_label_smoothing} or {simpo_label_smoothing}",),
    "simpo_gamma": ("{gamma_beta_ratio}, as a multiple of {simpo_beta}",),
    "rpo_alpha": ("{pref_ftx}",),
    "ref_model_name_or_path": ("{ref_model}",),
    "precompute_ref_logps": ("{precompute_ref_log_probs}",),
    "desirable_weight": ("{kto_desirable_weight}",),
    "undesirable_weight": ("{kto_undesirable_weight}",),
    "kto_chosen_weight": ("{kto_desirable_weight}",),
    "kto_rejected_weight": ("{kto_undesirable_weight}",),
    # devices
    "torch_dtype": _DTYPE,
    "dtype": _DTYPE,
    "compute_type": _DTYPE,
    "precision": _DTYPE,
    "mixed_precision": _DTYPE,
    "flash_attn": _ATTENTION,
    "attn_implementation": _ATTENTION,
    "attention_backend": _ATTENTION,
    "gradient_checkpointing": _RECOMPUTE,
    "activation_checkpointing": _RECOMPUTE,
    "deepspeed": _SHARDING,
    "fsdp": _SHARDING,
    "fsdp_config": _SHARDING,
    "use_fsdp": _SHARDING,
    "zero_stage": _SHARDING,
    "enable_liger_kernel": ("{model.fused_ops}", "{use_fused_rmsnorm} and {use_fused_swiglu}"),
    "use_liger_kernel": ("{model.fused_ops}", "{use_fused_rmsnorm} and {use_fused_swiglu}"),
    "ddp_timeout": ("{distributed_timeout_minutes}, in minutes",),
    "tp": _TP,
    "tensor_parallel_size": _TP,
    "pp": _PP,
    "pipeline_parallel_size": _PP,
    "ep": _EP,
    "expert_parallel_size": _EP,
    "cp": ("{context_parallel_size}",),
    "ulysses_parallel_size": ("{context_parallel_size}",),
    "num_virtual_stages_per_pipeline_rank": _VIRTUAL,
    # answers
    "max_tokens": ("{max_new_tokens}",),
    "do_sample": ("{temperature}: 0 always takes the best token",),
    "beam_size": ("{num_beams}",),
    "system_prompt": ("{system}",),
    "prompt_file": ("{prompts}",),
}


def by_meaning(name: str, known: Collection[str], spell: Callable[[str], str]) -> str | None:
    """Return what to use instead of another library's option; None for a name of no library.

    An option that this command has no counterpart of must not be answered by its letters.
    """
    plain = name.lstrip("-").replace("-", "_").lower()
    if f"{plain}s" in known:
        return f"did you mean {spell(f'{plain}s')}?"
    for answer in SYNONYMS.get(plain, ()):
        names = names_in(answer)
        roots = (target.partition(".") for target in names)
        if all((FILES[root] if key else root) in known for root, _, key in roots):
            text = re.sub(r"\{([\w.]+)\}", lambda found: _spelled(found[1], spell), answer)
            return f"did you mean {text}?" if answer == f"{{{names[0]}}}" else f"use {text}"
    return "there is no such option here" if plain in SYNONYMS else None


def names_in(answer: str) -> list[str]:
    """Return the options that an answer names."""
    return re.findall(r"\{([\w.]+)\}", answer)


def _spelled(name: str, spell: Callable[[str], str]) -> str:
    if "." not in name:
        return spell(name)
    section, _, key = name.partition(".")
    return f"{key} in the {section} section ({spell(FILES[section])})"
