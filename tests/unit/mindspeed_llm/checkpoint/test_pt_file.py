"""Files written a block at a time are files of torch.save."""

import zipfile

import pytest
import torch

from mindspeed_llm.checkpoint import pt_file
from mindspeed_llm.checkpoint.pt_file import PtTensor, read_pt, write_pt

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("large", [1 << 30, 8], ids=["32_bit_sizes", "64_bit_sizes"])
def test_what_torch_loads(tmp_path, monkeypatch, large):
    monkeypatch.setattr(pt_file, "LARGE", large)
    tensors = [torch.randn(5, 7).to(dtype) for dtype in DTYPES] + [
        torch.randn(3),
        torch.zeros(0, 4),
    ]
    places = {PtTensor(t.dtype, tuple(t.shape)): t for t in tensors}
    values = {"model": {str(i): place for i, place in enumerate(places)}, "iteration": 1, "v": 3.0}

    def blocks(place):
        data = places[place].contiguous().view(-1).view(torch.uint8).numpy()
        yield memoryview(data[:3])
        yield memoryview(data[3:])

    path = tmp_path / "x.pt"
    with path.open("wb") as file:
        write_pt(file, values, blocks)
    for mmap in (False, True):
        loaded = torch.load(path, weights_only=True, mmap=mmap)
        assert loaded["iteration"] == 1 and loaded["v"] == 3.0
        for number, tensor in enumerate(tensors):
            found = loaded["model"][str(number)]
            assert found.dtype == tensor.dtype and torch.equal(found, tensor)
            assert not mmap or found.numel() == 0 or found.data_ptr() % 64 == 0
    assert read_pt(path).keys() == values.keys()
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
