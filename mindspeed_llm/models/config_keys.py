"""Keys of a config.json that no family reads: which may be ignored, and the rest is refused.

A key that is neither read nor listed here may scale, mask or rotate something: training a model
without it gives wrong numbers, so it must be off (null, false, empty) or the model is refused.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from mindspeed.config import ConfigError

SHOWN = 4

HARMLESS = frozenset(
    # What the file is about and who wrote it.
    "model_type architectures auto_map transformers_version dtype torch_dtype tokenizer_class "
    "name_or_path unsloth_fixed unsloth_version mergekit license "
    # Weights: how they start, how they are stored (checkpoint.hf_source refuses quantized ones).
    "initializer_range init_std initializer_factor quantization_config use_bfloat16 "
    # Exact in transformers: matmuls in slices, kernels of one function, rematerialization.
    "pretraining_tp attn_implementation use_flash_attn use_flash_attention_2 flash_attention "
    "gradient_checkpointing use_cache cache_implementation max_sequence_length ep_size "
    # Token ids are the tokenizer's; padding is masked.
    "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id "
    "decoder_start_token_id forced_bos_token_id forced_eos_token_id suppress_tokens "
    "begin_suppress_tokens "
    # What a call returns, heads of other tasks.
    "output_attentions output_hidden_states output_router_logits output_scores return_dict "
    "return_dict_in_generate torchscript keys_to_ignore_at_inference id2label label2id num_labels "
    "problem_type finetuning_task task_specific_params is_decoder is_encoder_decoder prefix "
    "add_cross_attention chunk_size_feed_forward tie_encoder_decoder tf_legacy_loss "
    "classifier_dropout "
    # Where a sliding window begins; the window itself is a key that is read or refused.
    "max_window_layers "
    # Sampling, from before there was a generation_config.json.
    "max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups "
    "diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences "
    "exponential_decay_length_penalty remove_invalid_values generation_config".split()
)
"""Keys that change no number of a train step, whatever their value."""

NEUTRAL: Mapping[str, Any] = {
    **dict.fromkeys(
        "attention_dropout hidden_dropout resid_dropout embedding_dropout dropout attn_pdrop "
        "resid_pdrop embd_pdrop ffn_dropout router_jitter_noise".split(),
        0,
    ),
    **dict.fromkeys(
        "embedding_multiplier logits_scaling residual_multiplier logit_scale scale_emb "
        "partial_rotary_factor rotary_pct lm_head_multiplier".split(),
        1,
    ),
    **dict.fromkeys("is_causal use_rms_norm use_rope".split(), True),
    "position_embedding_type": "rope",
    "layer_types": ["full_attention"],
}
"""Keys whose one harmless value is not null, false or empty."""

ROTARY = frozenset(["finetuned"])
ROTARY_NEUTRAL: Mapping[str, Any] = {"partial_rotary_factor": 1, "truncate": True}


def refuse_unread(
    source: str,
    family: str,
    values: Iterable[tuple[str, Any]],
    ignored: Collection[str] = HARMLESS,
    neutral: Mapping[str, Any] = NEUTRAL,
) -> None:
    """Raise if one of the values that were not read can change what the model computes."""
    wrong = [
        f"{name} is {value!r:.40}" + (f" (only {neutral[name]} is)" if name in neutral else "")
        for name, value in values
        if not (name in ignored or name.startswith("_") or _is_off(value, neutral.get(name)))
    ]
    if wrong:
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise ConfigError(
            f"{source}: not supported for {family}: {', '.join(wrong[:SHOWN])}{more}: the model "
            "would compute other numbers; delete a key from the file only if it changes none"
        )


def _is_off(value: Any, neutral: Any) -> bool:
    if neutral is None:
        return value is None or value is False or value in ("", [], {})
    if isinstance(value, list) and isinstance(neutral, list):
        return all(entry in neutral for entry in value)
    is_same_kind = isinstance(value, bool) == isinstance(neutral, bool)
    return value is None or (is_same_kind and bool(value == neutral))
