"""Options of a conversion."""

from typing import Annotated, Literal

from pydantic import ConfigDict

from mindspeed.config import CommaSeparated, Options


class ConvertOptions(Options):
    """Where the weights come from, where they go and in which layout."""

    model_config = ConfigDict(protected_namespaces=())  # pydantic keeps "model_" for itself

    load_model_type: Literal["hf", "mg"] = "hf"
    """What is read: hf is an HF directory, mg a Megatron checkpoint of any layout."""
    save_model_type: Literal["hf", "mg"] = "mg"
    """What is written: hf is an HF directory, mg an mcore checkpoint."""
    load_dir: str = ""
    """Input directory."""
    save_dir: str = ""
    """Output directory. If it holds an original HF model, hf is written to its subfolder mg2hf."""
    model_type_hf: str | None = None
    """Model family, for a config.json that does not name it."""
    hf_cfg_dir: str | None = None
    """HF directory with config.json and tokenizer, for an mg checkpoint without them."""
    model_role: str | None = None
    """Which model of a training checkpoint: critic for that of --stage trl_ppo (default: the one
    that --load named)."""
    params_dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """Dtype of the output; default: that of the input."""
    target_tensor_parallel_size: int = 1
    """Tensor-parallel size of the output."""
    target_pipeline_parallel_size: int = 1
    """Pipeline-parallel size of the output."""
    target_expert_parallel_size: int = 1
    """Expert-parallel size of the output."""
    expert_tensor_parallel_size: int | None = None
    """Tensor-parallel size of experts; default: --target-tensor-parallel-size."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers per virtual pipeline stage; default: no virtual stages."""
    num_layer_list: Annotated[tuple[int, ...], CommaSeparated] = ()
    """Number of layers in each pipeline stage, for uneven stages."""
    noop_layers: Annotated[tuple[int, ...], CommaSeparated] = ()
    """Indices of no-op layers in the longer model. For an mg input that does not record them, those
    it was written with."""
    make_vocab_size_divisible_by: int = 1
    """Pad the embedding with copies of its last row to a multiple of this times the tensor-parallel
    size."""
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """Weight names of mg: those of Megatron's local or transformer_engine layer specs."""
    moe_grouped_gemm: bool = False
    """Write the experts of a rank as one tensor, as grouped-GEMM layers store them."""
    hf_experts: Literal["each", "fused"] = "each"
    """Experts of hf output: one tensor for each projection of each expert, as models are published,
    or fused in one for all experts of a layer, as transformers 5 has them; input has either."""
    join_mla_down_proj: bool = False
    """Write the down projections of latent attention as one linear_qkv, as MindSpeed-LLM does."""
    no_verify: bool = False
    """Do not verify the input against its digests."""
    check_finite: bool = False
    """Reject weights that contain NaN or infinity."""
    overwrite: bool = False
    """Replace an earlier conversion in --save-dir, and nothing else."""
    use_mcore_models: bool = True
    """Accepted without effect: always on."""
    model_type: Literal["GPT"] = "GPT"
    """Accepted without effect: GPT is the only type."""
    add_qkv_bias: bool = False
    """Not needed: biases are detected from the weights. Rejected if the model has none."""
    add_dense_bias: bool = False
    """Not needed: biases are detected from the weights. Rejected if the model has none."""
    untie_embeddings_and_output_weights: bool = False
    """Not needed: read from config.json. Rejected if the model ties its output layer to
    its embedding."""
    tokenizer_model: str | None = None
    """Accepted without effect: the tokenizer is copied together with config.json."""
    vocab_file: str | None = None
    """Accepted without effect."""
    megatron_path: str | None = None
    """Accepted without effect: conversion does not import Megatron."""
    loader: str | None = None
    """Accepted without effect."""
    saver: str | None = None
    """Accepted without effect."""
    spec: tuple[str, ...] = ()
    """Accepted without effect: the family defines the layers."""
    ckpt_cfg_path: str | None = None
    """Accepted without effect: the family defines the weight names."""
    ckpt_format: Literal["torch"] = "torch"
    """Accepted without effect: mg is written as one torch file per rank; the input format is
    detected."""
    max_queue_size: int | None = None
    """Accepted without effect: there is no queue."""
    no_checking: bool = False
    """Accepted without effect: checks are always on."""
