"""A small diffusion transformer with a loss of its own: plain torch, plus two mixins."""

import math

import torch
from torch import nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention

from mindspeed_mm.models.common.module import MultiModalModule
from mindspeed_mm.models.transformers.base_model import FSDP2Mixin, WeightInitMixin


class Block(nn.Module):
    """Attention and MLP with scale and shift from the timestep embedding."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.modulation = nn.Linear(width, 4 * width)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Return x plus the outputs of attention and MLP."""
        shift1, scale1, shift2, scale2 = self.modulation(time)[:, None].chunk(4, -1)
        normed = self.attention_norm(x) * (1 + scale1) + shift1
        q, k, v = self.qkv(normed).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x) * (1 + scale2) + shift2)


class DiffusionTransformer(MultiModalModule, FSDP2Mixin, WeightInitMixin):
    """Predicts the velocity from noise to images (flow matching)."""

    def __init__(self, side: int = 16, patch: int = 4, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(3 * patch * patch, width)
        self.positions = nn.Parameter(torch.zeros((side // patch) ** 2, width))
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width, heads=4) for _ in range(depth))
        self.head = nn.Linear(width, 3 * patch * patch)
        steps = torch.arange(width // 2) / (width // 2)
        self.register_buffer("frequencies", torch.exp(-math.log(1000) * steps), persistent=False)

    def forward(
        self, images: torch.Tensor, noise: torch.Tensor, timestep: torch.Tensor
    ) -> torch.Tensor:
        """Return the loss: the squared error of the velocity of the straight path to the image."""
        images, noise = (self._patchify(x) for x in (images, noise))
        weight = timestep[:, None, None]
        mixed = weight * images + (1 - weight) * noise
        angles = 1000 * timestep[:, None] * self.frequencies
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1).to(mixed.dtype))
        x = self.embed(mixed) + self.positions
        for block in self.blocks:
            x = block(x, time)
        return mse_loss(self.head(x).float(), (images - noise).float())

    def _patchify(self, x: torch.Tensor) -> torch.Tensor:
        """Split images (B, 3, H, W) into patches (B, N, 3 * patch * patch)."""
        x = x.unfold(2, self.patch, self.patch).unfold(3, self.patch, self.patch)
        return x.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
