"""GEMMs in slices, overlapped with the communication of the previous slice."""

from mindspeed.ops.lcal_coc.reference import CocOps, coc_ops

__all__ = ["CocOps", "coc_ops"]
