"""The one import: `import mindspeed.megatron_adaptor` under `import torch`."""

from mindspeed import device

device.current().facade().__enter__()
