"""The benchmarked model shapes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A Llama-like decoder and the length of its sequences."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    sequence: int
    is_tied: bool
    has_qkv_bias: bool

    @property
    def head_size(self):
        """Return the width of one head."""
        return self.hidden // self.heads

    @property
    def matrix_parameters(self):
        """Count the weights that multiply activations, the output layer included."""
        qkv = self.hidden * (self.heads + 2 * self.kv_heads) * self.head_size
        layer = qkv + self.hidden * self.hidden + 3 * self.hidden * self.ffn
        return self.layers * layer + self.hidden * self.vocabulary

    @property
    def flops_per_token(self):
        """Count forward and backward; causal attention computes half of the square."""
        attention = 6 * self.layers * self.hidden * self.sequence
        return 6 * self.matrix_parameters + attention


SHAPES = {
    "qwen2.5-1.5b": Shape(28, 1536, 12, 2, 8960, 151936, 4096, True, True),
    "llama3-8b": Shape(32, 4096, 32, 8, 14336, 128256, 8192, False, False),
    "smollm2-135m": Shape(30, 576, 9, 3, 1536, 49152, 256, True, False),
    "tiny": Shape(2, 128, 4, 2, 256, 512, 64, True, True),
}
