"""`mindspeed doctor --memory`: the memory of a run from its flags, its file or its model."""

import json

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from mindspeed.cli.main import main
from mindspeed.config import ConfigError
from mindspeed.doctor.memory import examine
from mindspeed.tune.memory_model import GIB
from mindspeed.tune.run_sizes import RunSizes

LLAMA = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --swiglu --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --vocab-size 128256 --bf16 --seq-length 8192 "
    "--untie-embeddings-and-output-weights"
).split()
SMALL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128".split()
MATRICES = 8_030_261_248 - 65 * 4096
"""The parameters of Llama-3-8B but for its norms."""


def test_parts_of_a_model_whose_size_is_published():
    fit = examine([*LLAMA, "--lr", "1e-4"], 80 * GIB, device_name="cuda")
    parts = fit.model.parts()
    assert parts["weights"] == 2 * MATRICES and parts["gradients"] == 4 * MATRICES
    assert parts["optimizer state"] == 12 * MATRICES
    assert not fit.fits and fit.smaller.total() <= 80 * GIB
    text = "\n".join(fit.lines())
    assert text.startswith("memory of a rank, first pipeline stage, for a micro-batch of 8192 tok")
    assert "89.7 GiB  --swap-optimizer" in text and text.count("  --") == 3
    assert "would fit: " in text and text.endswith("not read, since no formula has them: --lr")
    assert json.loads(json.dumps(fit.as_record()))["total"] == fit.model.total()


def test_what_is_advised_fits_when_it_is_added():
    fit = examine(LLAMA, 80 * GIB, device_name="cuda")
    flags = [f"--{name.replace('_', '-')}" for name in fit.changes]
    words = [w for flag, value in zip(flags, fit.changes.values()) for w in _words(flag, value)]
    again = examine([*LLAMA, *words], 80 * GIB, device_name="cuda")
    assert again.fits and again.model.total() == fit.smaller.total()
    assert again.lines()[-1] == "fits"


def _words(flag, value):
    return [flag] if value is True else [flag, str(value)]


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=3),
        LlamaConfig(
            vocab_size=256, hidden_size=32, num_key_value_heads=4, tie_word_embeddings=True
        ),
        MixtralConfig(vocab_size=256, hidden_size=64, intermediate_size=48, num_hidden_layers=2),
    ],
    ids=["llama", "tied", "mixtral"],
)
def test_parameters_are_those_of_transformers(config, tmp_path):
    import torch

    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    fit = examine(["--load", str(tmp_path), "--seq-length", "64", "--bf16"], GIB)
    assert fit.model.num_parameters == matrices


