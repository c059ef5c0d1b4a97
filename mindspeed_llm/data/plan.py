"""The plan of a run: options validated against the data and the tokenizer, before work starts."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mindspeed.config import ConfigError
from mindspeed_llm.data.chat import ChatFormat, CheckedFormat, Thinking
from mindspeed_llm.data.chat_jinja import make_chat_format
from mindspeed_llm.data.encoder import TextEncoder, is_installed, is_supported
from mindspeed_llm.data.handlers import (
    HANDLERS,
    PRETRAIN,
    Columns,
    Context,
    Handler,
    Output,
    find_handler,
    similar_handlers,
)
from mindspeed_llm.data.handlers.base import split_media
from mindspeed_llm.data.options import PreprocessOptions, check_options
from mindspeed_llm.data.readers import Problem, Source, find_sources, first_rows
from mindspeed_llm.data.summary import record_location
from mindspeed_llm.data.template import TemplateEntry, load_template
from mindspeed_llm.data.tokenizer import TokenizerFacts, load_facts

logger = logging.getLogger(__name__)

OPT_IN = ("system", "history")
"""Roles that are read without --map-keys, and with it if it names them, in layouts of Alpaca."""
SAMPLED_ROWS = 100
"""Rows of every file that are read to find the columns."""
LARGE_INPUT_BYTES = 100 << 20
"""Bytes of data from which an accelerator that is not installed is recommended."""


@dataclass(frozen=True)
class Plan:
    """The configuration of every worker; it is sent to other processes."""

    handler: str
    facts: TokenizerFacts
    columns: Columns
    keys: tuple[str, ...] = ()
    """Columns with plain documents."""
    template: TemplateEntry | None = None
    """None for the tokenizer's own chat template."""
    thinking: Thinking = "none"
    parse_special: bool = False
    accelerate: bool = True
    limit: int | None = None
    too_long: Literal["drop", "cut", "error"] = "drop"
    append_eod: bool = False
    skip_malformed: bool = False
    placeholder_token: str = ""
    reward_tokens: tuple[str, ...] = ()


def outputs(plan: Plan) -> tuple[Output, ...]:
    """Return the output files of a plan: for documents, one per column."""
    if plan.handler == PRETRAIN:
        return tuple(Output(key, track, "ids") for track, key in enumerate(plan.keys))
    return HANDLERS[plan.handler].outputs


def make_chat(plan: Plan) -> ChatFormat:
    """Build the chat format that renders the plan's conversations."""
    chat = make_chat_format(
        plan.facts, plan.template, parse_special=plan.parse_special, thinking=plan.thinking
    )
    return CheckedFormat(chat, plan.facts, parse_special=plan.parse_special)


def make_encoder(plan: Plan) -> TextEncoder:
    """Build the encoder of the plan's texts."""
    return TextEncoder(plan.facts, parse_special=plan.parse_special, accelerate=plan.accelerate)


def make_handler(plan: Plan, encoder: TextEncoder, chat: ChatFormat | None) -> Handler:
    """Build the handler that renders the plan's records."""
    context = Context(plan.columns, encoder, chat, plan.placeholder_token, plan.reward_tokens)
    return HANDLERS[plan.handler](context)


def make_plan(
    options: PreprocessOptions, facts: TokenizerFacts | None = None
) -> tuple[Plan, list[Source]]:
    """Check the options against each other, the data and the tokenizer."""
    check_options(options)
    find_handler(options.handler_name)
    if not options.output_prefix:
        raise ConfigError("--output-prefix is missing: give a path and how the names begin")
    _check_end(options)
    sources = find_sources(options.input)
    template = _find_template(options)
    columns = _find_columns(options, sources)
    if facts is None:
        facts = load_facts(
            options.tokenizer_name_or_path,
            cache_dir=options.cache_dir,
            trust_remote_code=options.trust_remote_code,
        )
    plan = _plan(options, facts, template, columns)
    if plan.handler != PRETRAIN:
        _check_chat(plan, options)
    elif options.prompt_type or options.seq_length:
        logger.info("documents are stored whole: --prompt-type and --seq-length are ignored")
    if options.accelerator == "auto" and sum(source.size for source in sources) > LARGE_INPUT_BYTES:
        if not is_installed() and is_supported(facts):
            logger.info("`pip install gigatoken` would make this many times faster")
    return plan, sources


def _check_end(options: PreprocessOptions) -> None:
    """Refuse end-of-text tokens behind prompts and judged steps, where they would be trained."""
    handler = find_handler(options.handler_name)
    if options.append_eod and handler is not None and not handler.ends_with_answer():
        raise ConfigError(
            f"--append-eod: what {options.handler_name} makes does not end with an answer, so no "
            "end-of-text token belongs behind it: drop the flag"
        )


