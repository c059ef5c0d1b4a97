"""Rows that only pad the vocabulary are no tokens, in a part of the logits and in all of them."""

import torch

from tests.ranks import run_ranks

VOCABULARY, PADDED, HIDDEN = 10, 16, 8


@torch.no_grad()
def _hidden_rows(tp: int) -> list[list[int]]:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from mindspeed_llm.core.models.gpt.gpt_model import GPTModel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, tensor_model_parallel_size=tp
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), PADDED, 4, parallel_output=True)
    model.hide_padding(VOCABULARY)
    tokens = torch.tensor([[1, 2, 3]])
    mask = torch.ones(1, 1, 3, 3).triu(1).bool()
    found = []
    for gathers in (False, True):
        logits = model(tokens, tokens, mask, runtime_gather_output=gathers)
        lowest = logits == torch.finfo(logits.dtype).min
        assert torch.equal(lowest, lowest[:1, :1].expand_as(lowest))
        found.append(lowest[0, 0].nonzero().flatten().tolist())
    return found


def test_padding_is_hidden_from_the_softmax():
    whole = list(range(VOCABULARY, PADDED))
    assert run_ranks(_hidden_rows, 1, 1) == [[whole, whole]]
    # Each of two ranks has eight rows: all of the first rank's are tokens, two of the second's.
    assert run_ranks(_hidden_rows, 2, 2) == [[[], whole], [list(range(2, 8)), whole]]
