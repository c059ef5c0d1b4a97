"""The kernels that Megatron's fused softmax asks apex for: one module for each of its three."""
