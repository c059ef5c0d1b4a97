"""The KV cache: what a recorded step reads stays where it is."""

import torch

import mindspeed.megatron_adaptor  # noqa: F401
from mindspeed_llm.generation.inference import KVCache


def test_one_table_of_angles_is_read_by_all_calls():
    """A recorded step reads it by its address, so no other may take its place."""
    cache, key = KVCache(1, 8), torch.zeros(1, 1, 2, 4)
    tables = [torch.full((8, 1, 1, 4), angle) for angle in (0.1, 0.2)]
    for table in tables:
        cache.restart()
        cosine, _ = cache.rotation(table, 1.0, key)
        assert torch.equal(cosine, tables[0][:1].cos())
        cache.go_to(torch.tensor([3]))
        cosine, _ = cache.rotation(table, 1.0, key)
        assert torch.equal(cosine, tables[0][3:4].cos())