def _find_template(options: PreprocessOptions) -> TemplateEntry | None:
    handler = find_handler(options.handler_name)
    if handler is None and options.pack:
        raise ConfigError(
            f"--pack is for samples, not for documents ({PRETRAIN}): drop --pack, or choose "
            "a --handler-name for questions and answers, such as AlpacaStyleInstructionHandler"
        )
    if handler and options.pack and len({output.track for output in handler.outputs}) > 1:
        raise ConfigError(
            f"--pack: training packs what {options.handler_name} makes: drop --pack here, and give "
            "--variable-seq-lengths to posttrain_gpt.py, which puts a micro-batch into one row "
            "without padding"
        )
    if handler is None or not handler.needs_chat or options.prompt_type == "tokenizer":
        return None
    if not options.prompt_type:
        raise ConfigError(
            f"--prompt-type is missing: {options.handler_name} needs a chat template by name, "
            "tokenizer for the tokenizer's own, or empty if the data has it already"
        )
    return load_template(options.prompt_type, options.prompt_type_path)


def _plan(
    options: PreprocessOptions,
    facts: TokenizerFacts,
    template: TemplateEntry | None,
    columns: Columns,
) -> Plan:
    parse = options.special_tokens == "parse" or (
        options.special_tokens == "auto" and options.prompt_type == "empty"
    )
    if options.append_eod and facts.eos_id is None:
        raise ConfigError(f"--append-eod: the tokenizer in {facts.source} has no end-of-text token")
    return Plan(
        handler=options.handler_name,
        facts=facts,
        columns=columns,
        keys=options.json_keys if options.handler_name == PRETRAIN else (),
        template=template,
        thinking=options.enable_thinking,
        parse_special=parse,
        accelerate=options.accelerator == "auto",
        limit=options.seq_length,
        too_long=options.too_long,
        append_eod=options.append_eod,
        skip_malformed=options.on_bad_line == "skip",
        placeholder_token=options.placeholder_token,
        reward_tokens=options.reward_tokens,
    )


def _find_columns(options: PreprocessOptions, sources: list[Source]) -> Columns:
    """Determine the columns from --map-keys and the first rows of every file."""
    try:
        map_keys = json.loads(options.map_keys) if options.map_keys else {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--map-keys {options.map_keys:.60} is not valid JSON: {error}") from None
    if not isinstance(map_keys, dict):
        raise ConfigError(f"--map-keys {options.map_keys:.60} is not a JSON object such as {{...}}")
    rows = first_rows(sources, SAMPLED_ROWS)
    names = [list(row) for _, _, row in rows if not isinstance(row, Problem)]
    present = list(dict.fromkeys(name for row in names for name in row))
    if not rows:
        raise ConfigError(f"--input {options.input} holds no records")
    if not present:
        source, line, problem = rows[0]
        raise ConfigError(f"{record_location(source.path, line)}: {problem.reason}")
    if options.handler_name == PRETRAIN:
        return _document_columns(options.json_keys, map_keys, present)
    handler = HANDLERS[options.handler_name]
    try:
        columns = handler.find_columns(map_keys, present)
    except ConfigError as error:
        others = [] if map_keys else _handlers_of(handler, present)
        if not others:
            raise
        fitting = " or ".join(others)
        raise ConfigError(f"{error}, or give --handler-name {fitting}, which fits these") from None
    for role in OPT_IN:
        column = handler.roles.get(role)
        is_left_out = role not in map_keys and not columns[role]
        if is_left_out and any(row.get(column) for _, _, row in rows if isinstance(row, dict)):
            logger.warning(
                """the column %s is not read, as --map-keys does not name it: add "%s": "%s" to """
                """read it, or "%s": "" to do without""",
                *(column, role, column, role),
            )
    return columns


def _handlers_of(handler: type[Handler], present: Sequence[str]) -> list[str]:
    """Return the names of handlers for the same kind of data that find their columns."""
    found = []
    for name, other in similar_handlers(handler).items():
        try:
            columns = other.find_columns({}, present)
        except ConfigError:
            continue
        if columns["prompt"] or not set(other.checked) & set(present):  # else it may be refused
            found.append(name)
    return found


def _document_columns(
    keys: tuple[str, ...], map_keys: dict[str, Any], present: list[str]
) -> Columns:
    missing = [key for key in keys if key not in present]
    if missing:
        raise ConfigError(
            f"the data has no column {missing[0]}; it has {', '.join(sorted(present))}: "
            "name the column of the documents with --json-keys, or choose a --handler-name for "
            "questions and answers"
        )
    media, _ = split_media(map_keys)
    return Columns({key: key for key in keys}, {}, tuple(m for m in media if m not in keys))


def _check_chat(plan: Plan, options: PreprocessOptions) -> None:
    """Check the handler's tokens, and warn if no completion ends with an end-of-text token."""
    if not HANDLERS[plan.handler].needs_chat:
        make_handler(plan, make_encoder(plan), None)  # checks that reward tokens are single tokens
        return
    chat = make_chat(plan)
    is_general = plan.template is not None and "format_tools" not in plan.template.model_fields_set
    if plan.columns["tools"] and is_general:
        logger.info(
            "--prompt-type %s renders tools in a generic form, which may not be that of the model: "
            "--prompt-type tokenizer uses the model's own",
            options.prompt_type,
        )
    if HANDLERS[plan.handler].has_completion and not chat.trains_eos and not plan.append_eod:
        logger.warning(
            "--prompt-type %s never appends an end-of-text token (%s) to an answer: unless every "
            "answer in the data ends with one, the model will not be trained to stop; "
            "--append-eod adds it",
            options.prompt_type,
            plan.facts.eos,
        )
