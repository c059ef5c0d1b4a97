"""Products in slices whose communication is in flight while the next slice is multiplied."""

from mindspeed.ops.lcal_coc.reference import CocOps, coc_ops

__all__ = ["CocOps", "coc_ops"]
