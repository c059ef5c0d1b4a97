"""The cpu facade: Megatron's calls of torch.cuda run on the cpu while this is installed."""

from mindspeed.device.facade.install import Facade

__all__ = ["Facade"]
