"""The memory model against what autograd saves, the long-context recipes, and the advice."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import mindspeed
from mindspeed.tune.memory_model import MemoryModel
from tests.distributed.test_llm_context_parallel import train_all, write_documents
from tests.gpt.layout import FFN, HEADS, HIDDEN, SEQUENCE, VOCABULARY, Layout
from tests.ranks import run_ranks
from tests.unit.mindspeed_llm.training.tiny_run import make_model, settings

LLAMA = Layout("llama", spec="te", num_layers=2)
GROUPS = 2
MODEL = MemoryModel(
    num_layers=2,
    hidden_size=HIDDEN,
    mlp_size=FFN,
    query_size=HIDDEN,
    kv_size=GROUPS * HIDDEN // HEADS,
    attention_size=HIDDEN,
    num_heads=HEADS,
    vocab_size=VOCABULARY,
    num_parameters=0,
    seq_length=SEQUENCE,
    micro_batch_size=LLAMA.micro_batch,
    width=4,
    has_rotary_tables=True,
)
FULL = {"recompute": ("full", "block", 2)}
ACTIVATION = {"recompute_activation_function": True}
# Layout, features, and the fields of the model that describe them.
ONE_RANK = [
    ({}, {}, {}),
    ({}, {"use_fused_swiglu": True}, {"fused_mlp": True}),
    ({}, {"recompute_norm": True}, {"recompute_norm": True}),
    ({}, ACTIVATION, {"recompute_activation": True}),
    ({}, {"tiled_mlp_size": 5}, {"tiled_mlp_size": 5}),
    ({"recompute": ("full", "block", 1)}, {}, {"recomputed_layers": 1}),
    (FULL, {"tiled_mlp_size": 5}, {"recomputed_layers": 2, "tiled_mlp_size": 5}),
]
TWO_RANKS = [
    ({"tp": 2}, {}, {"tp": 2}),
    ({"tp": 2, "sequence_parallel": True}, {}, {"tp": 2, "sequence_parallel": True}),
]


def _measure(cases):
    from megatron.core import parallel_state

    from tests.gpt.saved import kept_after_forward
    from tests.gpt.training import Training

    found = []
    for layout, features, _ in cases:
        mindspeed.enable(**features)
        training = Training(replace(LLAMA, **layout))
        kept = [k.bytes for k in kept_after_forward(training) if k.dtype.is_floating_point]
        found.append(sum(kept))
        parallel_state.destroy_model_parallel()
    return found


@pytest.mark.parametrize(("world", "cases"), [(1, ONE_RANK), (2, TWO_RANKS)])
def test_saved_bytes_are_the_closed_form(world, cases):
    for found in run_ranks(_measure, world, cases):
        for measured, (*_, fields) in zip(found, cases, strict=True):
            model = replace(MODEL, **fields)
            expected = model.kept_by_stage() + sum(model.output_parts().values())
            if model.recomputed_layers:
                expected += SHARED_ROTARY  # an argument of recomputed layers, kept once
            assert measured == expected, fields


SHARED_ROTARY = 4 * SEQUENCE * (HIDDEN // HEADS)
RECIPES = Path(__file__).resolve().parents[2] / "configs" / "long_context"
TINY = {"seq_length": 32, "tiled_mlp_size": 5, "tiled_loss_size": 7}
MEMORY_FEATURES = (
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "swap_layer_input"),
    *("tiled_mlp_size", "linear_cross_entropy", "tiled_loss_size", "swap_optimizer"),
)


def _recipe(name, tiny, *, is_plain=False):
    """Return the run of a recipe, at a length for tests; plain, without what saves memory."""
    values = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    values = {key: TINY.get(key, value) for key, value in values.items()}
    if is_plain:
        values = {key: value for key, value in values.items() if key not in MEMORY_FEATURES}
    # In float32, where sums over tiles differ from whole ones by less.
    values |= {"bf16": False, "train_iters": 3}
    values["log_file"] = str(tiny.folder / f"{name} {is_plain}.jsonl")
    return "pretrain", settings(tiny.model, tiny.data, tiny.folder) | values


class _Tiny:
    def __init__(self, folder):
        self.folder = folder
        self.model, self.data = make_model(folder / "hf"), write_documents(folder)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return _Tiny(tmp_path_factory.mktemp("long"))


@pytest.fixture(scope="module")
def whole(tiny):
    runs = [_recipe("one_gpu", tiny, is_plain=True), _recipe("one_gpu", tiny)]
    return run_ranks(train_all, 1, runs)[0]


def _losses(log):
    return [line["lm loss"] for line in log if "lm loss" in line]


def test_recipe_for_one_gpu(whole):
    plain, ours = map(_losses, whole)
    assert ours == pytest.approx(plain, rel=1e-6) and len(set(plain)) == 3


def test_recipe_for_context_parallelism(whole, tiny):
    (ours, *_) = run_ranks(train_all, 2, [_recipe("context_parallel", tiny)])
    assert _losses(ours[0]) == pytest.approx(_losses(whole[0]), rel=1e-6)


def _out_of_memory(run, limit):
    """Train with little memory; return what is said."""
    from mindspeed.training.entry import OutOfMemory
    from mindspeed_llm.tasks.pretrain.gpt import PretrainTrainer
    from mindspeed_llm.training.options import TrainOptions
    from tests.allocation_limit import AllocationLimit

    trainer = PretrainTrainer(TrainOptions(**run[1]))
    try:
        with AllocationLimit(limit):
            trainer.train()
    except OutOfMemory as error:
        return str(error)
    return None


def test_a_full_device_gets_advice(tiny):
    (said,) = run_ranks(_out_of_memory, 1, _recipe("one_gpu", tiny, is_plain=True), 200_000)
    assert said.startswith("out of memory: tried to allocate 20.00 MiB; a rank of this run needs")
    assert "\n" not in said and "second line" not in said
    best = said.partition("what would save most: ")[2]
    assert best.count("(") == 3 and "--swap-optimizer (0." in best
