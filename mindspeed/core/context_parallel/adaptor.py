"""The attention that ms-swift names for context parallelism: that of Megatron's TE spec."""

from megatron.core.extensions.transformer_engine import TEDotProductAttention

__all__ = ["MindSpeedCPDotProductAttention"]

MindSpeedCPDotProductAttention = TEDotProductAttention
