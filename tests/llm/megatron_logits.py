"""The logits of Megatron's GPTModel with weights from any directory, in any layout."""

import inspect

import torch

from tests.llm.tiny import TOKENS


def all_logits(cases):
    """Run several cases one after the other in the same ranks."""
    return [megatron_logits(**case) for case in cases]


def megatron_logits(source, config_folder, impl="local", tp=1, pp=1, ep=1, **options):
    """Run TOKENS through the pipeline; return all logits on the last stage, else nothing.

    Options: tokens, and those of loaded_model.
    """
    tokens = options.pop("tokens", TOKENS)
    models, shape = loaded_model(source, config_folder, impl, tp, pp, ep, **options)
    with torch.no_grad():
        output = _pipeline(models, tokens, pp, models[0].config)
    return None if output is None else output[..., : shape.vocab_size]


def loaded_model(source, config_folder, impl="local", tp=1, pp=1, ep=1, **options):
    """Build this rank's chunks, load them, and return them with the model's shape.

    Options: vocab_size, layers_per_chunk, etp, noop_layers, grouped, further (with the layers of
    multi-token prediction that config.json names).
    """
    from pathlib import Path

    from megatron.core import parallel_state, tensor_parallel

    import mindspeed
    from mindspeed_llm.checkpoint.loading import load_weights
    from mindspeed_llm.models.megatron import transformer_config
    from mindspeed_llm.models.registry import read_model_config

    noops = options.get("noop_layers", ())
    if noops:
        mindspeed.enable(noop_layers=noops)
    further = options.get("further", False)
    shape = read_model_config(Path(config_folder), from_scratch=further)
    per_chunk = options.get("layers_per_chunk")
    chunks = (shape.num_layers + len(noops)) // pp // per_chunk if per_chunk else None
    sizes = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": chunks,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": options.get("etp"),
    }
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = transformer_config(
        shape,
        noop_layers=noops,
        **sizes,
        sequence_parallel=tp > 1 and shape.moe is not None,
        pipeline_dtype=torch.float32,
        moe_grouped_gemm=options.get("grouped", False),
        moe_token_dispatcher_type="allgather",  # gloo gathers no parts of unequal size
    )
    vocabulary = options.get("vocab_size") or -(-shape.vocab_size // tp) * tp
    models = [
        _build(shape, config, impl, vocabulary, None if chunks is None else stage)
        for stage in range(chunks or 1)
    ]
    load_weights(models, source, config=shape, noop_layers=noops)
    return models, shape


def _build(shape, config, impl, vocabulary, stage):
    from megatron.core import parallel_state

    from mindspeed_llm.models.megatron import gpt_model

    if stage is not None:
        parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
    where = {"ignore_virtual": False}
    if "vp_stage" in inspect.signature(parallel_state.is_pipeline_first_stage).parameters:
        where["vp_stage"] = stage
    return gpt_model(
        shape,
        config,
        impl=impl,
        vocab_size=vocabulary,
        vp_stage=stage,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
    ).eval()


def _pipeline(models, tokens, pp, config):
    """Pass hidden states from stage to stage by hand, chunk after chunk."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    before = parallel_state.get_pipeline_model_parallel_prev_rank() if pp > 1 else None
    after = parallel_state.get_pipeline_model_parallel_next_rank() if pp > 1 else None
    length = tokens.shape[1]
    if config.sequence_parallel:
        length //= config.tensor_model_parallel_size
    positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1]).triu(1).bool()
    output = None
    for model in models:
        if not model.pre_process:
            hidden = torch.empty(length, len(tokens), config.hidden_size)
            torch.distributed.recv(hidden, before)
            model.set_input_tensor(hidden)
        output = model(tokens, positions, mask)
        if not model.post_process:
            torch.distributed.send(output.contiguous(), after)
            output = None
    return None if output is None else gather_from_tensor_model_parallel_region(output)
