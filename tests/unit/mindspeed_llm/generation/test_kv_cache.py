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


def test_tables_are_the_rotation_of_every_position():
    """With the factor of YaRN; they are made once, as a recorded step reads them too."""
    cache, key = KVCache(1, 5), torch.zeros(1, 1, 2, 4)
    assert cache.rotary_tables(1.5, key.dtype) is None
    angles = torch.rand(8, 1, 1, 2).repeat(1, 1, 1, 2)
    cache.rotation(angles, 1.5, key)
    cosines, sines = cache.rotary_tables(1.5, key.dtype)
    assert cosines.shape == sines.shape == (5, 4)
    for position in range(5):
        cache.go_to(torch.tensor([position]))
        cosine, signed_sine = cache.rotation(angles, 1.5, key)
        assert torch.equal(cosines[position], cosine.flatten())
        assert torch.equal(sines[position, 2:], signed_sine.flatten()[2:])
        assert torch.equal(sines[position, :2], -signed_sine.flatten()[:2])
    cache.restart()
    cache.rotation(2 * angles, 1.5, key)
    assert cache.rotary_tables(1.5, key.dtype)[0] is cosines
