"""Decoding on fixed buffers samples the same tokens as the plain loop, token for token."""

import logging
from dataclasses import replace

import pytest

from mindspeed_llm.generation.engine import (
    Engine,
    RankCoordinator,
    sample_static,
    sample_tokens,
    static_decoders,
)
from mindspeed_llm.generation.model import load_model
from mindspeed_llm.generation.sampling import SamplingParams
from mindspeed_llm.training.options import TrainOptions
from tests.llm import tiny
from tests.llm.generation import PROMPTS, collect, ours, request
from tests.ranks import run_ranks

FAMILIES = ("qwen2", "qwen3", "llama_all_biases")
WARM = SamplingParams(sample=True, temperature=0.9, seed=6)
SAMPLED = SamplingParams(sample=True, temperature=0.8, top_k=40, top_p=0.9, seed=5)


def requests():
    """Greedy ones beyond one block, sampled ones, some that stop, then one of another size."""
    return [
        request(max_new_tokens=37),
        request(max_new_tokens=37, params=SAMPLED),
        request(max_new_tokens=20, stops=range(0, 100, 7), params=SAMPLED, first=3),
        request(PROMPTS[:2], max_new_tokens=5, params=SAMPLED),
        request(PROMPTS[1:3], max_new_tokens=5, params=SAMPLED),
    ]


def both_ways(folders):
    """Return what the plain loop and fixed buffers answer, for every family."""
    return [
        [ours(folder, requests(), static=is_static) for is_static in (False, True)]
        for folder in folders
    ]


def sampled_before_the_first_is_read(folder):
    """Return how many tokens a model with a no-op layer decodes before one is read.

    First of a request that is read at its end, then of one that someone reads along, where it is
    counted at every token.
    """
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    engine = Engine(load_model(TrainOptions(load=folder, noop_layers=(1,))), static=True)
    counts = []
    for is_streamed in (False, True):
        steps = engine.generate(replace(request(), is_streamed=is_streamed))
        counts.append([int(engine._decoders._kept[1]._number) for _ in steps])
    return counts


def sampled_both_ways(model, params):
    """Return the tokens and log-probabilities of the plain loop and of fixed buffers."""
    asked = replace(request(max_new_tokens=20, params=params, stops=(7,)), log_probs=True)
    plain = sample_tokens(model, asked, RankCoordinator(model))
    return [list(plain), list(sample_static(static_decoders(model, True), asked))]


def steps_of_megatron(folder):
    """Return why the fused step refuses changed models, and what Megatron's step answers.

    Then what is sampled by the fused step and by the plain loop, with log-probabilities.
    """
    from megatron.core import parallel_state

    from mindspeed_llm.generation.decode_step import FusedStep, unsupported_part

    parallel_state.destroy_model_parallel()
    model = load_model(TrainOptions(load=folder))
    (module,) = model.chunks
    engines = [Engine(model, static=True)]
    plain = [collect(engines[0], each) for each in requests()]
    both = [sampled_both_ways(model, params) for params in (SAMPLED, WARM, SamplingParams())]
    reasons = [unsupported_part(module)]
    for name, value in (("rotary_interleaved", True), ("glu_linear_offset", 1.0)):
        before = getattr(module.config, name, None)
        setattr(module.config, name, value)
        reasons.append(unsupported_part(module))
        setattr(module.config, name, before if before is not None else 0.0)
    module.decoder.final_layernorm.zero_centered_gamma = True
    reasons.append(unsupported_part(module))
    module.decoder.final_layernorm.zero_centered_gamma = False
    module.decoder.layers[1].mlp.register_forward_hook(lambda *_: None)
    reasons.append(unsupported_part(module))
    engines.append(Engine(model, static=True))
    found = [collect(engines[1], each) for each in requests()]
    is_fused = [isinstance(each._decoders._kept[1]._run, FusedStep) for each in engines]
    return reasons, is_fused, plain, found, both


