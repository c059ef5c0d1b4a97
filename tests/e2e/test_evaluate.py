"""`mindspeed-llm evaluate` against the harness's own model, its commands as the page shows them."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_llm.cli.main import main
from tests.commands import ROOT
from tests.llm import letters
from tests.llm.smollm2 import smollm2_file

LIBRARIES = Path(sys.prefix) / "lm-eval"
PAGE = ROOT / "docs/llm/evaluate.md"
FOLDER = "SmolLM2-135M-Instruct"
EVALUATE = ("-m", "mindspeed_llm", "evaluate")
HARNESS = """
import json, sys
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

tasks = TaskManager(include_path="examples/evaluate", include_defaults=False)
found = {}
for key, names, length, limit in (
    ("whole", ["capitals", "capitals_text"], 2048, None),
    ("cut", ["capitals", "capitals_text"], 16, 3),
    ("chat", ["capitals_written"], 2048, None),
):
    results = simple_evaluate(
        model="hf",
        model_args={"pretrained": sys.argv[1], "dtype": "float32", "max_length": length},
        tasks=names, task_manager=tasks, batch_size=4, device="cpu", limit=limit,
        apply_chat_template=key == "chat", fewshot_as_multiturn=key == "chat",
    )
    found[key] = [
        [name, sample["doc_id"], sample["resps"]]
        for name in names for sample in results["samples"][name]
    ]
json.dump(found, open("harness.json", "w"))
"""
LOAD_TASKS = """
import sys
from mindspeed.config import ConfigError
from mindspeed_llm.evaluation.tasks import load_tasks

for name in sys.argv[1:]:
    try:
        (task,) = load_tasks([name], ["examples/evaluate"])
        print(name, task.task_name)
    except ConfigError as error:
        print(name, error)
"""

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (LIBRARIES / ".installed").is_file(), reason="make setup could not install lm_eval"
    ),
]


def run(*words, folder):
    """Run a command with the harness beside the environment; return code, output and errors."""
    variables = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, LIBRARIES))), "HF_HUB_OFFLINE": "1"}
    variables |= {"XDG_CACHE_HOME": str(folder / "cache"), "HF_HOME": str(folder / "hf")}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=os.environ | variables | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


def blocks(language):
    """Return the blocks of the page in a language."""
    pattern = rf"^```{language}\n(.*?)^```"
    return re.findall(pattern, PAGE.read_text(), re.MULTILINE | re.DOTALL)


def words(command):
    """Return a shown command as words for Python."""
    program, *others = shlex.split(command)
    return ["-m", {"mindspeed": "mindspeed", "mindspeed-llm": "mindspeed_llm"}[program], *others]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the real model and the examples."""
    folder = tmp_path_factory.mktemp("evaluate")
    assert main(["import-gguf", str(smollm2_file()), str(folder / FOLDER)]) == 0
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


@pytest.fixture(scope="module")
def harness(folder):
    """Return what the harness's own model answers: whole questions, cut ones, in a chat."""
    code, _, errors = run("-c", HARNESS, FOLDER, folder=folder)
    assert code == 0, errors
    return json.loads((folder / "harness.json").read_text())


def answers(path):
    """Return task, question and what our model said."""
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    return [[sample["task"], sample["doc_id"], sample["resps"]] for sample in samples]


def assert_close(found, expected, count):
    assert len(found) == len(expected) == count
    for mine, theirs in zip(found, expected, strict=True):
        assert mine[:2] == theirs[:2]
        for (one,), (other,) in zip(mine[2], theirs[2], strict=True):
            assert one == pytest.approx(other, abs=1e-4)


def test_the_first_command_of_the_page(folder, harness):
    command, table = blocks("bash")[0], blocks("text")[0]
    code, output, errors = run(*words(command), folder=folder)
    assert code == 0, errors
    assert output.strip() == table.strip()
    assert_close(answers(folder / "samples.jsonl"), harness["whole"], 32)
    results = json.loads((folder / "scores.json").read_text())["results"]
    assert results["capitals"]["acc,none"] == 0.75


def test_the_second_command_of_the_page(folder, harness):
    """Two ranks, and completions through the chat template."""
    command, table = blocks("bash")[1], blocks("text")[1]
    code, output, errors = run(*words(command), "--samples", "written.jsonl", folder=folder)
    assert code == 0, errors
    assert output.strip() == table.strip()
    assert answers(folder / "written.jsonl") == harness["chat"]


def test_what_is_too_long_is_cut_as_the_harness_does(folder, harness):
    flags = ["--tasks", "capitals", "capitals_text", "--include-path", "examples/evaluate"]
    flags += ["--max-length", "16", "--limit", "3", "--samples", "cut.jsonl"]
    code, _, errors = run(*EVALUATE, "--load", FOLDER, *flags, folder=folder)
    assert code == 0, errors
    assert_close(answers(folder / "cut.jsonl"), harness["cut"], 6)
    whole = [each for each in harness["whole"] if each[1] < 3]
    assert all(one != other for one, other in zip(harness["cut"], whole, strict=True))


