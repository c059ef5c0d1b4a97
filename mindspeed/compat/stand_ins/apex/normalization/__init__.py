"""Layer norms of the apex stand-in."""

from mindspeed.compat.stand_ins.apex.normalization.fused_layer_norm import MixedFusedLayerNorm

__all__ = ["MixedFusedLayerNorm"]
