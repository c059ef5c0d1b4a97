"""What stands in mcore files, against the rules of the format written down a second time."""

import zipfile

import pytest
import torch
from safetensors.torch import load_file

from mindspeed_llm.checkpoint import ConvertOptions
from mindspeed_llm.checkpoint.conversion import convert

HEADS, GROUPS = 4, 2


def converted(source, tmp_path, **options):
    convert(ConvertOptions(load_dir=str(source), save_dir=str(tmp_path / "mg"), **options))
    hf = load_file(source / "model.safetensors")

    def rank(folder):
        path = tmp_path / "mg" / "iter_0000001" / folder / "model_optim_rng.pt"
        return torch.load(path, weights_only=True, mmap=True)

    return hf, rank


def interleaved(hf, layer, kind, head):
    """Return the rows of each group: its queries, its key, its value."""
    q, k, v = (hf[f"model.layers.{layer}.self_attn.{n}_proj.{kind}"] for n in "qkv")
    rest = q.shape[1:]
    q = q.view(GROUPS, HEADS // GROUPS * head, *rest)
    k, v = (t.view(GROUPS, head, *rest) for t in (k, v))
    return torch.cat([q, k, v], dim=1).reshape(-1, *rest)


def gate_up(hf, prefix, rank, size, names=("gate_proj", "up_proj")):
    parts = [hf[f"{prefix}.{name}.weight"].chunk(size)[rank] for name in names]
    return torch.cat(parts)


def test_dense_names_and_numbers(models, tmp_path):
    hf, rank = converted(
        models["qwen2"],
        tmp_path,
        target_tensor_parallel_size=2,
        target_pipeline_parallel_size=2,
        add_qkv_bias=False,
    )
    assert (tmp_path / "mg/latest_checkpointed_iteration.txt").read_text() == "1"
    for tp in range(2):
        first, last = rank(f"mp_rank_{tp:02d}_000"), rank(f"mp_rank_{tp:02d}_001")
        assert first["checkpoint_version"] == 3.0 and first["iteration"] == 1
        vocabulary = hf["model.embed_tokens.weight"]
        padded = torch.cat([vocabulary, vocabulary[-1:]])  # 99 rows become 100
        assert torch.equal(
            first["model"].pop("embedding.word_embeddings.weight"), padded.chunk(2)[tp]
        )
        head = hf["lm_head.weight"]
        expected = torch.cat([head, head[-1:]]).chunk(2)[tp]
        assert torch.equal(last["model"].pop("output_layer.weight"), expected)
        norm = last["model"].pop("decoder.final_layernorm.weight")
        assert torch.equal(norm, hf["model.norm.weight"])
        for stage, file in enumerate((first, last)):
            model = file["model"]
            for local in range(2):
                layer, new = 2 * stage + local, f"decoder.layers.{local}."
                old = f"model.layers.{layer}"
                wanted = {
                    "input_layernorm.weight": hf[f"{old}.input_layernorm.weight"],
                    "pre_mlp_layernorm.weight": hf[f"{old}.post_attention_layernorm.weight"],
                    "self_attention.linear_qkv.weight": interleaved(hf, layer, "weight", 8).chunk(
                        2
                    )[tp],
                    "self_attention.linear_qkv.bias": interleaved(hf, layer, "bias", 8).chunk(2)[
                        tp
                    ],
                    "self_attention.linear_proj.weight": hf[f"{old}.self_attn.o_proj.weight"].chunk(
                        2, dim=1
                    )[tp],
                    "mlp.linear_fc1.weight": gate_up(hf, f"{old}.mlp", tp, 2),
                    "mlp.linear_fc2.weight": hf[f"{old}.mlp.down_proj.weight"].chunk(2, dim=1)[tp],
                }
                for name, tensor in wanted.items():
                    assert torch.equal(model.pop(new + name), tensor), name
            assert not model


def test_tied_embedding(models, tmp_path):
    """The last of several stages has a copy; a single stage has none."""
    hf, rank = converted(models["llama_tied"], tmp_path, target_pipeline_parallel_size=2)
    embedding = hf["model.embed_tokens.weight"]
    assert torch.equal(rank("mp_rank_00_001")["model"]["output_layer.weight"], embedding)
    assert "output_layer.weight" not in rank("mp_rank_00_000")["model"]
    _, rank = converted(models["llama_tied"], tmp_path / "one")
    assert "output_layer.weight" not in rank("mp_rank_00")["model"]


def test_virtual_stages_and_noops(models, tmp_path):
    """6 layers of which 1 and 4 do nothing, on 2 stages of 3 chunks: chunk c of stage p is 2c+p."""
    hf, rank = converted(
        models["llama"],
        tmp_path,
        target_pipeline_parallel_size=2,
        num_layers_per_virtual_pipeline_stage=1,
        noop_layers=(1, 4),
    )
    held = {(0, 0): 0, (0, 1): 1, (0, 2): None, (1, 0): None, (1, 1): 2, (1, 2): 3}
    for (stage, chunk), layer in held.items():
        model = rank(f"mp_rank_00_{stage:03d}")[f"model{chunk}"]
        norms = {n: t for n, t in model.items() if n.endswith("input_layernorm.weight")}
        assert set(norms) == (
            {"decoder.layers.0.input_layernorm.weight"} if layer is not None else set()
        )
        for tensor in norms.values():
            assert torch.equal(tensor, hf[f"model.layers.{layer}.input_layernorm.weight"])


def test_transformer_engine_names(models, tmp_path):
    _, rank = converted(models["deepseek3"], tmp_path, transformer_impl="transformer_engine")
    model = rank("mp_rank_00")["model"]
    assert "decoder.layers.0.input_layernorm.weight" in model  # latent attention keeps it apart
    assert "decoder.layers.0.self_attention.linear_q_up_proj.layer_norm_weight" in model
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in model
    assert "decoder.layers.1.pre_mlp_layernorm.weight" in model
    _, rank = converted(models["qwen2"], tmp_path / "dense", transformer_impl="transformer_engine")
    assert (
        "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight"
        in rank("mp_rank_00")["model"]
    )


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("tp", [1, 2])
def test_grouped_experts(models, tmp_path, tp, ep):
    """Expert after expert in memory, each transposed, seen as one matrix."""
    sizes = {"target_tensor_parallel_size": tp, "target_expert_parallel_size": ep}
    hf, rank = converted(models["mixtral"], tmp_path, moe_grouped_gemm=True, **sizes)
    prefix = "model.layers.2.block_sparse_moe.experts"
    for t in range(tp):
        for e in range(ep):
            model = rank(f"mp_rank_{t:02d}" + (f"_{e:03d}" if ep > 1 else ""))["model"]
            experts = range(e * 4 // ep, (e + 1) * 4 // ep)
            first = [gate_up(hf, f"{prefix}.{i}", t, tp, ("w1", "w3")).t() for i in experts]
            expected = torch.stack(first).reshape(32, -1)
            assert torch.equal(model["decoder.layers.2.mlp.experts.weight1"], expected)
            second = [hf[f"{prefix}.{i}.w2.weight"].chunk(tp, dim=1)[t].t() for i in experts]
            expected = torch.stack(second).reshape(-1, 32)
            assert torch.equal(model["decoder.layers.2.mlp.experts.weight2"], expected)


def test_local_and_numbered_experts(models, tmp_path):
    sizes = {"target_tensor_parallel_size": 2, "target_expert_parallel_size": 2}
    hf, rank = converted(models["qwen3_moe"], tmp_path, **sizes)
    model = rank("mp_rank_01_001")["model"]
    expected = gate_up(hf, "model.layers.1.mlp.experts.3", 1, 2)
    name = "decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight"
    assert torch.equal(model[name], expected)
    assert "decoder.layers.0.mlp.linear_fc1.weight" in model  # a dense layer
    te = {"moe_grouped_gemm": True, "transformer_impl": "transformer_engine"}
    _, rank = converted(models["qwen3_moe"], tmp_path / "te", **sizes, **te)
    model = rank("mp_rank_01_001")["model"]
    assert torch.equal(model["decoder.layers.1.mlp.experts.linear_fc1.weight1"], expected)


def test_experts_that_ranks_do_not_share(models, tmp_path):
    """With one rank an expert, only the pairs of tensor and expert rank that exist are written."""
    sizes = {"target_tensor_parallel_size": 2, "target_expert_parallel_size": 4}
    hf, rank = converted(models["qwen3_moe"], tmp_path, expert_tensor_parallel_size=1, **sizes)
    folders = sorted(path.name for path in (tmp_path / "mg/iter_0000001").iterdir())
    assert folders.pop(0) == "digests.json"
    assert folders == ["mp_rank_00_000", "mp_rank_00_002", "mp_rank_01_001", "mp_rank_01_003"]
    name = "decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.weight"
    expected = hf["model.layers.1.mlp.experts.3.down_proj.weight"]
    assert torch.equal(rank("mp_rank_01_003")["model"][name], expected)


def test_joined_latent_projections(models, tmp_path):
    hf, rank = converted(
        models["deepseek2"], tmp_path, target_tensor_parallel_size=2, join_mla_down_proj=True
    )
    old = "model.layers.1.self_attn."
    expected = torch.cat([hf[old + "q_a_proj.weight"], hf[old + "kv_a_proj_with_mqa.weight"]])
    for tp in range(2):
        model = rank(f"mp_rank_{tp:02d}")["model"]
        assert torch.equal(model["decoder.layers.1.self_attention.linear_qkv.weight"], expected)
        assert not any("_down_proj" in name for name in model)


def test_files_are_whole_archives(models, tmp_path):
    converted(models["qwen3"], tmp_path, target_tensor_parallel_size=2)
    for path in (tmp_path / "mg").rglob("*.pt"):
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None  # every checksum is right
