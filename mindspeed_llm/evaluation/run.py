"""Evaluate a model: rank 0 leads lm-evaluation-harness, the other ranks serve its requests."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from mindspeed.checkpoint.commit import atomic_write
from mindspeed.config import ConfigError
from mindspeed.distributed import environment
from mindspeed_llm.evaluation.options import EvaluateOptions
from mindspeed_llm.evaluation.tasks import load_tasks, reason_of
from mindspeed_llm.generation.engine import Engine
from mindspeed_llm.generation.model import find_language_model, load_model
from mindspeed_llm.generation.options import as_training
from mindspeed_llm.generation.session import length_limit
from mindspeed_llm.generation.text import eos_ids

TIMEOUT_MINUTES = 24 * 60


def evaluate(options: EvaluateOptions) -> str | None:
    """Return the table of scores; None on ranks that only serve. Files are written here."""
    is_rank_zero = environment.is_rank_zero()
    tasks, tokenizer = [], None
    folder = find_language_model(options.load, options.model_type_hf)
    if is_rank_zero:  # before the weights, so that errors come at once
        tokenizer = _tokenizer(options, folder)
        tasks = load_tasks(options.tasks, options.include_path, trust_code=options.trust_task_code)
    training = as_training(options)
    if "distributed_timeout_minutes" not in options.model_fields_set:
        # Other ranks wait while rank 0 loads data and computes scores.
        training = training.model_copy(update={"distributed_timeout_minutes": TIMEOUT_MINUTES})
    model = load_model(training)
    engine = Engine(model)
    if tokenizer is None:
        engine.serve()
        return None
    from mindspeed_llm.evaluation.harness import MegatronLM, ModelFacts

    try:
        length = length_limit(options.max_length, model.max_length)
        stop_ids = frozenset(eos_ids(folder, tokenizer.eos_token_id))
        facts = ModelFacts(length, options.batch_size, model.config.vocab_size, stop_ids)
        results = _run(MegatronLM(engine, tokenizer, facts, options.seed), tasks, options)
    finally:
        engine.close()
    given = {name: getattr(options, name) for name in sorted(options.model_fields_set)}
    results["config"] |= {"model_args": given, "max_length": length}
    return _report(results, options)


def _tokenizer(options: EvaluateOptions, folder: Path | None) -> Any:
    from transformers import AutoTokenizer

    path = options.tokenizer_name_or_path or folder
    if path is None or not Path(path).is_dir():
        raise ConfigError(
            f"no tokenizer in {path or options.load}: give --tokenizer-name-or-path with its folder"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # its files may hold anything
        raise ConfigError(
            f"the tokenizer in {path} cannot be loaded, {reason_of(error)}: "
            "give --tokenizer-name-or-path"
        ) from None
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer in {path} names no end of a text (eos_token)")
    if options.hf_chat_template and not tokenizer.chat_template:
        raise ConfigError(
            f"--hf-chat-template: the tokenizer in {path} has no chat template; drop the flag"
        )
    return tokenizer


def _run(model: Any, tasks: list[Any], options: EvaluateOptions) -> dict[str, Any]:
    from jinja2 import TemplateError
    from lm_eval import simple_evaluate

    try:
        with contextlib.redirect_stdout(sys.stderr):  # it prints about bootstrapping
            results: dict[str, Any] = simple_evaluate(
                model=model,
                tasks=tasks,
                num_fewshot=options.num_fewshot,
                batch_size=options.batch_size,
                limit=options.limit,
                log_samples=options.samples is not None,
                system_instruction=options.system or None,
                apply_chat_template=options.hf_chat_template,
                fewshot_as_multiturn=options.hf_chat_template,
                fewshot_random_seed=options.seed,
            )
    except (AssertionError, KeyError, TemplateError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the harness refuses these tasks, {reason_of(error)}") from error
    return results


def _report(results: dict[str, Any], options: EvaluateOptions) -> str:
    from lm_eval.utils import make_table

    samples = results.pop("samples", {})
    if options.output is not None:
        text = json.dumps(results, indent=2, default=str, ensure_ascii=False)
        atomic_write(Path(options.output), f"{text}\n".encode())
    if options.samples is not None:
        lines = [
            json.dumps({"task": task} | sample, default=str, ensure_ascii=False)
            for task, found in samples.items()
            for sample in found
        ]
        atomic_write(Path(options.samples), "".join(f"{line}\n" for line in lines).encode())
    table: str = make_table(results)
    if results.get("groups"):
        table += "\n" + make_table(results, "groups")
    return table