def test_ranks_share_parameters():
    sizes = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1024}
    layer, table = 4 * 64 * 64 + 2 * 64 * 256, 1024 * 64
    assert RunSizes.of(sizes).num_parameters == 4 * layer + table
    both = sizes | {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    assert RunSizes.of(both).num_parameters == 2 * layer // 2 + table // 2
    experts = sizes | {"num_experts": 8, "expert_model_parallel_size": 2}
    expert = 2 * 64 * 256
    assert RunSizes.of(experts).num_parameters == 4 * (4 * 64 * 64 + 4 * expert + 8 * 64) + table


def test_a_file_and_flags_after_it(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "num_layers: 2\nhidden_size: 64\nnum_attention_heads: 4\nseq_length: 128\nlr: 1.0\n"
        "vocab_size: 1000\nbf16: true\nswap_optimizer: true\n"
        "micro_batch_size: null\nv_head_dim: null\nnum_query_groups: null\n"  # the defaults
    )
    fit = examine([str(file), "--seq-length", "256"], GIB)
    assert (fit.model.seq_length, fit.model.swap_optimizer, fit.model.width) == (256, True, 2)
    assert fit.unread == ["--lr"]


def test_features_see_flags_that_no_formula_has():
    experts = [*LLAMA, *"--num-experts 8 --moe-grouped-gemm --moe-fused-experts".split()]
    assert examine(experts, GIB).unread == ["--moe-grouped-gemm"]
    assert examine([*experts, "--offload-modules", "core_attn", "attn_proj"], GIB)
    offload = ["--fine-grained-activation-offloading", "--offload-modules", "core_attn", "moe_act"]
    with pytest.raises(ConfigError, match="drop expert_fc1 and moe_act of --offload-mod"):
        examine([*experts, *offload], GIB)
    with pytest.raises(ConfigError, match="a value of the run is wrong: correct it"):
        examine([*LLAMA, "--world-size", "2", "--global-batch-size", "x"], GIB)


def test_the_device_is_the_one_that_is_asked_about():
    """Tiled loss needs linear cross entropy, which is on by default on cuda."""
    fit = examine([*LLAMA, "--tiled-loss-size", "128"], GIB, device_name="cuda")
    assert fit.model.tiled_loss_size == 128
    assert "tiled_loss_size" in examine(LLAMA, GIB, device_name="cuda").changes
    with pytest.raises(ConfigError, match="--tiled-loss-size needs --linear-cross-entropy"):
        examine([*LLAMA, "--tiled-loss-size", "128"], GIB, device_name="cpu")


def test_latent_attention_has_no_formula(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("multi_latent_attention: true\n")
    for words in ([*LLAMA, "--multi-latent-attention"], [str(file), *LLAMA]):
        with pytest.raises(ConfigError, match="latent attention has no formula here"):
            examine(words, GIB)


def test_adapters_are_trained_and_weights_are_not():
    fit = examine([*LLAMA, "--lora-r", "16"], 80 * GIB, device_name="cuda")
    adapters, parts = 41_943_040, fit.model.parts()  # as peft counts them for Llama-3-8B
    assert parts["weights"] == 2 * (MATRICES + adapters)
    assert parts["gradients"] == pytest.approx(4 * adapters)
    assert parts["optimizer state"] == pytest.approx(12 * adapters)
    assert fit.unread == [] and "frozen models" not in parts
    loaded = examine([*LLAMA, "--lora-load", "adapters"], 80 * GIB, device_name="cuda")
    assert loaded.model == fit.model


def test_a_stage_has_its_reference_and_both_sequences_of_a_pair():
    alone = examine(LLAMA, GIB).model
    found = {s: examine([*LLAMA, "--stage", s], GIB).model for s in ("dpo", "simpo", "kto", "prm")}
    weights = alone.parts()["weights"]
    reference = {stage: model.parts().get("frozen models") for stage, model in found.items()}
    assert reference == {"dpo": weights, "simpo": None, "kto": weights, "prm": None}
    rows = {stage: model.tokens // alone.tokens for stage, model in found.items()}
    assert rows == {"dpo": 2, "simpo": 2, "kto": 1, "prm": 1}
    assert found["kto"].total() == alone.total() + weights and found["prm"] == alone


def test_a_reference_is_freed_once_its_values_are_computed():
    dpo = [*LLAMA, *"--stage dpo --precompute-ref-log-probs".split()]
    assert "frozen models" not in examine(dpo, GIB).model.parts()


def test_a_policy_with_adapters_is_its_own_reference():
    dpo = [*LLAMA, *"--stage dpo --lora-r 8".split()]
    assert "frozen models" not in examine(dpo, GIB).model.parts()
    for more in (["--ref-model", "other"], ["--lora-train-router"]):
        assert examine([*dpo, *more], GIB).model.parts()["frozen models"] == 2 * MATRICES


def test_a_value_head_has_no_logits():
    parts = examine([*LLAMA, "--stage", "orm"], GIB).model
    assert parts.output_parts()["logits"] == 0
    assert parts.num_parameters == MATRICES - 128256 * 4096


@pytest.mark.parametrize("stage", ["grpo", "trl_ppo"])
def test_what_samples_is_not_said_to_fit(stage, capsys):
    words = [*SMALL, "--stage", stage]
    assert main(["doctor", "--device-gib", "80", "--memory", *words]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("fits only if ") and "not counted: " in last
    record = examine(words, GIB).as_record()
    assert record["fits"] is None and "cache of sampling" in record["uncounted"]
    large = examine([*LLAMA, "--stage", stage], 80 * GIB, device_name="cuda")
    assert large.fits is False and "would fit, but for " in large.lines()[-1]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--moe-grouped-gemm", "--moe-grouped-gemm: the model has no experts: drop it"),
        ("--moe-load-interval 5", "--moe-load-interval: the model has no experts: drop it"),
        ("--freeze-router", "--freeze-router: the model has no experts: drop it"),
        (
            "--expert-model-parallel-size 2",
            "--expert-model-parallel-size 2: the model has no experts: use 1",
        ),
        (
            "--num-experts 4 --tensor-model-parallel-size 2",
            "--tensor-model-parallel-size 2: a mixture of experts is trained with tensor "
            "parallelism only if ranks also share the sequence: add --sequence-parallel, or use 1",
        ),
        ("--bf16 --fp16", "--bf16 and --fp16 exclude each other: drop one"),
        ("--stage dop", "--stage dop is not known; did you mean dpo?"),
        ("--lora-r 0", "--lora-r 0: give a whole number above 0"),
    ],
)
def test_what_a_run_refuses_is_not_said_to_fit(words, reason, capsys):
    assert main(["doctor", "--device-gib", "80", "--memory", *SMALL, *words.split()]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"mindspeed: error: {reason}") and said.err.count("\n") == 1
    assert not said.out


@pytest.mark.parametrize("words", [["--json"], ["--device-gib", "80"], ["--device-gib=80"]])
def test_a_flag_of_the_command_among_those_of_the_run(words, capsys):
    assert main(["doctor", "--memory", *LLAMA, *words]) == 2
    said = capsys.readouterr().err
    assert "after --memory is no flag of the run: put it before" in said
    assert said.count("\n") == 1


def test_a_model_without_a_formula_and_a_damaged_one(tmp_path):
    file = tmp_path / "config.json"
    for text, reason in (
        ('{"kv_lora_rank": 512}', "latent attention has no formula here"),
        ("{", "cannot be read"),
        ("[]", "is no config of a model"),
        (
            '{"num_hidden_layers": "x", "hidden_size": 8, "num_attention_heads": 2}',
            "--num-layers 'x'",
        ),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=reason):
            examine(["--load", str(tmp_path), "--seq-length", "8"], GIB)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "--num-layers, --hidden-size, --num-attention-heads, --seq-length missing"),
        ([*LLAMA, "--swap-layer-input"], "--swap-layer-input needs --recompute-granularity full"),
        ([*LLAMA, "--tensor-model-parallel-size", "0"], "size 0: give a whole number above 0"),
        (["nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (["--load", "nowhere"], "gives the sizes of a model; --load nowhere has none$"),
        ([*LLAMA, "--micro-batch-sze", "8"], "did you mean --micro-batch-size?"),
        ([*LLAMA, "--recompute-granularty", "full"], "did you mean --recompute-granularity?"),
        ([*LLAMA, "--bf16", "run.yaml"], "'run.yaml' belongs to no flag: a YAML file comes first"),
    ],
    ids=["missing", "refused", "no ranks", "no file", "no folder", "slip", "other slip", "order"],
)
def test_what_cannot_be_examined(words, reason):
    with pytest.raises(ConfigError, match=reason) as error:
        examine(words, GIB)
    assert "\n" not in str(error.value)
