"""A model with no-op layers is the model without them, bit for bit."""

import pytest
import torch

import mindspeed
from tests.ranks import RankFailed, run_ranks

SEQUENCE, BATCH, VOCABULARY = 8, 2, 32
RECOMPUTE = {"recompute_granularity": "full", "recompute_num_layers": 1}


def build(num_layers, stages=1, use_te=False, **config):
    """Build the part of a small GPT that this rank holds."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)
    tensor_parallel.model_parallel_cuda_manual_seed(11)
    torch.manual_seed(11)
    spec = get_gpt_layer_with_transformer_engine_spec if use_te else get_gpt_layer_local_spec
    return GPTModel(
        config=TransformerConfig(
            num_layers=num_layers,
            hidden_size=16,
            num_attention_heads=2,
            use_cpu_initialization=True,
            pipeline_model_parallel_size=stages,
            pipeline_dtype=torch.float32,
            **config,
        ),
        transformer_layer_spec=spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )


def copy_weights(plain, longer, noops, first=0):
    """Give the layers that are left, which begin at number `first`, the weights of plain's."""
    held = range(first, first + len(longer.decoder.layers))
    total = len(plain.decoder.layers) + len(noops)
    left = [number for number in range(total) if number not in noops]
    renamed = {}
    for name, tensor in plain.state_dict().items():
        words = name.split(".")
        if name.startswith("decoder.layers."):
            number = left[int(words[2])]
            if number not in held:
                continue
            words[2] = str(number - first)
        renamed[".".join(words)] = tensor
    wanted = longer.state_dict().keys()
    longer.load_state_dict({name: renamed[name] for name in wanted})


def batch():
    tokens = torch.arange(BATCH * SEQUENCE).reshape(BATCH, SEQUENCE) % VOCABULARY
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
    return {"input_ids": tokens, "position_ids": positions, "attention_mask": mask}


def loss_and_gradients(model):
    """Run one batch with dropout, from the same random state every time."""
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(23)
    torch.manual_seed(23)
    loss = model(**batch(), labels=batch()["input_ids"].roll(1, -1)).mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def with_and_without(noops, use_te, config):
    plain = build(4, use_te=use_te, **config)
    mindspeed.enable(noop_layers=noops)
    longer = build(4 + len(noops), use_te=use_te, **config)
    copy_weights(plain, longer, noops)
    expected, found = loss_and_gradients(plain), loss_and_gradients(longer)
    assert len(expected) == len(found) > 10
    assert all(gradient.any() for gradient in expected[1:])
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("use_te", [False, True], ids=["local", "te"])
@pytest.mark.parametrize(
    "noops, config",
    [
        ((0,), {}),
        ((2, 5), {}),
        ((1, 4), {**RECOMPUTE, "recompute_method": "uniform"}),
        ((0, 3), {**RECOMPUTE, "recompute_method": "block", "recompute_num_layers": 3}),
    ],
    ids=["first", "middle_and_last", "recompute_uniform", "recompute_block"],
)
def test_bitwise_equal_to_the_model_without_them(use_te, noops, config):
    run_ranks(with_and_without, 1, noops, use_te, config)


def pipeline_of_noops(noops):
    """Run two stages, one of which may hold no-ops only; return the loss and the expected one."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    quiet = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    plain = build(2, **quiet)
    expected = loss_and_gradients(plain)[0]
    mindspeed.enable(noop_layers=noops)
    stage = build(4, stages=2, **quiet)
    first = 2 * parallel_state.get_pipeline_model_parallel_rank()
    copy_weights(plain, stage, noops, first)
    assert [layer.layer_number for layer in stage.decoder.layers] == [first + 1, first + 2]

    def forward(_, model):
        output = model(**batch(), labels=batch()["input_ids"].roll(1, -1))
        return output, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})

    results = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=None,
        model=[stage],
        num_microbatches=2,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    assert all(parameter.grad is not None for parameter in stage.parameters())
    return [result["loss"].item() for result in results], expected.item()


@pytest.mark.parametrize("noops", [(0, 1), (2, 3), (0, 3)], ids=str)
def test_a_pipeline_stage_of_noops(noops):
    (_, expected), (losses, _) = run_ranks(pipeline_of_noops, 2, noops)
    assert losses == [expected, expected]


def save_and_load(noops, folder):
    from megatron.core import dist_checkpointing

    mindspeed.enable(noop_layers=noops)
    model = build(5)
    saved = {
        name: tensor.clone() for name, tensor in model.state_dict().items() if tensor is not None
    }
    dist_checkpointing.save(model.sharded_state_dict(prefix="model."), folder)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    loaded = dist_checkpointing.load(model.sharded_state_dict(prefix="model."), folder)
    model.load_state_dict({name.removeprefix("model."): value for name, value in loaded.items()})
    found = model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())
    return sorted({int(name.split(".")[2]) for name in saved if name.startswith("decoder.layers.")})


def test_distributed_checkpoint_leaves_the_noops_out(tmp_path):
    assert run_ranks(save_and_load, 1, (1, 3), str(tmp_path)) == [[0, 2, 4]]


def build_with_missing_layer():
    mindspeed.enable(noop_layers="0,7")
    build(4)


def test_layer_that_does_not_exist():
    with pytest.raises(
        RankFailed, match="noop_layers names layer 7, but num_layers=4 allows 0 to 3"
    ):
        run_ranks(build_with_missing_layer, 1)
