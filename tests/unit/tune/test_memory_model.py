"""What the memory model advises: flags that are not in force, the largest first, by its numbers.

`python -m tests.unit.tune.test_memory_model` rewrites the tables of docs/llm/long_context.md.
"""

import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mindspeed.training import entry
from mindspeed.training.out_of_memory import with_advice
from mindspeed.tune.memory_model import FULL_RECOMPUTE as FULL
from mindspeed.tune.memory_model import GIB, MemoryModel, advice, as_flags, fitting
from mindspeed.tune.run_memory import memory_model

# Llama-3-8B.
MODEL = MemoryModel(
    num_layers=32,
    hidden_size=4096,
    mlp_size=14336,
    query_size=4096,
    kv_size=1024,
    attention_size=4096,
    num_heads=32,
    vocab_size=128256,
    num_parameters=8_030_261_248,
    seq_length=8192,
    fused_mlp=True,
)

FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LONG = replace(MODEL, seq_length=262144)
PAGE = Path(__file__).resolve().parents[3] / "docs" / "llm" / "long_context.md"
MARKS = ("<!-- parts -->\n", "<!-- end of parts -->\n")


def tables() -> str:
    """Write the memory of the 8B shape at 262,144 tokens, part by part and feature by feature."""
    lines = ["| kept by one layer | GiB |", "|---|---|"]
    lines += [f"| {name} | {size / GIB:.3f} |" for name, size in LONG.kept_parts().items() if size]
    steps = [("nothing", LONG)]
    for flag, fields in (
        ("full recompute", {"recomputed_layers": 32}),
        ("`--swap-layer-input`", {"swap_layer_input": True}),
        ("`--tiled-loss-size 4096`", {"tiled_loss_size": 4096}),
        ("`--tiled-mlp-size 4096`", {"tiled_mlp_size": 4096}),
        ("`--swap-optimizer`", {"swap_optimizer": True}),
    ):
        steps.append((flag, replace(steps[-1][1], **fields)))
    names = list(LONG.parts())
    lines += ["", f"| added | {' | '.join(names)} | sum |", "|---" * (len(names) + 2) + "|"]
    for flag, model in steps:
        sizes = [*model.parts().values(), model.total()]
        lines.append(f"| {flag} | {' | '.join(f'{size / GIB:.1f}' for size in sizes)} |")
    return "\n".join(lines) + "\n"


def test_the_page_has_these_tables():
    assert tables() in PAGE.read_text(encoding="utf-8")


def test_a_layer_by_hand():
    """1.14 GB a layer of 8192 tokens: (4 H + 3 Q + 3 K + 2 F) x 2 bytes and 34 float32 a token."""
    elements = 4 * 4096 + 3 * 4096 + 3 * 1024 + 2 * 14336
    assert sum(MODEL.kept_parts().values()) == 8192 * (2 * elements + 4 * 34)


def test_state_by_hand():
    parameters = MODEL.num_parameters
    assert sum(MODEL.state_parts().values()) == 18 * parameters
    assert sum(replace(MODEL, reuse_fp32_param=True).state_parts().values()) == 16 * parameters
    assert sum(replace(MODEL, swap_optimizer=True).state_parts().values()) == 6 * parameters
    sharded = replace(MODEL, distributed_optimizer=True, dp=4)
    assert sum(sharded.state_parts().values()) == 9 * parameters
    adapters = replace(MODEL, trained_fraction=0.5)
    assert sum(adapters.state_parts().values()) == 10 * parameters


def test_savings_are_differences_and_sorted():
    options = {next(iter(changes)): size for changes, size in MODEL.savings()}
    assert options["swap_optimizer"] == 12 * MODEL.num_parameters
    assert options["reuse_fp32_param"] == 2 * MODEL.num_parameters
    layer, kept = sum(MODEL.kept_parts().values()), 8192 * 4096 * 2
    assert options["recompute_granularity"] == 32 * (layer - kept)
    assert list(options.values()) == sorted(options.values(), reverse=True)
    assert next(iter(options)) == "swap_optimizer"


def test_what_is_in_force_is_not_advised():
    on = replace(
        MODEL,
        swap_optimizer=True,
        recomputed_layers=32,
        swap_layer_input=True,
        tiled_mlp_size=2048,
        tiled_loss_size=2048,
    )
    assert on.savings() == []
    assert replace(on, swap_layer_input=False).savings() == [
        ({"swap_layer_input": True}, 32 * 8192 * 4096 * 2)
    ]


def test_a_layer_at_work_does_not_grow_with_the_sequence():
    tiled = replace(MODEL, tiled_mlp_size=2048, tiled_loss_size=2048, seq_length=16384)
    longer = replace(tiled, seq_length=4 * 16384)
    mlp = 2 * 2048 * 2 * 2 * 14336
    logits = 2 * 2048 * 128256 * 4
    assert tiled.workspace() == max(mlp, logits)
    # Attention has all positions.
    assert longer.workspace() == max(logits, 2 * 65536 * 2 * (2 * 4096 + 3 * 1024))


def test_the_line():
    line = advice(MODEL, 139 * GIB, lambda changes: True)
    assert line.startswith("a rank of this run needs about ") and "the device has 139.0 GiB" in line
    assert line.endswith(
        f"what would save most: --swap-optimizer (89.7 GiB), {FULL_RECOMPUTE} (27.5 GiB), "
        "--tiled-mlp-size 2048 (16.0 GiB); what would fit: --swap-optimizer (86.3 GiB)"
    )


