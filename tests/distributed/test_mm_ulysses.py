"""Context parallelism gives the loss and gradients of one rank."""

import pytest
import torch
import torch.distributed as dist

from mindspeed.config import ConfigError, build
from mindspeed.fsdp import FsdpOptions
from mindspeed_mm.models.options import ModelConfig
from mindspeed_mm.models.transformers_model import TransformersModel
from mindspeed_mm.models.ulysses import ContextParallel
from tests.distributed.mm_models import part
from tests.mm import tiny
from tests.ranks import run_ranks

RANKS = 4
CASES = {
    # Two key heads are repeated for four ranks; fifteen tokens are padded.
    "qwen2_5_vl, fused, on 4": ("qwen2_5_vl", 4, 15, {}),
    "qwen3_vl on 2": (
        "qwen3_vl",
        2,
        16,
        {"recompute_modules": ["model.language_model.layers.{*}"]},
    ),
    "internvl, padded, on 2": ("internvl", 2, 16, {}),
    "internvl, packed, on 2": ("internvl", 2, 15, {}),
}


def new_batch(case, rows, length):
    batch = tiny.batch(CASES[case][0], rows, length)
    if "padded" in case:
        batch["attention_mask"][1, 10:] = 0
        batch["labels"][1, 10:] = -100
    if "packed" in case:
        del batch["attention_mask"]
        steps = torch.cat([torch.arange(8), torch.arange(length - 8)])
        batch["position_ids"] = steps.expand(rows, -1).clone()
    return batch


def share_sequences(folders):
    return {case: _gradients(case, folders[CASES[case][0]]) for case in CASES}


