"""HF to mcore and back is bit-equal in every layout; resharding equals direct conversion."""

import pytest
import torch
import transformers
from safetensors.torch import load_file

from mindspeed.config import ConfigError
from mindspeed_llm.checkpoint import ConvertOptions
from mindspeed_llm.checkpoint.conversion import convert
from tests.llm import tiny

TP, PP, EP, VPP = (
    "target_tensor_parallel_size",
    "target_pipeline_parallel_size",
    "target_expert_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
)
LAYOUTS = {
    "plain": {},
    "tp2_pp2": {TP: 2, PP: 2},
    "pp2_vpp": {PP: 2, VPP: 1},
    "uneven": {PP: 2, "num_layer_list": (1, 3)},
    "noops": {PP: 2, TP: 2, "noop_layers": (0, 5), VPP: 1},
    "te": {TP: 2, PP: 2, "transformer_impl": "transformer_engine"},
    "padded": {TP: 2, "make_vocab_size_divisible_by": 64},
}
MOE_LAYOUTS = {
    "ep2": {TP: 2, EP: 2},
    "ep2_pp2_grouped": {EP: 2, PP: 2, "moe_grouped_gemm": True},
    "tp2_ep2_grouped": {TP: 2, EP: 2, "moe_grouped_gemm": True},
    "etp1": {TP: 2, EP: 4, "expert_tensor_parallel_size": 1},
    "tp2_pp2_ep2_etp1_te": {
        TP: 2,
        PP: 2,
        EP: 2,
        "expert_tensor_parallel_size": 1,
        "transformer_impl": "transformer_engine",
    },
    "te_grouped": {EP: 2, "moe_grouped_gemm": True, "transformer_impl": "transformer_engine"},
}
MOE = {"qwen3_moe", "mixtral", "deepseek2", "deepseek2_lite", "deepseek3"}
CASES = [(name, layout) for name in tiny.MODELS for layout in LAYOUTS]
CASES += [(name, layout) for name in tiny.MODELS if name in MOE for layout in MOE_LAYOUTS]
CASES += [("gpt_oss", layout) for layout in ("ep2", "etp1", "tp2_pp2_ep2_etp1_te", "te_grouped")]
CASES += [(name, "joined_mla") for name in ("deepseek2", "deepseek2_lite", "deepseek3")]
ALL_LAYOUTS = LAYOUTS | MOE_LAYOUTS | {"joined_mla": {TP: 2, "join_mla_down_proj": True}}


def to_mcore(source, target, **options):
    kind = "mg" if (source / "latest_checkpointed_iteration.txt").exists() else "hf"
    convert(
        ConvertOptions(load_model_type=kind, load_dir=str(source), save_dir=str(target), **options)
    )
    return target


def to_hf(source, target, **more):
    options = {"load_model_type": "mg", "save_model_type": "hf"} | more
    convert(ConvertOptions(load_dir=str(source), save_dir=str(target), **options))
    return load_file(target / "model.safetensors")


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name, layout", CASES, ids="-".join)
def test_there_and_back(models, tmp_path, name, layout):
    to_mcore(models[name], tmp_path / "mg", **ALL_LAYOUTS[layout])
    found = to_hf(tmp_path / "mg", tmp_path / "hf")
    assert_same(found, load_file(models[name] / "model.safetensors"))


@pytest.mark.parametrize("name", ["llama_tied", "qwen2", "qwen3_moe", "deepseek3"])
def test_resharding_equals_direct_conversion(models, tmp_path, name):
    target = {TP: 2, PP: 2, VPP: 1} | ({EP: 2} if name in MOE else {})
    start = {PP: 4, "make_vocab_size_divisible_by": 8, "transformer_impl": "transformer_engine"}
    direct = to_mcore(models[name], tmp_path / "direct", **target)
    other = to_mcore(models[name], tmp_path / "other", **start)
    resharded = to_mcore(other, tmp_path / "resharded", **target)
    files = sorted(path.relative_to(direct) for path in direct.rglob("*.pt"))
    assert len(files) == (8 if name in MOE else 4)
    assert files == sorted(path.relative_to(resharded) for path in resharded.rglob("*.pt"))
    for file in files:
        expected = torch.load(direct / file, weights_only=True)
        found = torch.load(resharded / file, weights_only=True)
        assert found.keys() == expected.keys()
        for key in ("model0", "model1"):
            assert_same(found[key], expected[key])


def test_result_is_a_model_for_transformers(models, tmp_path):
    to_mcore(models["qwen3_moe"], tmp_path / "mg", **{TP: 2, EP: 2})
    to_hf(tmp_path / "mg", tmp_path / "hf")
    assert torch.equal(tiny.logits(tmp_path / "hf"), tiny.logits(models["qwen3_moe"]))


def test_a_model_without_experts_has_none_to_fuse(models, tmp_path):
    mg = to_mcore(models["qwen2"], tmp_path / "mg")
    with pytest.raises(ConfigError, match="--hf-experts fused: the model has no experts: drop it"):
        to_hf(mg, tmp_path / "fused", hf_experts="fused")


