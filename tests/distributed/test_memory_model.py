"""The memory model against what autograd saves, the long-context recipes, and the advice."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import mindspeed
from mindspeed.tune.memory_model import MemoryModel
from tests.distributed.test_llm_context_parallel import train_all, write_documents
from tests.gpt.layout import FFN, HEADS, HIDDEN, SEQUENCE, VOCABULARY, Layout
from tests.llm.preferences import make_pairs, make_steps, write_pairs, write_steps
from tests.ranks import run_ranks
from tests.unit.mindspeed_llm.training.tiny_run import (
    make_model,
    make_samples,
    settings,
    write_samples,
)

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
    from mindspeed_llm.tasks.pretrain import PretrainTrainer
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


SAMPLES = make_samples(8)
TWO = SAMPLES[:2]
"""The first micro-batch."""
TOKENS = sum(len(ids) for ids, _ in TWO)
LABELS = sum(int((labels[1:] != -100).sum()) for _, labels in TWO)
LONGEST, JOINED = (-(-n // 8) * 8 for n in (max(len(ids) for ids, _ in SAMPLES), TOKENS))
"""Rows of a padded sample, and of two that are concatenated."""
PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]
PACKED = max(len(SAMPLES[i][0]) + len(SAMPLES[j][0]) for i, j in PAIRS) + 3
"""Rows of a packed row, as write_samples fills them."""
VARIABLE = {"variable_seq_lengths": True}
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CP = {"context_parallel_size": 2}


# Options, rows of the first micro-batch, and whether its samples are documents of one row.
BATCHES = {
    "padded rows": ({}, 2 * LONGEST, LABELS, False),
    "all logits": ({"linear_cross_entropy": False}, 2 * LONGEST, None, False),
    "concatenated": (VARIABLE, JOINED, LABELS, True),
    "packed": ({"data_path": "packed"}, PACKED, LABELS, True),
    "tiled loss": (VARIABLE | {"tiled_loss_size": 8}, JOINED, None, True),
}
SOLUTIONS = make_steps(4)
VERDICTS = {"stage": "prm", "variable_seq_lengths": True}
"""A stage that reads all logits."""
REWARDS = {"stage": "orm", "no_share_prompts": True}
"""A stage whose model has a value head."""
OTHER_DATA = {"prm": (write_steps, SOLUTIONS), "orm": (write_pairs, make_pairs(4))}
OF_TWO_RANKS = {"tensor parallel": (VARIABLE | SP, JOINED, LABELS, True)}


def _memory_of_steps(runs, limit):
    """Return what a step keeps, the memory model of its micro-batch, and what a full device says.

    The limit is for the last run, which trains on a device that becomes full.
    """
    from megatron.core import parallel_state

    from mindspeed.training.entry import OutOfMemory
    from mindspeed_llm.tasks.posttrain.launcher import get_trainer
    from mindspeed_llm.training.options import TrainOptions
    from tests.allocation_limit import AllocationLimit
    from tests.gpt.saved import SavedTensors

    found, said = [], None
    for values in runs:
        trainer, steps = get_trainer(values.get("stage", "sft"), TrainOptions(**values)), []

        def seen(*_, trainer=trainer, steps=steps):
            kept = sum(each.bytes for each in saved.kept() if each.dtype.is_floating_point)
            steps.append((kept, trainer._memory_model()))

        with SavedTensors(
            p for chunk in trainer.primary.chunks for p in chunk.parameters()
        ) as saved:
            hook = trainer.primary.wrapped[0].register_forward_hook(seen)
            trainer.start_prefetch()
            trainer.train_step(trainer.training.state, lambda: False)
            hook.remove()
        trainer._batches.close()
        found.append(steps[0])
        if values is runs[-1] and limit:
            try:
                with AllocationLimit(limit):
                    trainer.train()
            except OutOfMemory as error:
                said = str(error)
        parallel_state.destroy_model_parallel()
    return found, said


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    """Return the options of a run, by those that it adds."""
    folder = tmp_path_factory.mktemp("rows")
    data = write_samples(folder / "data", SAMPLES)
    packed = write_samples(folder / "packed", SAMPLES, PAIRS)
    model = make_model(folder / "hf", vocab_size=100)  # which two ranks can share
    run = settings(model, data, folder) | {
        "linear_cross_entropy": True,
        "pad_to_multiple_of": 8,
        "no_gradient_accumulation_fusion": True,  # of 0.12.1 knows weights by an attribute
        "global_batch_size": 2,
        "micro_batch_size": 2,
    }

    def of(changes):
        if stage := changes.get("stage"):
            write, samples = OTHER_DATA[stage]
            return run | changes | {"data_path": (write(folder / stage, samples),)}
        paths = {"data_path": (packed,), "micro_batch_size": 1} if "data_path" in changes else {}
        return run | changes | paths

    return of


def _check(measured, model, tokens, rows, has_documents):
    assert model.tokens == tokens
    if rows is not None:
        assert model.loss_rows == rows
        assert f"a micro-batch of {model.tokens} tokens, logits of {rows} of them" in model.batch
    else:
        assert "logits" not in model.batch
    expected = model.kept_by_stage() + sum(model.output_parts().values())
    if has_documents:  # on the cpu attention is called for each, and keeps what it returns
        width = model.width * model.attention_size // model.tp
        expected += model.num_layers * model.tokens * width
    assert measured == expected


def test_saved_bytes_of_a_micro_batch_are_those_of_its_rows(batches):
    """Padding that is kept out and rows without a label take no memory, and no advice has any."""
    runs = [batches(values) for values, *_ in BATCHES.values()]
    runs += [batches(VERDICTS), batches(REWARDS), batches(VARIABLE)]
    ((found, said),) = run_ranks(_memory_of_steps, 1, runs, 200_000)
    *sft, (_, prm), (measured, orm), _ = found
    assert measured == orm.kept_by_stage() + sum(orm.output_parts().values())
    assert orm.output_parts()["logits"] == 0
    for (measured, model), (_, *expected) in zip(sft, BATCHES.values(), strict=True):
        _check(measured, model, *expected)
    tokens = sum(len(ids) for ids, _ in SOLUTIONS[:2])
    assert prm.tokens == -(-tokens // 8) * 8 and prm.loss_rows is None
    rows = f"{JOINED} tokens, logits of {LABELS} of them; others have up to {2 * LONGEST}"
    assert f" for a micro-batch of {rows}, the device has" in said


def test_ranks_share_the_rows_of_a_micro_batch(batches):
    runs = [batches(values) for values, *_ in OF_TWO_RANKS.values()]
    for found, _ in run_ranks(_memory_of_steps, 2, [*runs, batches(VARIABLE | CP)], 0):
        *others, (_, split) = found
        for (measured, model), (_, *expected) in zip(others, OF_TWO_RANKS.values(), strict=True):
            _check(measured, model, *expected)
        assert split.tokens == JOINED // 2 and split.loss_rows <= LABELS
