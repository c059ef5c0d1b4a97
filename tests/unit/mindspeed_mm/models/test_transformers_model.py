"""Models of transformers through TransformersModel: loss, trainable parameters, errors."""

import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed.config import ConfigError, Spelling, build
from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.options import ModelConfig
from mindspeed_mm.models.transformers_model import TransformersModel
from tests.mm import tiny


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("hf")
    return {name: tiny.save(name, root / name) for name in tiny.CONFIGS}


def new(folder, **section):
    values = {"init_from_hf_path": folder, **section}
    return TransformersModel(build(ModelConfig, values, Spelling.KEY))


def trained(model):
    return {name for name, p in model.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("mode", ["default", "chunk", "dynamic_chunk"])
@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_the_loss_equals_transformers(folders, name, mode):
    chunk = {} if mode == "default" else {"chunk_size": 5}
    model = new(folders[name], loss_cfg={"compute_mode": mode, **chunk})
    plain = tiny.new_model(name)
    batch = tiny.batch(name)
    expected = plain(**batch)
    found = model(**batch)
    torch.testing.assert_close(found["loss"], expected.loss, rtol=1e-6, atol=0)
    assert found["token_nums"] == 20
    assert ("logits" in found) == (mode == "default")
    found["loss"].backward()
    expected.loss.backward()
    gradients = {n: p.grad for n, p in model.model.named_parameters()}
    wanted = {n: p.grad for n, p in plain.named_parameters()}
    torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=1e-7)
    del batch["labels"]
    torch.testing.assert_close(model(**batch)["logits"], expected.logits)


CHANGED_LOGITS = {
    "CohereForCausalLM": {"logit_scale": 0.5},
    "GraniteForCausalLM": {"logits_scaling": 2.0},
    "Gemma2ForCausalLM": {"final_logit_softcapping": 5.0, "head_dim": 8},
}


@pytest.mark.parametrize("name", CHANGED_LOGITS)
def test_logits_that_the_model_changes_are_not_chunked(tmp_path, name):
    plain = tiny.save_text(name, tmp_path, **CHANGED_LOGITS[name])
    batch = tiny.text_batch()
    expected = plain(**batch).loss
    found = new(str(tmp_path))(**batch)["loss"]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    for mode in ("chunk", "dynamic_chunk"):
        model = new(str(tmp_path), loss_cfg={"compute_mode": mode})
        message = f"compute_mode: {mode} needs the logits .*, {name} changes them .*: use default"
        with pytest.raises(ConfigError, match=message):
            model(**batch)
        with pytest.raises(ConfigError, match=message), torch.no_grad():
            model.eval()(**batch)


def test_token_losses_may_be_cast(folders):
    model = new(folders["internvl"], loss_cfg={"compute_mode": "chunk", "chunk_size": 5})
    expected = model(**tiny.batch("internvl"))["loss"]
    cast = lambda module, args, output: output.to(torch.float64)  # as FSDP2 does  # noqa: E731
    model.model.lm_head.register_forward_hook(cast)
    found = model(**tiny.batch("internvl"))["loss"]
    torch.testing.assert_close(found, expected.double())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("BartForConditionalGeneration", "has an encoder and a decoder"),
        ("BertForMaskedLM", "has another loss"),
    ],
)
def test_classes_that_do_not_predict_the_next_token_raise(tmp_path, name, message):
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
    tiny.save_text(name, tmp_path, **sizes)
    with pytest.raises(ConfigError, match=f"{name} {message}: models that predict the next token"):
        new(str(tmp_path))


def test_a_class_without_an_output_layer_raises(tmp_path):
    tiny.save_text("LlamaModel", tmp_path)
    with pytest.raises(ConfigError, match="LlamaModel computes no logits: name a class with"):
        new(str(tmp_path))(**tiny.text_batch())


