"""What context parallelism, masks and ALiBi accept, refuse and change."""

import argparse

import pytest

from mindspeed.config import ConfigError, Spelling, build
from mindspeed.distributed.context_rules import ContextOptions
from mindspeed.features.argument_hook import _add_choices
from mindspeed.features.base import Context
from mindspeed.features.parallel.context_parallel import chosen, wrap_validate_args
from mindspeed.features.registry import registry
from mindspeed.features.selection import select

SCRIPT = {"world_size": 8, "create_attention_mask_in_dataloader": True, "seq_length": 64}


def options(**given):
    return build(registry().options_class, given)


def on(given=None, **arguments):
    context = Context(Spelling.FLAG, SCRIPT | arguments)
    return {
        each.feature.name
        for each in select(registry(), options(**(given or {})), context)
        if each.on
    }


@pytest.mark.parametrize(
    ("given", "arguments", "name"),
    [
        ({}, {"context_parallel_size": 2}, "context_parallel"),
        ({"attention_mask_type": "general"}, {}, "attention_mask"),
        ({}, {"position_embedding_type": "alibi"}, "alibi"),
    ],
)
def test_what_is_on(given, arguments, name):
    assert name not in on()
    assert name in on(given, **arguments)


@pytest.mark.parametrize(
    ("given", "arguments", "message"),
    [
        (
            {},
            {"context_parallel_size": 3, "seq_length": 66},
            "8 rank(s) cannot hold --context-parallel-size 3",
        ),
        (
            {"context_parallel_algo": "hybrid_cp_algo"},
            {"context_parallel_size": 8},
            "--ulysses-degree-in-cp is missing: for --context-parallel-size 8 use 2 or 4",
        ),
        (
            {"context_parallel_algo": "hybrid_cp_algo", "ulysses_degree_in_cp": 8},
            {"context_parallel_size": 8},
            "--ulysses-degree-in-cp 8: for --context-parallel-size 8 use 2 or 4",
        ),
        (
            {"context_parallel_algo": "hybrid_cp_algo", "ulysses_degree_in_cp": 2},
            {"context_parallel_size": 2},
            "--context-parallel-algo hybrid_cp_algo cannot split --context-parallel-size 2 in two",
        ),
        (
            {"context_parallel_algo": "ulysses_cp_algo", "ulysses_degree_in_cp": 2},
            {"context_parallel_size": 4},
            "--ulysses-degree-in-cp 2 needs --context-parallel-algo hybrid_cp_algo",
        ),
        (
            {"cp_window_size": 8},
            {"context_parallel_size": 8},
            "--cp-window-size 8 for a ring of 8 ranks: use 1, 2 or 4",
        ),
        (
            {
                "context_parallel_algo": "hybrid_cp_algo",
                "ulysses_degree_in_cp": 4,
                "cp_window_size": 2,
            },
            {"context_parallel_size": 8},
            "--cp-window-size 2 for a ring of 2 ranks: use 1",
        ),
        (
            {"context_parallel_algo": "ulysses_cp_algo"},
            {"context_parallel_size": 2, "cp_comm_type": ["all_gather"]},
            "--context-parallel-algo ulysses_cp_algo and --cp-comm-type all_gather contradict",
        ),
        (
            {},
            {"context_parallel_size": 4, "seq_length": 60},
            "--seq-length 60 is not a multiple of 2 x --context-parallel-size 4: use 64",
        ),
        (
            {"cp_document_layout": "whole"},
            {"context_parallel_size": 2},
            "--cp-document-layout whole: Megatron-LM's data loader cuts documents in zigzag order",
        ),
        (
            {},
            {"context_parallel_size": 2, "attention_dropout": 0.1},
            "--attention-dropout 0.1 cannot be reproduced with --context-parallel-size 2: use 0",
        ),
        (
            {},
            {"context_parallel_size": 2, "reset_attention_mask": True},
            "--reset-attention-mask: a causal layer takes no mask",
        ),
        (
            {"attention_mask_type": "general"},
            {"create_attention_mask_in_dataloader": False},
            "--attention-mask-type general reads a mask that --no-create-attention-mask-in-data",
        ),
        (
            {},
            {"position_embedding_type": "alibi", "multi_latent_attention": True},
            "--position-embedding-type alibi and --multi-latent-attention cannot be used together",
        ),
    ],
)
def test_what_is_refused(given, arguments, message):
    with pytest.raises(ConfigError) as raised:
        on(given, **arguments)
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "comm_type", "sizes"),
    [
        ({"context_parallel_algo": "ulysses_cp_algo"}, "a2a", None),
        ({"context_parallel_algo": "kvallgather_cp_algo"}, "all_gather", None),
        ({"context_parallel_algo": "hybrid_cp_algo", "ulysses_degree_in_cp": 2}, "a2a+p2p", [2, 4]),
    ],
)
def test_megatron_gets_its_own_names(given, comm_type, sizes):
    args = argparse.Namespace(context_parallel_size=8, cp_comm_type=["p2p"])
    validate = wrap_validate_args(lambda args, defaults: args, options(**given))
    args = validate(args, {})
    assert (args.cp_comm_type, args.hierarchical_context_parallel_sizes) == ([comm_type], sizes)


def test_megatrons_own_flags_are_understood():
    arguments = {
        "context_parallel_size": 8,
        "cp_comm_type": ["a2a+p2p"] * 2,
        "hierarchical_context_parallel_sizes": [4, 2],
    }
    found = chosen(options(), arguments)
    assert found == ContextOptions(size=8, algo="hybrid_cp_algo", ulysses_degree=4)
    assert found.ring_size == 2
    assert chosen(options(), {}) == ContextOptions(size=1)


def test_megatrons_flag_takes_alibi():
    parser = argparse.ArgumentParser()
    parser.add_argument("--position-embedding-type", choices=["rope", "none"])
    _add_choices(parser, registry())
    given = parser.parse_args(["--position-embedding-type", "alibi"])
    assert given.position_embedding_type == "alibi"