@pytest.mark.parametrize("name", sorted(MOE))
def test_experts_of_either_layout(models, tmp_path, name):
    """Fused experts are those that transformers 5 itself writes, and reads back."""
    model = transformers.AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32)
    model.save_pretrained(tmp_path / "theirs", save_original_format=False)
    fused = load_file(tmp_path / "theirs/model.safetensors")
    assert any(tensor.ndim == 3 for tensor in fused.values()), "transformers fused nothing"
    mg = to_mcore(tmp_path / "theirs", tmp_path / "mg", **{TP: 2, EP: 2})
    assert_same(to_hf(mg, tmp_path / "each"), load_file(models[name] / "model.safetensors"))
    assert_same(to_hf(mg, tmp_path / "fused", hf_experts="fused"), fused)
    assert torch.equal(tiny.logits(tmp_path / "fused"), tiny.logits(models[name]))


def test_types(tmp_path):
    """The source's type is kept unless another is asked for; a choosing bias stays in float32."""
    source = tiny.save("deepseek3", tmp_path, torch.bfloat16)
    bias = "decoder.layers.0.mlp.router.expert_bias"
    for wanted, expected in ((None, torch.bfloat16), ("fp16", torch.float16)):
        target = to_mcore(source, tmp_path / str(wanted), params_dtype=wanted, **{PP: 4})
        path = target / "iter_0000001/mp_rank_00_001/model_optim_rng.pt"
        model = torch.load(path, weights_only=True)["model"]
        assert {t.dtype for n, t in model.items() if n != bias} == {expected}
        assert model[bias].dtype == torch.float32
    hf = to_hf(tmp_path / "fp16", tmp_path / "hf")
    assert hf["model.norm.weight"].dtype == torch.float16
    assert '"dtype": "float16"' in (tmp_path / "hf/config.json").read_text()


def test_shards_and_index(models, tmp_path):
    """Several files with an index are written and read."""
    from mindspeed.checkpoint.hf_folder import copy_small_files, write_index
    from mindspeed.checkpoint.output import Writer
    from mindspeed_llm.checkpoint.hf import hf_outputs, open_hf

    source = open_hf(models["qwen2"])
    outputs = hf_outputs(tmp_path, source, None, shard_size=20_000)
    assert len(outputs) > 3 and all(output.nbytes <= 20_000 for output in outputs)
    Writer(source).write(outputs)
    write_index(tmp_path, outputs)
    copy_small_files(models["qwen2"], tmp_path)
    assert torch.equal(tiny.logits(tmp_path), tiny.logits(models["qwen2"]))
    again = open_hf(tmp_path)
    assert again.tensors.keys() == source.tensors.keys()


def mtp_model(source, target):
    """Give a DeepSeek-V3 the layer of multi-token prediction that transformers does not save."""
    import shutil

    from safetensors.torch import save_file

    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    layer = {n: t for n, t in tensors.items() if n.startswith("model.layers.3.")}
    tensors |= {n.replace(".3.", ".4.", 1): t + 1 for n, t in layer.items()}
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"model.layers.4.{name}.weight"] = torch.randn(32)
    tensors["model.layers.4.eh_proj.weight"] = torch.randn(32, 64)
    tensors["model.layers.4.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.4.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return tensors


@pytest.mark.parametrize("layout", ["plain", "tp2_pp2", "te", "ep2"])
def test_multi_token_prediction(models, tmp_path, layout):
    expected = mtp_model(models["deepseek3"], tmp_path / "source")
    to_mcore(tmp_path / "source", tmp_path / "mg", **ALL_LAYOUTS[layout])
    assert_same(to_hf(tmp_path / "mg", tmp_path / "hf"), expected)


@pytest.mark.parametrize("layers", [None, 1])
def test_multi_token_prediction_has_its_embedding_on_the_last_stage(models, tmp_path, layers):
    """Going there and back is blind to it: the first stage has the same weight."""
    expected = mtp_model(models["deepseek3"], tmp_path / "source")
    options = {PP: 2} | ({VPP: layers} if layers else {})
    to_mcore(tmp_path / "source", tmp_path / "mg", **options)
    held = []
    for stage in range(2):
        path = tmp_path / f"mg/iter_0000001/mp_rank_00_{stage:03d}/model_optim_rng.pt"
        content = torch.load(path, weights_only=True)
        held += [content[name] for name in sorted(content) if name.startswith("model")]
    first, *middle, last = held[::2] + held[1::2] if layers else held
    embedding, output = "embedding.word_embeddings.weight", "output_layer.weight"
    for chunk in (first, last):
        assert torch.equal(chunk[embedding], expected["model.embed_tokens.weight"])
    assert torch.equal(last[output], expected["lm_head.weight"]) and output not in first
    assert not any(embedding in chunk or output in chunk for chunk in middle)
    heads = {name.split(".")[0] for name in last}
    assert "mtp" in heads and not any(n.startswith("mtp") for c in (first, *middle) for n in c)


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_the_ends_of_a_model_are_on_the_ends_of_the_pipeline(models, tmp_path, name):
    """A tied output layer is a copy of the embedding on the last stage, and there only."""
    expected = load_file(models[name] / "model.safetensors")
    to_mcore(models[name], tmp_path / "mg", **{PP: 4})
    folder = tmp_path / "mg/iter_0000001"
    paths = [folder / f"mp_rank_00_{stage:03d}/model_optim_rng.pt" for stage in range(4)]
    first, *middle, last = (torch.load(path, weights_only=True)["model"] for path in paths)
    embedding, output = "embedding.word_embeddings.weight", "output_layer.weight"
    head = "model.embed_tokens.weight" if name == "llama_tied" else "lm_head.weight"
    assert torch.equal(first[embedding], expected["model.embed_tokens.weight"])
    assert torch.equal(last[output], expected[head])
    assert output not in first and embedding not in last
    assert not any({embedding, output} & chunk.keys() for chunk in middle)
