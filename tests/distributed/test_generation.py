"""Tokens are those of transformers, in every family, layout and way to search."""

import shutil

import pytest
import torch

from mindspeed.checkpoint.detection import HF_FOLDER
from mindspeed_llm.checkpoint import ConvertOptions
from mindspeed_llm.checkpoint.conversion import convert
from mindspeed_llm.generation.sampling import BeamParams
from mindspeed_llm.generation.scoring import ScoreRequest
from tests.llm import letters, tiny
from tests.llm.generation import PROMPTS, request, several, theirs
from tests.ranks import RankFailed, run_ranks

FAMILIES = ("qwen2", "deepseek3", "mistral_window", "qwen3_moe", "llama_all_biases")
BEAMS = (
    BeamParams(3),
    BeamParams(4, length_penalty=-1.0),
    BeamParams(2, early_stopping=True),
    BeamParams(5, 2.0),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Save the models once; return each one's folder and the model of transformers."""
    import transformers

    found = {}
    for name in FAMILIES:
        folder = tiny.save(name, tmp_path_factory.mktemp("models"))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager"
        )
        found[name] = folder, model.eval()
    return found


def greedy(model):
    """Return the greedy answers, and tokens in their middles to stop at."""
    answers = theirs(model, PROMPTS)
    return answers, {answers[0][4], answers[2][7]}


def expected(model):
    answers, stops = greedy(model)
    stopped = theirs(model, PROMPTS, stops=stops)
    assert {len(answer) for answer in stopped} != {12}, "nothing stops"
    return [answers, stopped]


def asked(model):
    return [request(), request(stops=greedy(model)[1])]


def test_every_family_on_one_rank(models):
    cases = [{"source": str(folder), "requests": asked(model)} for folder, model in models.values()]
    uncached = [case | {"cached": False} for case in cases[:2]]
    (outputs,) = run_ranks(several, 1, cases + uncached)
    for output, (_, model) in zip(outputs, [*models.values(), *models.values()]):
        assert output == expected(model)


COPIES = {"tp": 1}
"""On two ranks: copies of the model, which share the prompts."""
SCORED = (((0, 66, 5), (66, 9), (1,)), ((50, 4),), ((6,),), ((98, 3, 1), (7,)))
"""Tokens behind each prompt; those before the last are the end of the prompt."""


def scored(model):
    """Return the log-probability of each, and whether transformers would generate its tokens."""
    found = []
    for prompt, sequences in zip(PROMPTS, SCORED):
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0]
        for tokens in sequences:
            last = logits[-len(tokens) :].log_softmax(-1)
            log_prob = last.gather(-1, torch.tensor(tokens)[:, None]).sum().item()
            found.append((pytest.approx(log_prob, abs=1e-4), last.argmax(-1).tolist() == [*tokens]))
    return found


@pytest.mark.parametrize("layouts", [[{}], [{"tp": 2}, {"pp": 2}, COPIES]])
def test_scores_of_given_tokens(models, layouts):
    requests = [ScoreRequest(PROMPTS, SCORED)]
    cases = [
        {"source": str(models[name][0]), "requests": requests, **layout}
        for name in ("qwen2", "deepseek3")
        for layout in layouts
    ]
    outputs, *_ = run_ranks(several, 1 if layouts == [{}] else 2, cases)
    for case, (output,) in zip(cases, outputs):
        name = "qwen2" if case["source"] == str(models["qwen2"][0]) else "deepseek3"
        assert output == scored(models[name][1])


LAYOUTS = [
    ("qwen2", {"tp": 2}),
    ("qwen2", {"pp": 2, "cached": False}),
    ("qwen2", {"pp": 2, "transformer_impl": "local"}),
    ("deepseek3", {"tp": 2}),
    ("deepseek3", {"pp": 2}),
    ("qwen3_moe", {"ep": 2}),
    ("mistral_window", {"tp": 2}),
    ("llama_all_biases", {"tp": 2}),
    ("qwen2", COPIES),
    ("qwen3_moe", COPIES),
]


def test_two_ranks(models):
    cases = [
        {"source": str(models[name][0]), "requests": asked(models[name][1]), **layout}
        for name, layout in LAYOUTS
    ]
    first, second = run_ranks(several, 2, cases)
    assert second == [None] * len(cases)
    for output, (name, layout) in zip(first, LAYOUTS):
        assert output == expected(models[name][1]), (name, layout)


def test_a_copy_without_prompts_helps_with_its_experts(models):
    folder, model = models["qwen3_moe"]
    requests = [request(PROMPTS[:1]), ScoreRequest(PROMPTS[:1], SCORED[:1]), *asked(model)]
    cases = [{"source": str(folder), "requests": requests, "ep": ep} for ep in (1, 2)]
    outputs, _ = run_ranks(several, 2, cases)
    wanted = [theirs(model, PROMPTS[:1]), scored(model)[: len(SCORED[0])], *expected(model)]
    assert outputs == [wanted] * 2


def test_copies_of_a_shared_model_share_prompts(models):
    folder, model = models["qwen2"]
    requests = [*asked(model), ScoreRequest(PROMPTS, SCORED)]
    cases = [
        {"source": str(folder), "requests": requests, **split} for split in ({"tp": 2}, {"pp": 2})
    ]
    outputs, *others = run_ranks(several, 4, cases)
    assert outputs == [[*expected(model), scored(model)]] * 2
    assert others == [[None, None]] * 3


def test_experts_are_shared_in_other_ways_than_the_rest(models):
    """Split ones over more ranks than the rest, and whole ones beside TP."""
    folder, model = models["qwen3_moe"]
    requests = [request(PROMPTS[:1]), *asked(model)]
    whole = {"tp": 2, "expert_tensor_parallel_size": 1}
    layouts = [
        {"tp": 2, "ep": 2},
        whole | {"ep": 4},
        whole | {"ep": 2, "pp": 2},
        {"ep": 2, "expert_tensor_parallel_size": 2},
    ]
    cases = [{"source": str(folder), "requests": requests, **layout} for layout in layouts]
    outputs, *_ = run_ranks(several, 4, cases)
    assert outputs == [[theirs(model, PROMPTS[:1]), *expected(model)]] * len(cases)


@pytest.mark.parametrize(
    "layouts", [[{}], [{"tp": 2}, {"pp": 2}, COPIES]], ids=["one rank", "two ranks"]
)
def test_beam_search(models, layouts):
    folder, model = models["qwen2"]
    stops = {one for answer in theirs(model, PROMPTS, beams=BeamParams(3)) for one in answer[3:5]}
    asked, wanted = [], []
    for beams in BEAMS:
        asked.append(request(stops=stops, beams=beams))
        wanted.append(theirs(model, PROMPTS, stops=stops, beams=beams))
    assert len({len(answer) for answers in wanted for answer in answers}) > 2, "all are alike"
    cases = [{"source": str(folder), "requests": asked, **layout} for layout in layouts]
    found = run_ranks(several, 2 if layouts[0] else 1, cases)[0]
    assert found == [wanted] * len(cases)


def test_a_reward_model_that_only_its_given_config_names_is_refused(tmp_path):
    model = letters.save_model(tmp_path / "hf", "LlamaForSequenceClassification", num_labels=1)
    convert(ConvertOptions(load_dir=model, save_dir=str(tmp_path / "mg")))
    shutil.rmtree(tmp_path / "mg" / HF_FOLDER)
    case = {"source": str(tmp_path / "mg"), "requests": [request()], "hf_cfg_dir": model}
    with pytest.raises(RankFailed, match="is a reward model, which has no output layer"):
        run_ranks(several, 1, [case])