def with_a_kernel_that_does_not_fit(folder):
    """Return what is decoded when a kernel of the third layer is too large, and the warnings.

    On a GPU Triton raises this when it loads a kernel; its interpreter knows no limits.
    """
    from megatron.core import parallel_state
    from triton.runtime.errors import OutOfResources

    from mindspeed_llm.generation import decode_step

    def decode_attention(*args, **options):
        calls.append(1)
        if len(calls) % 3 == 0:
            raise OutOfResources(394_752, 232_448, "shared memory")
        return fitting(*args, **options)

    parallel_state.destroy_model_parallel()
    model = load_model(TrainOptions(load=folder))
    plain = [collect(Engine(model, static=False), each) for each in requests()]
    calls, lines, fitting = [], [], decode_step.decode_attention
    decode_step.decode_attention = decode_attention
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("mindspeed_llm.generation.static_decode").addHandler(handler)
    engine = Engine(model, static=True)
    found = [collect(engine, requests()[0]) for _ in range(2)]
    decoder = engine._decoders._kept[1]

    def never_fits(*args):
        raise OutOfResources(394_752, 232_448, "shared memory")

    decoder._state.step_at = decoder._run = never_fits
    with pytest.raises(OutOfResources):  # there is no other step
        decoder._step()
    return plain[0], found, lines


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return [str(tiny.save(name, tmp_path_factory.mktemp("models"))) for name in FAMILIES]


def test_the_same_tokens_greedy_sampled_and_stopped(folders):
    (found,) = run_ranks(both_ways, 1, folders)
    for plain, static in found:
        assert static == plain
        assert {len(answer) for answer in plain[0]} == {37}
        assert len({len(answer) for answer in plain[2]}) > 1, "nothing stops"
        assert plain[1] != plain[0], "nothing is sampled"


def test_layers_of_another_kind_run_megatrons_step_with_the_same_tokens(folders):
    (found,) = run_ranks(steps_of_megatron, 1, folders[0])
    reasons, is_fused, fused, of_megatron, both = found
    assert reasons == [
        None,
        "rotary_interleaved is True",
        "glu_linear_offset is 1.0",
        "the final norm is of another kind",
        "layer 2 has parts of another kind, or adapters",
    ]
    assert is_fused == [True, False] and of_megatron == fused
    for plain, static in both:
        assert [[one[:2] for one in step] for step in static] == [
            [one[:2] for one in step] for step in plain
        ]
        log_probs = [[one.log_prob for step in way for one in step] for way in (plain, static)]
        assert log_probs[1] == pytest.approx(log_probs[0], abs=1e-5)
        assert max(log_probs[0]) < 0


def test_a_kernel_that_does_not_fit_gives_way_to_megatrons_step(folders):
    ((plain, found, lines),) = run_ranks(with_a_kernel_that_does_not_fit, 1, folders[0])
    assert found == [plain, plain]
    (line,) = lines
    assert line == (
        "decoding is slower, a fused kernel does not fit the device: out of resource: shared "
        "memory, Required: 394752, Hardware limit: 232448. Reducing block sizes or `num_stages` "
        "may help."
    )


def test_no_ops_are_passed_over_and_a_stream_is_read_token_by_token(folders):
    (found,) = run_ranks(sampled_before_the_first_is_read, 1, folders[0])
    # A block of eight and the rest are queued when the first is read. In a stream the first token
    # is read at once, and each of the others while the next is sampled.
    assert found == [[12] * 12, [1, *range(3, 13), 12]]


def reason_and_answers(folder):
    """Return the answers of copies that were to decode on fixed buffers, and what was logged."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("mindspeed_llm.generation.engine").addHandler(handler)
    return ours(folder, [request()], static=True), said


def test_copies_of_a_model_say_why_nothing_is_recorded(tmp_path):
    folder = tiny.save("qwen2", tmp_path)
    ((answers,), said), _ = run_ranks(reason_and_answers, 2, str(folder))
    assert [len(answer) for answer in answers] == [12] * len(PROMPTS)
    assert said == [
        "decoding is slower, its steps cannot be recorded: copies of the model share the prompts"
    ]
