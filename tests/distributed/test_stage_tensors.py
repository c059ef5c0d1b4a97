"""Several tensors of own shapes and dtypes between pipeline stages: the numbers of one rank."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch

import mindspeed
from tests.ranks import RankFailed, run_ranks

FLAG = {"use_multiparameter_pipeline_model_parallel": True}
# name: stages, chunks a rank, options of the stages, freed outputs, class of the stages
CASES = {
    "one tensor, lengths vary": (4, 1, {"varies": True}, False, "TextStage"),
    "one tensor, virtual stages, lengths vary": (2, 2, {"varies": True}, True, "TextStage"),
    "fixed": (4, 1, {}, False),
    "fixed, outputs freed": (4, 1, {}, True),
    "every stage another width": (4, 1, {"grow": 2}, True),
    "lengths vary": (4, 1, {"varies": True}, True),
    "lengths and widths vary": (2, 1, {"varies": True, "grow": 2}, False),
    "virtual stages": (2, 2, {}, True),
    "virtual stages, lengths vary": (2, 2, {"varies": True, "grow": 1}, True),
}


# name: stages, options of the stages, freed outputs
ZERO_BUBBLE = {
    "fixed": (4, {}, True),
    "every stage another width": (4, {"grow": 2}, True),
    "lengths vary": (2, {"varies": True}, False),
}


def _run(stages, chunks, options, frees, kind="Stage"):
    """Run one step; compare losses and, by block, gradients with those of one rank."""
    places, parts, lengths, reports = _step(stages, chunks, options, frees, kind)
    from tests.distributed import two_streams as model

    losses, gradients = model.expected(lengths, options.get("grow", 0), kind == "TextStage")
    if parts[-1].is_last:
        assert [report["loss"] for report in reports] == losses
    for (numbers, *_), part in zip(places, parts, strict=True):
        for number, block in zip(numbers, part.blocks, strict=True):
            for parameter, gradient in zip(block.parameters(), gradients[number], strict=True):
                is_same = (
                    parameter.grad is gradient
                    if gradient is None
                    else torch.equal(parameter.grad, gradient)
                )
                assert is_same, number
    return len(parts)


def _step(stages, chunks, options, frees, kind="Stage"):
    """Run one step; return the stages, where they are in the model, and the losses."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.transformer.transformer_config import TransformerConfig

    from tests.distributed import two_streams as model

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1, stages, chunks if chunks > 1 else None)
    varies = options.get("varies", False)
    config = TransformerConfig(
        num_layers=model.BLOCKS,
        hidden_size=model.TEXT,
        num_attention_heads=1,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=varies,
        moe_token_dispatcher_type="alltoall",  # Megatron wants it for lengths that vary, always
        deallocate_pipeline_outputs=frees,
        overlap_p2p_comm=chunks > 1,
        batch_p2p_comm=chunks == 1,
    )
    rank, total = parallel_state.get_pipeline_model_parallel_rank(), stages * chunks
    places = [_place(rank + stages * chunk, total) for chunk in range(chunks)]
    parts = [getattr(model, kind)(config, *place, **options) for place in places]
    for weight in (block.text for part in parts for block in part.blocks if block.linear):
        weight.main_grad = torch.zeros_like(weight)
    lengths = model.LENGTHS if varies else model.LENGTHS[:1] * 4

    def forward_step(data, part):
        return part(next(data)), lambda loss: (loss, {"loss": loss.item()})

    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(model.batches(lengths)) for _ in parts],
        model=parts,
        num_microbatches=len(lengths),
        seq_length=model.LENGTHS[0],
        micro_batch_size=model.BATCH,
        forward_only=False,
    )
    return places, parts, lengths, reports


def _place(stage, total):
    from tests.distributed.two_streams import BLOCKS

    each = BLOCKS // total
    return range(stage * each, (stage + 1) * each), stage == 0, stage == total - 1


