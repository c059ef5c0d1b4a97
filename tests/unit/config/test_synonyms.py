"""Options of other libraries are answered with ours, in every command and file."""

import argparse

import pytest

from mindspeed.config import ConfigError, Options, Spelling, add_options, build, suggest_flags
from mindspeed.config.options import without_none
from mindspeed.config.synonyms import FILES, SYNONYMS, by_meaning, names_in
from mindspeed.fsdp import FsdpOptions
from mindspeed_llm.checkpoint import ConvertOptions
from mindspeed_llm.data.options import PreprocessOptions
from mindspeed_llm.generation.options import GenerateOptions
from mindspeed_llm.training.options import TrainOptions
from mindspeed_mm.checkpoint.options import ConvertOptions as MmConvertOptions
from mindspeed_mm.data.options import BasicOptions, DataConfig, ProcessorOptions
from mindspeed_mm.models.options import LoraConfig, ModelConfig
from mindspeed_mm.training.options import MmOptions

COMMANDS = [TrainOptions, MmOptions, ConvertOptions, MmConvertOptions, PreprocessOptions]
COMMANDS += [GenerateOptions, FsdpOptions]
NESTED = [BasicOptions, ProcessorOptions, LoraConfig]
SECTIONS = {"model": ModelConfig, "data": DataConfig, "fsdp2_config": FsdpOptions}


def exists(path: str) -> bool:
    section, _, rest = path.partition(".")
    owner = SECTIONS[section]
    for name in rest.split("."):
        if owner is None or name not in owner.model_fields:
            return False
        inner = without_none(owner.model_fields[name].annotation)[0]
        owner = inner if isinstance(inner, type) and issubclass(inner, Options) else None
    return True


def test_every_answer_names_real_options():
    assert len(SYNONYMS) >= 60
    known = {field for options in (*COMMANDS, *NESTED) for field in options.model_fields}
    assert known.issuperset(FILES.values())
    for name, answers in SYNONYMS.items():
        assert answers and name == name.lower().replace("-", "_")
        for answer in answers:
            assert names_in(answer), answer
            for target in names_in(answer):
                assert exists(target) if "." in target else target in known, (name, target)


def test_every_entry_answers_in_some_command():
    for name in SYNONYMS:
        assert any(
            by_meaning(name, options.model_fields, str) != "there is no such option here"
            for options in (*COMMANDS, *NESTED)
            if name not in options.model_fields
        ), name


LLM = [
    ("--lora-rank", "did you mean --lora-r?"),
    ("--cutoff-len", "did you mean --seq-length?"),
    ("--wandb-project", "use --report-to wandb"),
    ("--simpo-gamma", "use --gamma-beta-ratio, as a multiple of --simpo-beta"),
    ("--use-ema", "use --optimizer-selection fused_ema_adamw and --ema-decay"),
    (
        "--gradient-accumulation-steps",
        "use --global-batch-size = accumulation steps x --micro-batch-size x data-parallel size",
    ),
    ("--max-grad-norm", "did you mean --clip-grad?"),
    ("--per_device_train_batch_size", "did you mean --micro-batch-size?"),
    ("--learning-rate", "did you mean --lr?"),
    ("--num-train-epochs", "did you mean --epochs?"),
    ("--warmup-ratio", "did you mean --lr-warmup-fraction?"),
    ("--logging-steps", "did you mean --log-interval?"),
    ("--save-steps", "did you mean --save-interval?"),
    ("--output-dir", "did you mean --save?"),
    ("--model-name-or-path", "did you mean --load?"),
    ("--finetuning-type", "use --lora-r, which makes it a training of adapters"),
    ("--lora-target", "did you mean --lora-target-modules?"),
    ("--template", "did you mean --prompt-type?"),
    ("--dataset", "did you mean --data-path?"),
    ("--train-samples", "use --train-iters = samples / --global-batch-size"),
]
MM = [
    ("--freeze-vision-tower", "image_encoder.vision_encoder.freeze in the model section"),
    ("--lora-rank", "did you mean lora.r in the model section (--mm-model)?"),
    ("--cutoff-len", "did you mean --seq-length?"),
    ("--dataset", "dataset_param.basic_parameters.dataset in the data section (--mm-data)?"),
    ("--gradient-checkpointing", "recompute_modules in the fsdp2_config section"),
    ("--max-grad-norm", "did you mean --clip-grad?"),
]


@pytest.mark.parametrize("options_class, cases", [(TrainOptions, LLM), (MmOptions, MM)])
def test_flags(capsys, options_class, cases):
    parser = argparse.ArgumentParser(prog="train", allow_abbrev=False)
    add_options(parser, options_class)
    suggest_flags(parser)
    for flag, hint in cases:
        with pytest.raises(SystemExit):
            parser.parse_args([flag, "8"])
        said = capsys.readouterr().err
        assert hint in said and f"{flag}: " in said, said


def test_keys_of_a_file():
    with pytest.raises(ConfigError) as caught:
        build(TrainOptions, {"lora_rank": 8, "warmup_ratio": 0.1}, Spelling.KEY, "run.yaml")
    assert str(caught.value) == (
        "run.yaml: unknown key lora_rank: 8; did you mean lora_r?; "
        "unknown key warmup_ratio: 0.1; did you mean lr_warmup_fraction?"
    )
    with pytest.raises(ConfigError, match=r"unknown key max_length: 512; did you mean cutoff_len"):
        build(BasicOptions, {"max_length": 512}, Spelling.KEY)
    with pytest.raises(ConfigError, match="unknown key rank: 8; did you mean r"):
        build(LoraConfig, {"rank": 8}, Spelling.KEY)


def test_an_option_without_a_counterpart_is_not_answered_by_its_letters():
    with pytest.raises(ConfigError, match="unknown key lora_rank: 8; there is no such option here"):
        build(ConvertOptions, {"lora_rank": 8}, Spelling.KEY)


def test_a_singular_is_answered_by_its_plural():
    assert by_meaning("--rank", {"ranks"}, "--{}".format) == "did you mean --ranks?"


def test_letters_count_where_no_meaning_is_known(capsys):
    parser = argparse.ArgumentParser(prog="train", allow_abbrev=False)
    add_options(parser, TrainOptions)
    suggest_flags(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--seq-lenght", "8"])
    assert "did you mean --seq-length?" in capsys.readouterr().err
