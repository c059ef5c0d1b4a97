"""How the ranks share the work."""

from typing import Literal

from mindspeed.config import Options


class ParallelOptions(Options):
    """The layout and what overlaps; what is left over of the ranks is data parallel."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each layer's matrices."""
    pipeline_model_parallel_size: int = 1
    """Ranks that hold consecutive layers."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers of one of several smaller stages of a pipeline rank."""
    expert_model_parallel_size: int = 1
    """Ranks that share the experts of a layer."""
    sequence_parallel: bool = False
    """Tensor-parallel ranks also share the activations between matrices."""
    use_distributed_optimizer: bool = False
    """Data-parallel ranks share the optimizer's state."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass runs."""
    overlap_param_gather: bool = False
    """Gather updated weights while the next forward pass runs."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """What is computed again in the backward pass: whole layers or attention only."""
    recompute_method: Literal["uniform", "block"] | None = None
    """Which layers, for full recomputation."""
    recompute_num_layers: int | None = None
    """How many layers, for full recomputation."""
    recompute_activations: bool = False
    """The same as --recompute-granularity selective."""
    no_gradient_accumulation_fusion: bool = False
    """Add the gradients of weights in a step of its own."""
    no_bias_swiglu_fusion: bool = False
    """Compute SwiGLU by separate operations."""
    no_bias_dropout_fusion: bool = False
    """Add the residual by separate operations."""
    distributed_timeout_minutes: int = 10
    """How long ranks wait for each other."""