def _zero_bubble(stages, options, frees):
    """Run one step by 1F1B and one by ZB-H1; return whether all bits agree, and the turns."""
    options = options | {"linear": True}
    mindspeed.enable(**FLAG)
    _, plain, _, expected = _step(stages, 1, options, frees)
    mindspeed.enable(**FLAG, schedules_method="zb-h1")
    with _turns() as turns:
        _, ours, _, found = _step(stages, 1, options, frees)
    is_same = found == expected
    for one, other in zip(plain[0].blocks, ours[0].blocks, strict=True):
        is_same &= torch.equal(one.text.grad, other.text.main_grad)
        for name in ("image", "cross"):
            before, after = getattr(one, name).grad, getattr(other, name).grad
            is_same &= before is after is None or torch.equal(before, after)
    return is_same, turns


@contextmanager
def _turns():
    """Log exchanges, the messages that they post, and weight gradients; all are called through."""
    from mindspeed.parallel.pipeline import stage_tensors
    from mindspeed.parallel.pipeline.zero_bubble import WeightGradientQueue

    log = []

    def logged(owner, name, turn):
        original = getattr(owner, name)

        def call(*args, **kwargs):
            log.append(turn)
            return original(*args, **kwargs)

        return mock.patch.object(owner, name, call)

    with (
        logged(stage_tensors, "_exchange", "exchange"),
        logged(stage_tensors._Neighbours, "start", "post"),
        logged(WeightGradientQueue, "run_oldest", "W"),
    ):
        yield log


def _run_all(cases, zero_bubble):
    outcomes = [_zero_bubble(*case) for case in zero_bubble]
    for case in cases:
        mindspeed.enable(**({} if "TextStage" in case else FLAG))
        try:
            outcomes.append(_run(*case))
        except AssertionError as error:
            outcomes.append(repr(error))
    return outcomes


@pytest.fixture(scope="module")
def outcomes():
    ranks = run_ranks(_run_all, 4, list(CASES.values()), list(ZERO_BUBBLE.values()))
    names = [*(("zb-h1", name) for name in ZERO_BUBBLE), *CASES]
    return {name: [rank[i] for rank in ranks] for i, name in enumerate(names)}


@pytest.mark.parametrize("name", ZERO_BUBBLE)
def test_zero_bubble_gives_the_bits_of_1f1b(outcomes, name):
    stages = ZERO_BUBBLE[name][0]
    for rank, (is_same, turns) in enumerate(outcomes["zb-h1", name]):
        assert is_same
        assert turns.count("W") == 4  # once a micro-batch
        # Behind the last message of an exchange, not between two of them.
        exchanges = " ".join(turns).split("exchange")
        assert not any("W post" in exchange for exchange in exchanges)
        if rank % stages:  # the first stage posts no gradient
            assert any("post W" in exchange for exchange in exchanges)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_one_rank_in_every_bit(outcomes, name):
    assert outcomes[name] == [CASES[name][1]] * 4


def _undeclared(kind):
    from tests.distributed import two_streams

    mindspeed.enable(**FLAG)
    if kind == "empty":
        two_streams.Stage.output_specs = lambda self: []
    elif kind == "wrong":
        declared = two_streams.Stage.output_specs
        two_streams.Stage.output_specs = lambda self: declared(self)[:2]
    else:
        two_streams.LENGTHS = (None, *two_streams.LENGTHS[1:])
        two_streams.batches = lambda _: []
    _run(2, 1, {}, False)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("empty", r"declares 0 tensors: use 1 to 8"),
        (
            "wrong",
            r"RankConfigError: a pipeline stage returned .* but its output_specs\(\) declares .*:",
        ),
        ("varies", r"a size of None, which needs --variable-seq-lengths"),
    ],
)
def test_wrong_declarations_are_one_line(kind, message):
    with pytest.raises(RankFailed, match=message):
        run_ranks(_undeclared, 2, kind)
