"""A model of two streams, text in float32 and images in bfloat16, in pipeline stages."""

import torch
from megatron.core.enums import ModelType
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.module import MegatronModule

from mindspeed.parallel.pipeline.stage_tensors import TensorSpec

TEXT, IMAGE, BATCH, BLOCKS = 8, 6, 2, 4
LENGTHS = (7, 13, 5, 9)


class Block(torch.nn.Module):
    """Both streams go on, images into the text as well; `grow` makes the text wider.

    With `linear` the text is multiplied by Megatron's function for local layers.
    """

    def __init__(self, number: int, grow: int, linear: bool = False) -> None:
        super().__init__()
        self.linear = linear
        generator = torch.Generator().manual_seed(number)
        self.number = number
        self.wide = TEXT + grow * number

        def weight(rows: int, columns: int, dtype: torch.dtype) -> torch.nn.Parameter:
            values = torch.randn(rows, columns, generator=generator) * 0.3
            return torch.nn.Parameter(values.to(dtype))

        self.text = weight(self.wide + grow, self.wide, torch.float32)
        self.image = weight(IMAGE, IMAGE, torch.bfloat16)
        self.cross = weight(self.wide + grow, IMAGE, torch.float32)

    def multiply(self, text):
        if not self.linear:
            return text @ self.text.t()
        return layers.linear_with_grad_accumulation_and_async_allreduce(
            input=text,
            weight=self.text,
            bias=None,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=False,
            sequence_parallel=False,
        )

    def forward(self, text, image, places):
        if self.number == BLOCKS - 1:  # nothing reads the images any more: they have no gradient
            return torch.tanh(self.multiply(text)), image, places
        image = torch.tanh(image @ self.image.t())
        # The square saves the image, which is an output as well.
        seen = image.square().float().mean(0, keepdim=True) @ self.cross.t()
        text = torch.tanh(self.multiply(text)) + seen + places.unsqueeze(-1) * 0.01
        return text, image, places


class Stage(MegatronModule):
    """Consecutive blocks; the last one of the model ends in the loss."""

    def __init__(self, config, blocks, is_first, is_last, grow=0, varies=False, linear=False):
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        self.blocks = torch.nn.ModuleList(Block(number, grow, linear) for number in blocks)
        self.is_first, self.is_last = is_first, is_last
        self.varies = varies
        self.input_tensor = None

    def output_specs(self):
        """What the next stage gets: text, image and the places of the text."""
        length = None if self.varies else LENGTHS[0]
        last = self.blocks[-1]
        return [
            TensorSpec((length, BATCH, len(last.text)), torch.float32),
            TensorSpec((4, BATCH, IMAGE), torch.bfloat16),
            TensorSpec((length, BATCH), torch.int64),
        ]

    def set_input_tensor(self, input_tensor):
        self.input_tensor = input_tensor[0]

    def forward(self, batch):
        streams = batch if self.is_first else self.input_tensor
        for block in self.blocks:
            streams = block(*streams)
        if self.is_last:
            return streams[0].square().mean()
        return streams


class TextStage(Stage):
    """The stream of text alone, which Megatron knows how to hand on."""

    output_specs = None

    def forward(self, batch):
        text = batch[0] if self.is_first else self.input_tensor
        for block in self.blocks:
            text = torch.tanh(text @ block.text.t())
        return text.square().mean() if self.is_last else text


def batches(lengths):
    """Return text, image and places of each micro-batch."""
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(length, BATCH, TEXT, generator=generator),
            torch.randn(4, BATCH, IMAGE, generator=generator).bfloat16(),
            torch.arange(length).unsqueeze(1).expand(length, BATCH).contiguous(),
        )
        for length in lengths
    ]


def expected(lengths, grow, is_text):
    """Return losses and gradients of the whole model by torch alone."""
    blocks = [Block(number, grow) for number in range(BLOCKS)]
    losses = []
    for streams in batches(lengths):
        for block in blocks:
            if is_text:
                streams = (torch.tanh(streams[0] @ block.text.t()),)
            else:
                streams = block(*streams)
        loss = streams[0].square().mean()
        (loss / len(lengths)).backward()
        losses.append(loss.item())
    return losses, [[p.grad for p in block.parameters()] for block in blocks]
