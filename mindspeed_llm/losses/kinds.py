"""Names of the variants of losses, for options: importing them does not import torch."""

from typing import Literal

DpoLoss = Literal["sigmoid", "hinge", "ipo", "kto_pair"]
SimpoLoss = Literal["sigmoid", "hinge", "ipo"]
GrpoLoss = Literal["grpo", "dr_grpo", "dapo"]
RatioLevel = Literal["token", "sequence"]
