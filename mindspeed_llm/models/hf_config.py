"""Read the config.json of an HF model; a key that no family reads is ignored or refused.

A key that is neither read nor listed here may scale, mask or rotate something: training a model
without it gives wrong numbers, so it must be off (null, false, empty) or the model is refused.
"""

import json
import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from mindspeed.config import ConfigError, kind_of, parse_json
from mindspeed_llm.models.config import RotaryConfig, Scaling

LARGEST = 16 << 20
"""Bytes of the largest config.json that is accepted."""
LARGEST_NUMBER = 1e30
MANY = 10_000
"""Limit of layers, heads or experts, which are iterated over; more is damage or an attack."""
SHOWN = 4
HARMLESS = frozenset(
    # Description of the file and its author.
    "model_type architectures auto_map transformers_version dtype torch_dtype tokenizer_class "
    "name_or_path unsloth_fixed unsloth_version mergekit license "
    # Weights: how they start, how they are stored (checkpoint.hf refuses quantized ones).
    "initializer_range init_std initializer_factor quantization_config use_bfloat16 "
    # Exact in transformers: matmuls in slices, kernels of one function, rematerialization.
    "pretraining_tp attn_implementation use_flash_attn use_flash_attention_2 flash_attention "
    "gradient_checkpointing use_cache cache_implementation max_sequence_length ep_size "
    # Token ids are the tokenizer's; padding is masked.
    "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id "
    "decoder_start_token_id forced_bos_token_id forced_eos_token_id suppress_tokens "
    "begin_suppress_tokens "
    # Return values of a call, heads of other tasks.
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

CLASSIFIER = "ForSequenceClassification"
"""How the name of a class with a head for scores ends, as in LlamaForSequenceClassification."""
ROTARY = frozenset(["finetuned"])
ROTARY_NEUTRAL: Mapping[str, Any] = {"partial_rotary_factor": 1}


class HfConfig:
    """The values of a config.json, with a record of which were read.

    A missing or wrong value is reported with the file's name.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self._read: set[str] = set()
        self.source = source

    @classmethod
    def read(cls, folder: Path) -> "HfConfig":
        """Read folder/config.json."""
        path = folder / "config.json"
        try:
            if path.stat().st_size > LARGEST:
                raise ConfigError(f"{path}: is larger than {LARGEST >> 20} MiB: not a config.json")
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: is not valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: holds {kind_of(values)}, not names and values")
        return cls(values, str(path))

    def of_type(self, model_type: str, defaults: Mapping[str, Any]) -> "HfConfig":
        """Return the config with its type, and with values for keys that the file lacks."""
        return HfConfig({**defaults, **self._values, "model_type": model_type}, self.source)

    def refuse_unread(self, family: str, ignored: Collection[str] = ()) -> None:
        """Raise if a key that was not read, and is not to be ignored, can change the model."""
        refuse_unread(self.source, family, self._unread(), HARMLESS.union(ignored))

    def _unread(self) -> list[tuple[str, Any]]:
        return [(name, value) for name, value in self._values.items() if name not in self._read]

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value that may be missing; null counts as missing."""
        self._read.add(name)
        value = self._values.get(name)
        return default if value is None else value

    def integer(
        self, *names: str, default: int | None = None, least: int = 1, most: int = 1 << 31
    ) -> int:
        """Return the first of several names that is there, a whole number within bounds."""
        for name in names:
            value = self.get(name)
            if value is not None:
                is_whole = isinstance(value, int) and not isinstance(value, bool)
                if not is_whole or not least <= value <= most:
                    allowed = f"a whole number from {least} to {most}"
                    raise ConfigError(
                        f"{self.source}: {name} is {value!r:.40}: it must be {allowed}"
                    )
                return int(value)
        if default is None:
            raise ConfigError(f"{self.source}: {' or '.join(names)} is missing")
        return default

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.source}: {name} is {value!r:.40}: it must be true or false")
        return value

    def values(self, name: str) -> list[Any]:
        """Return a list; nothing where it is missing."""
        found = self.get(name, [])
        if not isinstance(found, list):
            raise ConfigError(f"{self.source}: {name} is {found!r:.40}: it must be a list")
        return found

    def number(self, name: str, default: float) -> float:
        """Return a finite number."""
        return _number(self.source, name, self.get(name, default))

    def positive(self, name: str, default: float) -> float:
        """Return a number above 0."""
        value = self.number(name, default)
        if value <= 0:
            raise ConfigError(f"{self.source}: {name} is {value:g}: it must be above 0")
        return value

    def rotary(self) -> RotaryConfig:
        """Return the rotary embedding, from rope_parameters or from rope_theta and rope_scaling."""
        rope = self._rotary_values()
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        kinds: dict[str, Scaling] = {"default": "none", "linear": "linear"}
        kinds |= {"llama3": "llama3", "yarn": "yarn"}
        if kind not in kinds:
            raise ConfigError(
                f"{self.source}: rotary scaling {kind!r} is not known: "
                f"{', '.join(kinds)} are (dynamic scaling counts only beyond the trained length: "
                "set rope_type to default to train within it)"
            )
        if kind != "default" and rope.get("factor") is None:
            raise ConfigError(f"{rope.source}: factor is missing, which {kind} scaling needs")
        length = self.integer("max_position_embeddings", default=2048)
        rotary = RotaryConfig(
            base=rope.positive("rope_theta", self.positive("rope_theta", 10000.0)),
            scaling=kinds[kind],
            factor=rope.positive("factor", 1.0),
            original_length=int(
                # Outside the rotary parameters it takes precedence, as in transformers.
                self.number(
                    "original_max_position_embeddings",
                    rope.number("original_max_position_embeddings", length),
                )
            ),
            low_frequency_factor=rope.number("low_freq_factor", 1.0),
            high_frequency_factor=rope.number("high_freq_factor", 4.0),
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            mscale=rope.number("mscale", 1.0),
            mscale_all_dim=rope.number("mscale_all_dim", 0.0),
            truncate=rope.flag("truncate", True),
        )
        _check_temperature(rope, rotary)
        refuse_unread(rope.source, f"{kind} rope", rope._unread(), ROTARY, ROTARY_NEUTRAL)
        return rotary

    def _rotary_values(self) -> "HfConfig":
        given = {name: self.get(name) for name in ("rope_scaling", "rope_parameters")}
        given = {name: values for name, values in given.items() if values}
        for name, values in given.items():
            if not isinstance(values, dict):
                raise ConfigError(
                    f"{self.source}: the rotary parameters {name} are {values!r:.40}, not an object"
                )
        if len(given) > 1 and given["rope_scaling"] != given["rope_parameters"]:
            raise ConfigError(
                f"{self.source}: rope_scaling and rope_parameters differ: keep one of them"
            )
        name, values = next(iter(given.items()), ("rope_parameters", {}))
        return HfConfig(values, f"{self.source}: {name}")


