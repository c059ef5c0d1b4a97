"""The command: one clear line and exit code 2 for what a user can put right, and nothing left."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_llm.cli.main import main
from tests.llm import tiny


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    return tiny.save("qwen2", tmp_path_factory.mktemp("models"))


@pytest.fixture
def copy(qwen2, tmp_path):
    """Return a copy of the model that a test may damage."""
    return shutil.copytree(qwen2, tmp_path / "model")


def run(capsys, source, target, *flags):
    """Return the exit code, and the one line of an error without its beginning."""
    code = main(["convert", "--load-dir", str(source), "--save-dir", str(target), *flags])
    errors = [line for line in capsys.readouterr().err.splitlines() if ": error: " in line]
    assert len(errors) == (code != 0)
    return code, errors[0].partition(": error: ")[2] if errors else ""


def refused(capsys, source, target, *flags):
    code, message = run(capsys, source, target, *flags)
    assert code == 2
    assert not target.exists() or not any(target.iterdir()), "something was left behind"
    return message


def test_what_is_printed(capsys, qwen2, tmp_path):
    assert main(["convert", "--load-dir", str(qwen2), "--save-dir", str(tmp_path / "out")]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(
        "qwen2: 0.00 GB in 1 file(s), float32 (kept; --params-dtype changes it)"
    )
    assert second == str(tmp_path / "out" / "iter_0000001")


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            ["--target-tensor-parallel-size", "4"],
            "does not divide the 2 key/value heads: use 1 or 2",
        ),
        (["--target-pipeline-parallel-size", "3"], "does not divide the 4 layers: use 1, 2 or 4"),
        (["--target-expert-parallel-size", "2"], "qwen2 has no experts"),
        (["--num-layers-per-virtual-pipeline-stage", "0"], "-stage 0 does not divide the 4 layers"),
        (["--expert-tensor-parallel-size", "0"], "--expert-tensor-parallel-size 0 is too small"),
        (["--model-type-hf", "qwen4"], "model family qwen4 is not supported: give deepseek2, "),
        (["--model-type-hf", "lama2"], "llama, llama2, llama3, mistral, mixtral"),
        (
            ["--add-dense-bias", "--add-qkv-bias"],
            "not the model that is loaded: --add-dense-bias (not in this model): drop these",
        ),
        (["--make-vocab-size-divisible-by", "0"], "must be at least 1"),
        (["--load-model-type", "mg"], "is an HF model"),
        (["--save-model-type", "hf"], "one must be mg"),
        (["--noop-layers", "1,x"], "--noop-layers 1,x is not allowed: give a whole number"),
        (["--num-layer-list", "1,1"], "--num-layer-list 1,1 has 2 stages and 2 layers"),
    ],
    ids=" ".join,
)
def test_wrong_flags(capsys, qwen2, tmp_path, flags, message):
    assert message in refused(capsys, qwen2, tmp_path / "out", *flags)


def test_flags_that_contradict_the_model(capsys, copy, tmp_path):
    """The rule of training: the same code decides."""
    change_config(copy, tie_word_embeddings=True)
    tensors = load_file(copy / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(kept, copy / "model.safetensors", metadata={"format": "pt"})
    message = refused(capsys, copy, tmp_path / "out", "--untie-embeddings-and-output-weights")
    assert message == (
        "not the model that is loaded: --untie-embeddings-and-output-weights (not in this "
        "model): drop these flags"
    )
    assert run(capsys, copy, tmp_path / "out") == (0, "")
    back = ("--load-model-type", "mg", "--save-model-type", "hf")
    flags = (*back, "--untie-embeddings-and-output-weights")
    assert "not in this model" in refused(capsys, tmp_path / "out", tmp_path / "hf", *flags)


def test_wrong_directories(capsys, qwen2, tmp_path):
    target = tmp_path / "out"
    assert "does not exist" in refused(capsys, tmp_path / "none", target)
    assert "holds no weights: looked for" in refused(capsys, tmp_path, target)
    code, message = run(capsys, qwen2, qwen2 / "config.json")
    assert code == 2 and message.endswith("config.json: is a file: give a directory")
    assert run(capsys, qwen2, target) == (0, "")
    code, message = run(capsys, qwen2, target)
    assert code == 2 and "holds a checkpoint already" in message
    assert run(capsys, qwen2, target, "--overwrite") == (0, "")
    code, message = run(capsys, target, tmp_path / "hf", "--load-model-type", "hf")
    assert code == 2 and "is a Megatron checkpoint" in message


def test_checkpoint_without_a_config(capsys, qwen2, tmp_path):
    assert run(capsys, qwen2, tmp_path / "mg") == (0, "")
    shutil.rmtree(tmp_path / "mg" / "hf")
    back = ("--load-model-type", "mg", "--save-model-type", "hf")
    assert "give --hf-cfg-dir" in refused(capsys, tmp_path / "mg", tmp_path / "hf", *back)
    message = refused(capsys, tmp_path / "mg", tmp_path / "hf", *back, "--hf-cfg-dir", "/none")
    assert message == "--hf-cfg-dir /none: has no config.json"
    flags = (*back, "--hf-cfg-dir", str(qwen2))
    assert run(capsys, tmp_path / "mg", tmp_path / "hf", *flags) == (0, "")


def change_config(model, **values):
    path = model / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "gone"}))


@pytest.mark.parametrize(
    "values, message",
    [
        ({"model_type": "qwen22"}, "model_type qwen22 is not supported; supported: deepseek_v2"),
        ({"model_type": "qwen2_moe"}, "model_type qwen2_moe is not supported; supported: deepseek"),
        ({"model_type": "gone"}, "model_type (none) is not supported: name the family with"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier is 12.0 (only 1 is)"),
        ({"hidden_size": "gone"}, "hidden_size is missing"),
        ({"hidden_size": -1}, "hidden_size is -1: it must be a whole number from 1 to"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"num_hidden_layers": 5}, "model.layers.4.input_layernorm.weight"),
        ({"num_hidden_layers": 3}, "not expected"),
        ({"num_hidden_layers": 10**12}, "it must be a whole number from 1 to 10000"),
        (
            {"num_hidden_layers": 9999, "num_attention_heads": 9999, "num_key_value_heads": 9999},
            "are more than any model has",
        ),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no': it must be true or false"),
        ({"intermediate_size": 64}, "has the shape (48, 32), the config makes it (64, 32)"),
        ({"vocab_size": 200}, "model.embed_tokens.weight has the shape (99, 32)"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rotary scaling 'longrope' is not known"),
        ({"rope_parameters": [1]}, "rotary parameters"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small': it must be a number"),
        ({"num_key_value_heads": 3}, "3 key/value heads do not divide 4 heads"),
        ({"quantization_config": {"quant_method": "fp8"}}, "the weights are quantized (fp8)"),
    ],
    ids=str,
)
def test_wrong_configs(capsys, copy, tmp_path, values, message):
    change_config(copy, **values)
    assert message in refused(capsys, copy, tmp_path / "out")


def test_missing_and_extra_weights(capsys, copy, tmp_path):
    tensors = load_file(copy / "model.safetensors")
    lost = tensors.pop("model.layers.2.mlp.up_proj.weight")
    save_file(tensors, copy / "model.safetensors")
    message = refused(capsys, copy, tmp_path / "out")
    assert "model.layers.2.mlp.up_proj.weight is missing" in message
    tensors["model.layers.2.mlp.up_proj.weight"] = lost.int()
    save_file(tensors, copy / "model.safetensors")
    assert "holds torch.int32" in refused(capsys, copy, tmp_path / "out")
    tensors["model.layers.2.mlp.up_proj.weight"] = lost
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, copy / "model.safetensors")
    assert run(capsys, copy, tmp_path / "out") == (0, "")  # old checkpoints have it; no weight
    tensors["score.weight"] = torch.ones(4)
    save_file(tensors, copy / "model.safetensors")
    assert "score.weight is not expected" in refused(capsys, copy, tmp_path / "other")


def test_missing_shards(capsys, copy, tmp_path):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    message = refused(capsys, copy, tmp_path / "out")
    assert "model-00001-of-00002.safetensors missing (1 of the 2 files" in message
    index["weight_map"]["a"] = "../../secret.safetensors"
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "is not the name of a file beside it" in refused(capsys, copy, tmp_path / "out")
    (copy / "model.safetensors.index.json").write_text("{}")
    assert "has no valid weight_map" in refused(capsys, copy, tmp_path / "out")


def test_missing_rank(capsys, qwen2, tmp_path):
    assert run(capsys, qwen2, tmp_path / "mg", "--target-tensor-parallel-size", "2")[0] == 0
    shutil.rmtree(tmp_path / "mg/iter_0000001/mp_rank_01")
    flags = ("--load-model-type", "mg", "--save-model-type", "hf")
    message = refused(capsys, tmp_path / "mg", tmp_path / "hf", *flags)
    assert "mp_rank_01/model_optim_rng.pt: is missing" in message


def test_full_disk_is_seen_before_work_starts(capsys, qwen2, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    message = refused(capsys, qwen2, tmp_path / "out")
    assert "GB are needed and 0.00 GB are free: free some space" in message


def test_disk_that_fills_up(capsys, qwen2, tmp_path):
    """A limit on the size of files stands for a disk that is full sooner than it seemed."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        message = refused(capsys, qwen2, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large; what was written is removed" in message


def test_a_checkpoint_stays_when_its_replacement_fails(capsys, qwen2, tmp_path, monkeypatch):
    target = tmp_path / "out"
    assert run(capsys, qwen2, target) == (0, "")
    before = (target / "iter_0000001/mp_rank_00/model_optim_rng.pt").read_bytes()
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert run(capsys, qwen2, target, "--overwrite", "--params-dtype", "bf16")[0] == 2
    assert (target / "iter_0000001/mp_rank_00/model_optim_rng.pt").read_bytes() == before
    assert sorted(path.name for path in target.iterdir()) == [
        "hf",
        "iter_0000001",
        "latest_checkpointed_iteration.txt",
    ]