def test_rows_without_a_label_have_no_logits():
    few = replace(MODEL, loss_rows=500, max_tokens=16384)
    whole, picked = MODEL.output_parts(), few.output_parts()
    assert whole["logits"] == 8192 * 128256 * 4 and picked["logits"] == 500 * 128256 * 4
    assert whole["hidden states"] == 8192 * 4096 * 2
    assert picked["hidden states"] == 500 * (4096 * 2 + 4)
    assert picked["final norm"] == whole["final norm"] == 8192 * (4096 * 2 + 4)
    assert few.kept_by_stage() == MODEL.kept_by_stage()
    # The MLP of 8192 tokens is larger than these logits, not than those of all.
    assert few.workspace() == 2 * 8192 * 2 * 2 * 14336 < MODEL.workspace() == 2 * whole["logits"]
    # A tile computes all of its rows, so it saves less where few have a label.
    tiled = {"tiled_loss_size": 2048}
    assert replace(few, **tiled).output_parts() == replace(MODEL, **tiled).output_parts()
    assert replace(few, **tiled).workspace() == replace(MODEL, **tiled).workspace()
    assert "tiled_loss_size" not in {name for changes, _ in few.savings() for name in changes}


def test_the_line_says_what_it_is_about():
    few = replace(MODEL, loss_rows=500, max_tokens=16384)
    for model, batch in (
        (MODEL, "for a micro-batch of 8192 tokens, the device has"),
        (few, "of 8192 tokens, logits of 500 of them; others have up to 16384, the device has"),
        (replace(few, cp=2, micro_batch_size=4), "of 16384 tokens, logits of 500 of them, the"),
        (replace(few, tiled_loss_size=2048), "of 8192 tokens; others have up to 16384, the"),
    ):
        assert batch in advice(model, 139 * GIB, lambda changes: True)


def test_flags_are_added_until_the_run_fits():
    for gib, flags in (
        (200, ()),
        (60, ("--swap-optimizer", FULL_RECOMPUTE)),
        (50, ("--swap-optimizer", FULL_RECOMPUTE, "--tiled-loss-size 2048")),
        (1, ("--swap-optimizer", "--swap-layer-input", "--tiled-loss-size 2048")),
    ):
        changes, smaller = fitting(MODEL, gib * GIB, lambda changes: True)
        assert (smaller.total() <= gib * GIB) is (gib > 1)
        assert all(flag in as_flags(changes) for flag in flags)
        assert bool(changes) is bool(flags)
    said = advice(MODEL, GIB, lambda changes: True)
    assert "; too much still: --swap-optimizer" in said and "what would fit" not in said


def test_flags_that_exclude_each_other_are_not_added_together():
    changes, _ = fitting(MODEL, GIB, lambda changes: not {"swap_optimizer", *FULL} <= set(changes))
    assert "swap_optimizer" in changes and not set(FULL) & set(changes)


def test_what_the_run_refuses_is_not_advised():
    line = advice(MODEL, 139 * GIB, lambda changes: set(changes) == {"reuse_fp32_param"})
    assert "what would save most: --reuse-fp32-param (15.0 GiB); too much still: --reuse" in line
    assert advice(MODEL, 139 * GIB, lambda changes: False).endswith("the device has 139.0 GiB")


def test_the_error_holds_no_tensor_of_the_step():
    tensors = []

    def run():
        activation = torch.ones(3)
        tensors.append(weakref.ref(activation))
        raise torch.OutOfMemoryError("out of memory: 20.00 MiB\nsecond line")

    with pytest.raises(entry.OutOfMemory, match="20.00 MiB; a rank of this run needs") as error:
        with_advice(run, lambda: MODEL, lambda changes: True)
    assert error.value.__context__ is None
    assert tensors[0]() is None


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, MemoryError])
def test_an_error_without_advice_stays_the_same(kind):
    def run():
        raise kind("20.00 MiB\nsecond line")

    with pytest.raises(kind) as error:  # nothing is known about the run
        with_advice(run, lambda: memory_model({}), lambda changes: True)
    assert type(error.value) is kind and str(error.value) == "20.00 MiB\nsecond line"


def test_scripts_catch_the_error_as_torchs_and_it_is_advised_once():
    def run():
        raise torch.OutOfMemoryError("20.00 MiB")

    def inner():
        with_advice(run, lambda: MODEL, lambda changes: True)

    with pytest.raises(torch.OutOfMemoryError) as error:
        with_advice(inner, lambda: MODEL, lambda changes: True)
    assert str(error.value).count("a rank of this run needs") == 1


@pytest.mark.parametrize("rank", ["0", "3"])
def test_every_rank_without_memory_says_so_and_fails(rank, capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", rank)

    def train():
        raise entry.OutOfMemory("no memory; what would save most: --swap-optimizer")

    assert entry.run_rank(train) == entry.FAILED
    line = "error: no memory; what would save most: --swap-optimizer\n"
    assert line in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit, entry.exit_on_config_error():
        train()
    assert exit.value.code == entry.FAILED and line in capsys.readouterr().err


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    PAGE.write_text(before + MARKS[0] + tables() + MARKS[1] + after, encoding="utf-8")
