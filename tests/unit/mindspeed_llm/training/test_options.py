"""The flags of the document's script, and the same from a file."""

import argparse
from pathlib import Path

import pytest

from mindspeed.config import ConfigError
from mindspeed.training.options import RANGES
from mindspeed_llm.training.options import TrainOptions, from_arguments, parse

SCRIPT = """
--finetune --stage sft --is-instruction-dataset --tokenizer-not-use-fast --prompt-type qwen
--padded-samples --variable-seq-lengths
--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --use-mcore-models
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2
--num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28
--max-position-embeddings 4096 --seq-length 4096 --disable-bias-linear --add-qkv-bias
--group-query-attention --num-query-groups 4 --swiglu --normalization RMSNorm
--norm-epsilon 1e-6 --position-embedding-type rope --rotary-base 1000000
--untie-embeddings-and-output-weights --make-vocab-size-divisible-by 1 --padded-vocab-size 152064
--use-flash-attn --use-fused-swiglu --use-fused-rmsnorm --use-fused-rotary-pos-emb
--micro-batch-size 1 --global-batch-size 8 --tokenizer-type PretrainedFromHF
--tokenizer-name-or-path tokenizer --attention-dropout 0 --hidden-dropout 0
--train-iters 5000 --lr 1.25e-6 --lr-decay-style cosine --min-lr 1.25e-7
--lr-warmup-fraction 0.01 --init-method-std 0.01 --weight-decay 0.0 --clip-grad 1.0
--adam-beta1 0.9 --adam-beta2 0.95 --initial-loss-scale 4096 --no-gradient-accumulation-fusion
--no-masked-softmax-fusion --attention-softmax-in-fp32 --bf16
--data-path data --split 100,0,0 --no-load-optim --no-load-rng --no-save-optim --no-save-rng
--seed 1234 --log-interval 1 --save-interval 5000 --eval-interval 5000 --eval-iters 0
--log-throughput --load weights --save saved --distributed-backend nccl
""".split()


def test_the_whole_script_of_the_document_is_understood() -> None:
    options = parse(SCRIPT)
    assert (options.num_layers, options.lr, options.seed) == (28, 1.25e-6, 1234)
    assert options.use_fused_rmsnorm and options.variable_seq_lengths and options.bf16


def test_flags_that_were_renamed_are_known_by_both_names() -> None:
    short = ["--load", "w", "--data-path", "d", "--lr", "1", "--train-iters", "1"]
    assert parse([*short, "--no-pad-to-seq-lengths"]).variable_seq_lengths
    assert parse([*short, "--variable-seq-lengths"]).variable_seq_lengths
    assert parse([*short, "--reset-position-ids"]).reset_position_ids
    assert parse([*short, "--reset-attention-mask"]).reset_attention_mask


def test_a_file_is_equivalent_and_flags_win(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "load: weights\ndata_path: [data]\ntrain_iters: 10\nlr: 1e-5\nbf16: true\n"
        "global_batch_size: 8\nlr_decay_style: cosine\nsave: saved\n"
    )
    options = parse(["--config", str(file), "--lr", "2e-5"])
    assert (options.lr, options.train_iters, options.bf16) == (2e-5, 10, True)
    flags = "--load weights --data-path data --train-iters 10 --lr 2e-5 --bf16".split()
    flags += "--global-batch-size 8 --lr-decay-style cosine --save saved".split()
    assert options == parse(flags)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--data-path d --lr 1 --train-iters 1", "--from-scratch"),
        ("--load w --lr 1 --train-iters 1", "--data-path is missing"),
        ("--load w --data-path d --train-iters 1", "--lr is missing"),
        ("--load w --data-path d --lr 1", "--train-iters and --epochs"),
        ("--load w --data-path d --lr 1 --train-iters 0", "--train-iters 0"),
        ("--load w --data-path d --lr 1 --train-iters 1 --bf16 --fp16", "exclude"),
        ("--load w --data-path d --lr 1 --train-iters 1 --eval-interval 5", "give --eval-iters"),
        ("--load w --data-path d --lr 1 --train-iters 1 --eval-iters 5", "give --eval-interval"),
        (
            "--load w --data-path d --lr 1 --train-iters 1 --eval-interval 5 --eval-iters 1",
            "--eval-interval 5: --split 100,0,0 leaves no data to evaluate on: give a share",
        ),
    ],
)
def test_what_cannot_work_is_an_error_at_once(flags: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(flags.split())


def test_ranges_are_those_of_options_that_exist() -> None:
    assert RANGES.keys() <= TrainOptions.model_fields.keys()


def test_an_unknown_flag_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--global-batch-sise", "8"])
    assert "--global-batch-size" in capsys.readouterr().err


def test_flags_without_effect_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    from mindspeed_llm.training.options import AcceptedOptions

    for field in AcceptedOptions.model_fields.values():
        assert field.description.startswith("Accepted for existing")


def test_help_begins_with_the_task_and_what_every_run_needs() -> None:
    from mindspeed_llm.cli import posttrain

    parser = posttrain.add_parser(argparse.ArgumentParser().add_subparsers())
    text = parser.format_help()
    places = [text.index(f"\n  {flag} ") for flag in ("--stage", "--load", "--data-path", "--lr")]
    assert places == sorted(places)
    assert places[-1] < text.index("\n  --hidden-size ") < text.index("\n  --use-mcore-models ")
    titles = [group.title for group in parser._action_groups if group._group_actions]
    assert len(set(titles)) == len(titles) and "loss scale" in titles
    example = text[text.index("python posttrain_gpt.py") :].split("\n\n")[0].replace("\\\n", " ")
    assert from_arguments(parser.parse_args(example.split()[2:])).stage == "dpo"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--stage dpo", "--stage dpo: is for posttrain_gpt.py: use that, or drop it to pretrain"),
        ("--stage sft", "--stage sft: is for posttrain_gpt.py"),
        ("--dpo-beta 0.5", "--dpo-beta 0.5: is for --stage dpo, not pretraining: drop it"),
        ("--ref-model m", "--ref-model m: is for --stage dpo and kto and trl_ppo and grpo, not"),
    ],
)
def test_pretraining_has_no_stages(flags: str, words: str) -> None:
    from mindspeed_llm.cli import pretrain

    parser = pretrain.add_parser(argparse.ArgumentParser().add_subparsers())
    namespace = parser.parse_args(
        f"--load m --data-path d --lr 1e-5 --train-iters 1 {flags}".split()
    )
    with pytest.raises(ConfigError, match=words):
        from_arguments(namespace, is_pretraining=True)