def set_num_labels(path: Path, labels: int) -> None:
    """Make a config.json that of a sequence-classification model of the same family."""
    values = json.loads(path.read_text(encoding="utf-8"))
    # A config without classes, as configs out of a GGUF file were, still names the family.
    family = "".join(map(str.capitalize, str(values.get("model_type", "")).split("_")))
    classes = values.get("architectures") or [family]
    values |= {
        "architectures": [str(name).partition("For")[0] + CLASSIFIER for name in classes],
        "id2label": {str(number): f"LABEL_{number}" for number in range(labels)},
        "label2id": {f"LABEL_{number}": number for number in range(labels)},
        "tie_word_embeddings": False,
    }
    if values.get("pad_token_id") is None:
        # transformers takes one sequence at a time without it. It reads the score of the last token
        # that is none of padding, so a token that also ends answers would give another score.
        padding, ends = _padding_id(path.parent), values.get("eos_token_id")
        if padding is not None and padding not in (ends if isinstance(ends, list) else [ends]):
            values["pad_token_id"] = padding
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _padding_id(folder: Path) -> int | None:
    """Return the id of the padding token of a folder's tokenizer, None if no file has it."""
    try:
        settings, tokenizer = (
            parse_json((folder / name).read_bytes())
            for name in ("tokenizer_config.json", "tokenizer.json")
        )
        token = settings["pad_token"]
        text = token["content"] if isinstance(token, dict) else token
        ids = {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
        return int(ids[text])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _check_temperature(rope: HfConfig, rotary: RotaryConfig) -> None:
    """Raise where transformers would scale cos and sin of yarn by another factor than we do."""
    given = rope.get("attention_factor")
    if rotary.scaling != "yarn":
        return
    has_both = rope.get("mscale") and rotary.mscale_all_dim
    if not has_both and (rotary.mscale != 1.0 or rotary.mscale_all_dim):
        raise ConfigError(f"{rope.source}: give mscale and mscale_all_dim, or neither")

    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(max(rotary.factor, 1.0)) + 1.0

    own = temperature(rotary.mscale) / temperature(rotary.mscale_all_dim)
    if given is not None and not math.isclose(
        own, _number(rope.source, "attention_factor", given), rel_tol=1e-6
    ):
        raise ConfigError(
            f"{rope.source}: attention_factor is {given}: only {own:.6g}, which the factor of "
            "yarn makes it, is supported"
        )


def _number(source: str, name: str, value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not -LARGEST_NUMBER < value < LARGEST_NUMBER:  # NaN is neither
        raise ConfigError(f"{source}: {name} is {value!r:.40}: it must be a number")
    return float(value)


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
