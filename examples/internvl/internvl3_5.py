"""Step 1 of 3: make a third-party model trainable with FSDP2 by inheriting the mixins."""

from transformers import InternVLForConditionalGeneration

from mindspeed_mm.models.transformers.base_model import FSDP2Mixin, WeightInitMixin


class InternVLChatModelGeneration(InternVLForConditionalGeneration, FSDP2Mixin, WeightInitMixin):
    """InternVL for FSDP2."""
