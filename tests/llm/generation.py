"""Generation in the ranks of a test, and what transformers says to the same prompts."""

import torch

from mindspeed_llm.generation.engine import Engine, Request
from mindspeed_llm.generation.model import load_model
from mindspeed_llm.generation.sampling import BeamParams, SamplingParams
from mindspeed_llm.generation.scoring import ScoreRequest
from mindspeed_llm.training.options import TrainOptions

PROMPTS = ((3, 98, 7, 41, 0, 66), (1, 2, 50), (17,), (90, 5, 12, 66, 0, 41, 7, 98, 3))


def ours(source, requests, cached=True, tp=1, pp=1, ep=1, static=None, **options):
    """Return the answers of each request: tokens for every prompt, or scores."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    model = load_model(
        TrainOptions(
            load=str(source),
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            expert_model_parallel_size=ep,
            **options,
        )
    )
    engine = Engine(model, cached=cached, static=static)
    if not engine.is_rank_zero:
        return engine.serve()
    found = [
        engine.score(one) if isinstance(one, ScoreRequest) else collect(engine, one)
        for one in requests
    ]
    engine.close()
    return found


def collect(engine, request):
    answers = [[] for _ in request.prompts]
    for step in engine.generate(request):
        for row, token in step:
            answers[row].append(token)
    return answers


def several(cases):
    """Run several cases one after the other in the same ranks."""
    return [ours(**case) for case in cases]


def request(prompts=PROMPTS, max_new_tokens=12, stops=(), **options):
    """Ask for a greedy answer, a sampled one (params=) or that of a beam search (beams=)."""
    return Request(
        prompts=tuple(prompts),
        max_new_tokens=(max_new_tokens,) * len(prompts),
        stop_ids=frozenset(stops),
        params=options.get("params", SamplingParams()),
        beams=options.get("beams"),
        first=options.get("first", 0),
    )


def theirs(model, prompts, max_new_tokens=12, stops=(), beams: BeamParams | None = None):
    """Return what transformers generates, one prompt at a time."""
    settings = {"num_beams": 1}
    if beams is not None:
        settings = {
            "num_beams": beams.count,
            "length_penalty": beams.length_penalty,
            "early_stopping": beams.early_stopping,
        }
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=list(stops) or None,
            pad_token_id=0,
            **settings,
        )
        tokens = output[0, len(prompt) :].tolist()
        end = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
        answers.append(tokens[:end])
    return answers