OWN = "dataset_path: json\ndataset_kwargs: {data_files: {test: examples/evaluate/capitals.jsonl}}\n"
OWN += "test_split: test\ndoc_to_text: '{{country}}'\ndoc_to_target: answer\n"
WRITTEN = OWN + "output_type: generate_until\n"
WRONG = {  # a file, what it holds, and what is said about it
    "code.inc": ("doc_to_text: !function code.run\n", ()),
    "outer.yaml": ("include:\n  - code.inc\ntask: outer\n", ("code.inc would run code, ", "!fun")),
    "jinja.yaml": (
        "task: jinja\n" + OWN.replace("{{country}}", "{{cycler.__init__.__globals__}}"),
        ("cannot be loaded: SecurityError: access to attribute '__init__'",),
    ),
    "metric.yaml": (
        f"task: metric\n{OWN}metric_list: [{{metric: ./mine}}]\n",
        ("the metric ./mine is none of lm_eval's", "give --trust-task-code"),
    ),
    "pickled.yaml": ("task: pickled\ndataset_path: pandas\n", ("unpickling data can run code",)),
    "group.yaml": ("group: mine\ntask: [capitals]\n", ("is a group: give its name",)),
    "unsafe.yaml": (f"task: unsafe\nunsafe_code: true\n{WRITTEN}", ("which is not supported",)),
    "beams.yaml": (
        f"task: beams\n{WRITTEN}generation_kwargs: {{num_beams: 3, until: []}}\n",
        ("its generation_kwargs have num_beams; known are do_sample, max_gen_toks",),
    ),
    "nothing.yaml": (
        "task: nothing\ndataset_path: json\ndataset_kwargs: {data_files: missing.jsonl}\n",
        ("cannot be loaded: FileNotFoundError", "missing.jsonl"),
    ),
    "broken.yaml": ("task: [\n", ("broken.yaml cannot be read: ParserError", "line 2, column 1")),
}


def test_what_is_wrong_is_one_line(folder):
    for name, (content, _) in WRONG.items():
        (folder / name).write_text(content)
    cases = {name: said for name, (_, said) in WRONG.items() if said}
    cases |= {
        "capitols": ("no task has this name; did you mean capitals",),
        "missing.yaml": ("there is no such file",),
    }
    # One process: its imports take longer than all cases.
    code, output, errors = run("-c", LOAD_TASKS, "capitals", *cases, folder=folder)
    assert code == 0, errors
    first, *others = output.splitlines()
    assert first == "capitals capitals"
    for line, (name, parts) in zip(others, cases.items(), strict=True):
        assert line.startswith(name) and all(part in line for part in parts), line


def test_a_question_of_spaces_is_none(folder):
    """The harness gives its spaces to the answer, which is scored behind the prefix token."""
    questions = [{"q": " ", "a": " Paris"}, {"q": "", "a": "  Paris"}, {"q": "", "a": " Paris"}]
    (folder / "blank.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (folder / "blank.yaml").write_text(
        "task: blank\ndataset_path: json\ndataset_kwargs: {data_files: {test: blank.jsonl}}\n"
        "test_split: test\noutput_type: loglikelihood\ntarget_delimiter: ''\n"
        "doc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\nmetric_list: [{metric: perplexity}]\n"
    )
    flags = ["--tasks", "blank.yaml", "--samples", "blank_samples.jsonl"]
    code, output, errors = run(*EVALUATE, "--load", FOLDER, *flags, folder=folder)
    assert code == 0 and output.startswith("|"), errors  # not what the harness prints before
    spaces, none, other = (resps for _, _, resps in answers(folder / "blank_samples.jsonl"))
    assert spaces == none != other


def test_a_completion_has_to_leave_room_for_its_question(folder):
    flags = ["--tasks", "examples/evaluate/capitals_written.yaml", "--max-length", "16"]
    code, output, errors = run(*EVALUATE, "--load", FOLDER, *flags, folder=folder)
    assert code == 2 and not output
    last = errors.splitlines()[-1]
    assert last.startswith("mindspeed-llm: error: a task asks for 16 new tokens"), errors


def test_a_reward_model_is_refused(folder):
    """Its checkpoint stores the shape of the language model that it was made of."""
    letters.save_model(folder / "letters")
    pairs = [{"prompt": "ab", "chosen": "cc", "rejected": "dd"}] * 2
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    flags = ["--stage", "orm", "--load", "letters", "--save", "scorer", "--data-path"]
    flags += ["pairs.jsonl", "--handler-name", "OpenAIPairwiseHandler", "--prompt-type", "empty"]
    flags += ["--seq-length", "16", "--lr", "1e-3", "--train-iters", "1"]
    code, _, errors = run("-m", "mindspeed_llm", "posttrain", *flags, folder=folder)
    assert code == 0, errors
    tasks = ("--tasks", "examples/evaluate/capitals_written.yaml")
    code, output, errors = run(*EVALUATE, "--load", "scorer", *tasks, folder=folder)
    assert code == 2 and not output
    assert "error: --load scorer: is a reward model, which has no output" in errors.splitlines()[-1]
