"""Every operator on the GPU: the numbers of the cpu, none left unwritten, and a whole graph."""

import pytest
import torch

from mindspeed import device
from tests.unit.ops.exported_calls import CALLS, compare, find, results
from tests.unit.ops.traced_kernels import targets

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    if device.current().name != "cuda":
        yield
        return
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def poisoned():
    """Let torch fill what it allocates with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", CALLS)
def test_it_equals_the_cpu(name, poisoned):
    call = CALLS[name]()
    want = results(find(name), call)
    for _ in range(2):
        got = results(find(name), call, "cuda")
        torch.testing.assert_close([x.cpu() for x in got], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", targets())
def test_it_compiles(name):
    torch._dynamo.reset()
    compare(find(name), CALLS[name](), fullgraph=True, device="cuda")
