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
    """Directory that is read."""
    save_dir: str = ""
    """Directory that is written. In an HF model from elsewhere, hf goes to its folder mg2hf."""
    model_type_hf: str | None = None
    """Family of the model. Its config.json knows better; this counts where that is silent."""
    hf_cfg_dir: str | None = None
    """HF directory with the config.json and tokenizer of an mg checkpoint that came without."""
    params_dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """Type of the weights that are written; without it they keep the type they have."""
    target_tensor_parallel_size: int = 1
    """Ranks that share each layer."""
    target_pipeline_parallel_size: int = 1
    """Stages that share the layers."""
    target_expert_parallel_size: int = 1
    """Ranks that share the experts of a layer."""
    expert_tensor_parallel_size: int | None = None
    """Ranks that share each expert; without it as many as share a layer."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers of a virtual stage; without it a stage is one piece."""
    num_layer_list: Annotated[tuple[int, ...], CommaSeparated] = ()
    """Layers of each pipeline stage, where they differ."""
    noop_layers: Annotated[tuple[int, ...], CommaSeparated] = ()
    """Layers that do nothing, by their number in the model that has them. Reading an mg checkpoint
    of somebody else, the layers it was written with."""
    make_vocab_size_divisible_by: int = 1
    """The embedding gets copies of its last row until this times the tensor parallel size
    divides it."""
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """Whose names mg weights get: those of Megatron's local or transformer_engine layer specs."""
    moe_grouped_gemm: bool = False
    """Write all experts of a rank together, as layers with grouped GEMM have them."""
    join_mla_down_proj: bool = False
    """Write the down projections of latent attention as one linear_qkv, as MindSpeed-LLM does."""
    no_verify: bool = False
    """Do not compare what is read with the digests that were written beside it."""
    check_finite: bool = False
    """Refuse weights that hold NaN or infinity."""
    overwrite: bool = False
    """Replace an earlier conversion in --save-dir; anything else there is left alone."""
    use_mcore_models: bool = True
    """Accepted, always on."""
    model_type: Literal["GPT"] = "GPT"
    """Accepted: there is only GPT."""
    add_qkv_bias: bool = False
    """Not needed: biases are found from the weights. Refused if the model has none there."""
    add_dense_bias: bool = False
    """Not needed: biases are found from the weights. Refused if the model has none there."""
    untie_embeddings_and_output_weights: bool = False
    """Not needed: the config tells. Refused if the model's output layer is its embedding."""
    tokenizer_model: str | None = None
    """Accepted, not needed: the tokenizer is copied from where the config is."""
    vocab_file: str | None = None
    """Accepted, not needed."""
    megatron_path: str | None = None
    """Accepted, not needed: nothing of Megatron runs."""
    loader: str | None = None
    """Accepted, not needed."""
    saver: str | None = None
    """Accepted, not needed."""
    spec: tuple[str, ...] = ()
    """Accepted, not needed: the family knows its layers."""
    ckpt_cfg_path: str | None = None
    """Accepted, not needed: weight names are part of the families."""
    ckpt_format: Literal["torch"] = "torch"
    """Accepted: mg is written as one torch file a rank; what is read is found out."""
    max_queue_size: int | None = None
    """Accepted, not needed: there is no queue."""
    no_checking: bool = False
    """Accepted; the checks stay on."""