def _gradients(case, folder):
    name, size, length, options = CASES[case]
    section = {"init_from_hf_path": folder, "fused_ops": "fused" in case}
    model = TransformersModel(build(ModelConfig, section))
    groups = [dist.new_group(list(range(i, i + size))) for i in range(0, RANKS, size)]
    group = groups[dist.get_rank() // size]
    model.set_context_parallel_group(group)
    model.fully_shard(fsdp2_config=build(FsdpOptions, {"sharding_size": "auto", **options}))
    copies = RANKS // size
    batch = new_batch(case, 2 * copies, length)
    total = (batch["labels"][:, 1:] != -100).sum()
    result = model(**part(batch, dist.get_rank() // size, 2))
    loss = result["loss"] * result["token_nums"] / total
    (loss * RANKS).backward()  # FSDP2 divides by the ranks
    dist.all_reduce(loss := loss.detach().clone())
    return float(loss), {n: p.grad.full_tensor() for n, p in model.model.named_parameters()}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    root = tmp_path_factory.mktemp("mm")
    names = {case[0] for case in CASES.values()}
    folders = {name: tiny.save(name, root / name) for name in names}
    return run_ranks(share_sequences, RANKS, folders, timeout=240)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_one_rank(found, case):
    name, size, length, _ = CASES[case]
    model = tiny.new_model(name)
    output = model(**new_batch(case, 2 * RANKS // size, length), use_cache=False)
    output.loss.backward()
    gradients = {key: p.grad for key, p in model.named_parameters()}
    for loss, rank_gradients in (rank[case] for rank in found):
        torch.testing.assert_close(loss, output.loss.item(), rtol=1e-5, atol=0)
        torch.testing.assert_close(rank_gradients, gradients, rtol=1e-4, atol=1e-6)


def too_many(folder):
    config = build(ModelConfig, {"init_from_hf_path": folder})
    model = TransformersModel(config)
    with pytest.raises(ConfigError, match="has 4 attention heads, fewer than ranks: use 1 to 4"):
        ContextParallel(model.model, FiveRanks())
    for loss, message in CONFLICTS.items():
        model.config = build(ModelConfig, {"loss_cfg": dict([loss])})
        with pytest.raises(ConfigError, match=message):
            model.set_context_parallel_group(dist.group.WORLD)


class FiveRanks:
    def size(self):
        return 5

    def rank(self):
        return 0


CONFLICTS = {
    ("loss_type", "square_loss"): "loss_type: square_loss needs unsplit samples",
    ("router_aux_loss_coef", 0.1): "router_aux_loss_coef: 0.1 needs unsplit sequences",
}


def test_impossible_sizes_raise(tmp_path):
    run_ranks(too_many, 2, tiny.save("internvl", tmp_path))


def full_sequences(folders):
    for name, kind in NEED_FULL_SEQUENCES.items():
        model = TransformersModel(build(ModelConfig, {"init_from_hf_path": folders[name]}))
        with pytest.raises(ConfigError, match=f"context_parallel_size=2: .*{kind}.*: use 1"):
            model.set_context_parallel_group(dist.group.WORLD)


CROSS = {
    "text_config": {**tiny.TEXT, "cross_attention_layers": [1]},
    "vision_config": {"num_hidden_layers": 1, "num_global_layers": 1, "hidden_size": 32},
}
SPARSE = {"moe_intermediate_size": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
NEED_FULL_SEQUENCES = {
    "RecurrentGemmaForCausalLM": "Conv1d",
    "MllamaForConditionalGeneration": "MllamaCrossAttentionDecoderLayer",
    "GPT2LMHeadModel": "has no `layers`",
    "MiniMaxM3VLForCausalLM": "MiniMaxM3VLAttention",
}
SIZES = {
    "MllamaForConditionalGeneration": CROSS,
    "MiniMaxM3VLForCausalLM": SPARSE,
    "RecurrentGemmaForCausalLM": {"lru_width": 32},
}


def test_layers_that_need_the_full_sequence_raise(tmp_path):
    folders = {name: str(tmp_path / name) for name in NEED_FULL_SEQUENCES}
    for name, folder in folders.items():
        tiny.save_text(name, folder, **SIZES.get(name, {}))
    run_ranks(full_sequences, 2, folders)


ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "llama_4_scaling_beta": 0.5}
LATENT = {
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8},
    **{"v_head_dim": 8, "num_key_value_heads": 4, "first_k_dense_replace": 2, "head_dim": 4},
}
POSITIONS = {
    # Queries are scaled by their positions; positions are one complex tensor.
    "Ministral3ForCausalLM": {
        "head_dim": 8,
        "rope_parameters": {**ROPE, "original_max_position_embeddings": 4},
    },
    "DeepseekV2ForCausalLM": LATENT,
}


def text_models(folders):
    return {name: half_gradients(folder) for name, folder in folders.items()}


def half_gradients(folder):
    model = TransformersModel(build(ModelConfig, {"init_from_hf_path": folder}))
    model.set_context_parallel_group(dist.group.WORLD)
    return summed_gradients(model, model(**tiny.text_batch()))


def test_positions_of_other_forms(tmp_path):
    folders = {name: str(tmp_path / name) for name in POSITIONS}
    models = {n: tiny.save_text(n, folders[n], **values) for n, values in POSITIONS.items()}
    for model in models.values():
        model(**tiny.text_batch(), use_cache=False).loss.backward()
    for found in run_ranks(text_models, 2, folders):
        for name, model in models.items():
            expected = {n: p.grad for n, p in model.named_parameters()}
            torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6)


def documents_of_positions(folder):
    """Return the positions that an attention gets, and the length of its queries."""
    from transformers import AttentionInterface

    section = {"init_from_hf_path": folder, "text_decoder": {"attn_implementation": "sdpa"}}
    plain, found = AttentionInterface()["sdpa"], []

    def attend(module, query, *args, position_ids=None, **kwargs):
        found.append((position_ids, query.shape[2]))
        return plain(module, query, *args, **kwargs)

    AttentionInterface.register("sdpa", attend)
    model = TransformersModel(build(ModelConfig, {**section, "fused_ops": False}))
    model.set_context_parallel_group(dist.group.WORLD)
    batch = tiny.batch("qwen2_5_vl", 1, 16)
    del batch["attention_mask"]
    positions = torch.cat([torch.arange(8), torch.arange(8)]).expand(4, 1, -1)  # text, and three
    model(**batch, position_ids=positions)
    return [given for given in found if given[0] is not None]


def test_attention_that_finds_documents_by_positions_gets_those_of_all_ranks(tmp_path):
    folder = tiny.save("qwen2_5_vl", tmp_path)
    for found in run_ranks(documents_of_positions, 2, folder):
        assert found
        for positions, length in found:
            assert length == 16 and positions.tolist() == [[*range(8), *range(8)]]


def three_ranks(folder):
    """Four query heads and two key heads on three ranks: 2, 1 and 1 heads of fifteen tokens."""
    model = TransformersModel(build(ModelConfig, {"init_from_hf_path": folder}))
    model.set_context_parallel_group(dist.group.WORLD)
    return summed_gradients(model, model(**tiny.batch("internvl", 2, 15)))


def summed_gradients(model, result):
    total = result["loss"] * result["token_nums"]
    count = result["token_nums"].clone()
    dist.all_reduce(count)
    (total / count).backward()
    gradients = {name: p.grad for name, p in model.model.named_parameters()}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    return gradients


def test_heads_need_not_divide(tmp_path):
    model = tiny.new_model("internvl")
    model(**tiny.batch("internvl", 2, 15), use_cache=False).loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for found in run_ranks(three_ranks, 3, tiny.save("internvl", tmp_path)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
