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
    head_size: int
    num_experts: int = 0
    top_k: int = 1
    """Experts of a token; `ffn` is the width of one."""

    @property
    def attention_width(self):
        """Return the width of all heads."""
        return self.heads * self.head_size

    @property
    def matrix_parameters(self):
        """Count the weights that multiply a token, the output layer included."""
        qkv = self.hidden * (self.heads + 2 * self.kv_heads) * self.head_size
        mlp = 3 * self.hidden * self.ffn * self.top_k + self.hidden * self.num_experts
        layer = qkv + self.attention_width * self.hidden + mlp
        return self.layers * layer + self.hidden * self.vocabulary

    @property
    def flops_per_token(self):
        """Count forward and backward; causal attention computes half of the square."""
        attention = 6 * self.layers * self.attention_width * self.sequence
        return 6 * self.matrix_parameters + attention


SHAPES = {
    "qwen2.5-1.5b": Shape(28, 1536, 12, 2, 8960, 151936, 4096, True, True, 128),
    "llama3-8b": Shape(32, 4096, 32, 8, 14336, 128256, 8192, False, False, 128),
    # 16 of its 48 layers: what fits one device with gradients.
    "qwen3-30b-a3b": Shape(16, 2048, 32, 4, 768, 151936, 4096, False, False, 128, 128, 8),
    # Qwen3's kind of attention at OLMoE's sizes: OLMoE norms all heads of a token together.
    "olmoe-7b": Shape(16, 2048, 16, 16, 1024, 50304, 4096, False, False, 128, 64, 8),
    "smollm2-135m": Shape(30, 576, 9, 3, 1536, 49152, 256, True, False, 64),
    "tiny": Shape(2, 128, 4, 2, 256, 512, 64, True, True, 32),
    "tiny-moe": Shape(2, 128, 4, 2, 64, 512, 64, True, False, 32, 4, 2),
}
