import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mindspeed_mm.models.common.module import MultiModalModule
from mindspeed_mm.models.transformers.base_model import FSDP2Mixin, WeightInitMixin
from mindspeed_mm.training import get_args, move_to_device, pretrain


# These three names are all that is new.
class CustomModel(MultiModalModule, FSDP2Mixin, WeightInitMixin):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def model_provider(*args, **kwargs):
    return CustomModel()


def train_valid_test_datasets_provider():
    x = torch.randn(256, 32)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    size = get_args().micro_batch_size
    return DataLoader(data, batch_size=size, shuffle=True), DataLoader(data, batch_size=size), None


def get_batch(data_iterator):
    return move_to_device(next(data_iterator), get_args().params_dtype)


def loss_func(output_tensor):
    prediction, target = output_tensor
    return (prediction - target).square().mean()


def forward_step(data_iterator, model):
    x, target = get_batch(data_iterator)
    return (model(x), target), loss_func


if __name__ == "__main__":
    pretrain(train_valid_test_datasets_provider, model_provider, forward_step)
