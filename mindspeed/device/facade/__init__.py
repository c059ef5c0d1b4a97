"""The cpu facade: what Megatron says to torch.cuda lands on the cpu while this is installed."""

from mindspeed.device.facade.install import Facade

__all__ = ["Facade"]