class Rows(TorchDispatchMode):
    """Records the largest number of vocabulary-sized rows of any tensor."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (tiny.VOCABULARY,):
                self.most = max(self.most, tensor.numel() // tiny.VOCABULARY)
        return found


@pytest.mark.parametrize("mode", ["default", "chunk", "dynamic_chunk"])
def test_chunked_modes_never_materialize_all_logits(folders, mode):
    size = {} if mode == "default" else {"chunk_size": 5}
    model = new(folders["qwen2_5_vl"], loss_cfg={"compute_mode": mode, **size})
    with Rows() as rows:
        model(**tiny.batch("qwen2_5_vl", length=40))["loss"].backward()
    # The transposed weight has as many rows as the hidden size; a chunk has fewer.
    assert rows.most == (2 * 40 if mode == "default" else tiny.TEXT["hidden_size"])


def by_hand(logits, labels, kind):
    """Compute a loss sample by sample in float64."""
    sums, counts = [], []
    for row, wanted in zip(logits.double(), labels):
        keep = wanted[1:] != -100
        likely = row[:-1].log_softmax(-1)[keep, wanted[1:][keep]]
        sums.append(-likely.sum())
        counts.append(keep.sum())
    sums, counts = torch.stack(sums), torch.stack(counts).double()
    if kind == "per_sample_loss":
        return (sums / counts).mean()
    if kind == "square_loss":
        return (sums / counts.sqrt()).sum() / counts.sqrt().sum()
    return sums.sum() / counts.sum()


@pytest.mark.parametrize("kind", ["default", "per_token_loss", "per_sample_loss", "square_loss"])
def test_loss_types(folders, kind):
    batch = tiny.batch("internvl")
    batch["labels"][0, :12] = -100
    found = new(folders["internvl"], loss_cfg={"loss_type": kind})(**batch)
    expected = by_hand(found["logits"], batch["labels"], kind)
    torch.testing.assert_close(found["loss"].double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("mode", ["default", "chunk"])
def test_a_batch_without_a_label_has_loss_zero_and_gradients_zero(folders, mode):
    model = new(folders["internvl"], loss_cfg={"compute_mode": mode})
    batch = tiny.batch("internvl")
    batch["labels"].fill_(-100)
    found = model(**batch)
    found["loss"].backward()
    assert found["loss"] == 0 and found["token_nums"] == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


VISION = {"internvl": "model.vision_tower", "llava": "model.vision_tower"}
PROJECTOR = {"internvl": "model.multi_modal_projector", "llava": "model.multi_modal_projector"}


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_freeze_options_of_the_document(folders, name):
    vision = VISION.get(name, "model.visual")
    projectors = (PROJECTOR.get(name, "model.visual.merger"), "model.visual.deepstack_merger")
    every = trained(new(folders[name]))
    vision_params = {n for n in every if n.startswith(vision) and not n.startswith(projectors)}
    projector_params = {n for n in every if n.startswith(projectors)}
    text_params = every - vision_params - projector_params
    assert vision_params and projector_params and text_params
    frozen = {"freeze": True}
    image = {"vision_encoder": frozen}
    assert trained(new(folders[name], image_encoder=image)) == projector_params | text_params
    image = {"vision_encoder": frozen, "vision_projector": frozen}
    assert trained(new(folders[name], image_encoder=image)) == text_params
    assert trained(new(folders[name], text_decoder=frozen)) == vision_params | projector_params
    layers = "model.language_model.layers.{0}"
    left = trained(new(folders[name], freeze=[layers]))
    assert every - left == {n for n in every if n.startswith("model.language_model.layers.0.")}


def test_freeze_options_know_the_names_of_smolvlm(tmp_path):
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8}
    text = {**tiny.TEXT, "model_type": "llama"}
    folder = str(tmp_path)
    tiny.save_text(
        "SmolVLMForConditionalGeneration", folder, vision_config=vision, text_config=text
    )
    frozen = {"freeze": True}
    image = {"vision_encoder": frozen, "vision_projector": frozen}
    left = {name.split(".")[1] for name in trained(new(folder, image_encoder=image))}
    assert left == {"text_model", "weight"}
    left = {name.split(".")[1] for name in trained(new(folder, text_decoder=frozen))}
    assert left == {"vision_model", "connector"}


def test_only_adapters_are_trained_and_their_output_starts_at_zero(folders):
    batch = tiny.batch("internvl")
    plain = new(folders["internvl"])(**batch)["loss"]
    lora = {
        "r": 4,
        "alpha": 8,
        "target_modules": ["q_proj", "model.language_model.layers.{1}.mlp.up_proj"],
    }
    model = new(folders["internvl"], lora=lora)
    assert {n.partition(".lora_")[0].removeprefix("model.") for n in trained(model)} == {
        *(f"language_model.layers.{i}.self_attn.q_proj" for i in (0, 1)),
        *(f"vision_tower.encoder.layer.{i}.attention.q_proj" for i in (0, 1)),
        "language_model.layers.1.mlp.up_proj",
    }
    torch.testing.assert_close(model(**batch)["loss"], plain, rtol=0, atol=0)


def test_an_untied_head_starts_as_the_embedding(tmp_path):
    folder = tiny.save("qwen2_5_vl", tmp_path, tied=True)
    tied, untied = new(folder), new(folder, tie_word_embeddings=False)
    assert tied.model.lm_head.weight is tied.model.get_input_embeddings().weight
    head, embedding = untied.model.lm_head.weight, untied.model.get_input_embeddings().weight
    assert head is not embedding and torch.equal(head, embedding)
    batch = tiny.batch("qwen2_5_vl")
    torch.testing.assert_close(untied(**batch)["loss"], tied(**batch)["loss"])


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"model_id": "internv"}, "model_id: internv is not registered"),
        ({"freeze": ["model.vision_towers"]}, "freeze: .*did you mean vision_tower?"),
        (
            {"lora": {"target_modules": ["q_pro"]}},
            "q_pro matches no linear layer; did you mean q_pr",
        ),
        (
            {"lora": {"target_modules": ["model.vision_tower"]}},
            "model.vision_tower is not a linear",
        ),
        (
            {"lora": {"r": 100_000_000, "target_modules": ["q_proj"]}},
            "lora.r: 100000000: .*q_proj maps 32 to 32 features: give at most 32",
        ),
        ({"loss_cfg": {"router_aux_loss_coef": 0.1}}, "has no experts"),
        ({"loss_cfg": {"chunk_size": 4}}, "chunk_size is for compute_mode"),
        ({"loss_cfg": {"compute_mod": "chunk"}}, "did you mean .*compute_mode?"),
        ({"init_from_hf_path": "nowhere"}, "nowhere/config.json does not exist"),
        ({"init_from_hf_path": None}, "init_from_hf_path is missing"),
        ({"attn_implementation": "no_such"}, "no_such"),
    ],
)
def test_impossible_sections_raise(folders, section, message):
    with pytest.raises(ConfigError, match=message):
        new(folders["internvl"], **section)(**tiny.batch("internvl"))


def test_a_registered_class_is_found_by_its_id(folders, monkeypatch):
    from transformers import InternVLForConditionalGeneration

    monkeypatch.setattr(ModelHub, "MODEL_MAPPINGS", {})

    @ModelHub.register("mine")
    class Mine(InternVLForConditionalGeneration):
        @staticmethod
        def overwrite_transformer_config(config):
            config.projector_hidden_act = "relu"
            return config

        def freeze(self, config):
            self.lm_head.requires_grad_(False)

    model = new(folders["internvl"], model_id="mine")
    assert isinstance(model.model, Mine)
    assert model.model.config.projector_hidden_act == "relu"
    assert "lm_head.weight" not in trained(model)
    with pytest.raises(ConfigError, match="did you mean mine?"):
        new(folders["internvl"], model_id="mines")
    with pytest.raises(ConfigError, match="mine is registered by Mine"):
        ModelHub.register("mine")(dict)


REMOTE = """\
from transformers import InternVLForConditionalGeneration


class ChatModel(InternVLForConditionalGeneration):
    pass
"""


def test_code_of_a_folder_runs_only_if_trusted(tmp_path):
    tiny.save("internvl", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["ChatModel"], "auto_map": {"AutoModel": "modeling_chat.ChatModel"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "modeling_chat.py").write_text(REMOTE)
    with pytest.raises(ConfigError, match="has no ChatModel.*trust_remote_code: true"):
        new(str(tmp_path))
    model = new(str(tmp_path), trust_remote_code=True)
    assert type(model.model).__name__ == "ChatModel"
    expected = tiny.new_model("internvl")(**tiny.batch("internvl")).loss
    torch.testing.assert_close(model(**tiny.batch("internvl"))["loss"], expected)


def test_a_size_mismatch_is_found_before_allocation(tmp_path):
    folder = tiny.save("qwen2_5_vl", tmp_path / "model")
    path = tmp_path / "model/config.json"
    values = json.loads(path.read_text())
    values["text_config"]["intermediate_size"] = 1 << 30  # 128 GiB a matrix
    path.write_text(json.dumps(values))
    with pytest.raises(
        ConfigError, match="has shape .*check that config.json belongs to these weights"
    ):
        new(folder)
