"""Flags, one YAML file, or both; what cannot work is one clear line before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindspeed.config import ConfigError, Options
from mindspeed.fsdp import FsdpOptions
from mindspeed_mm.models.options import ModelConfig
from mindspeed_mm.training.arguments import Run, Schema, parse
from mindspeed_mm.training.profile import ToolConfig

NEEDED = ["--lr", "1e-4", "--train-iters", "5"]


class Own(Options):
    """A section of the user's own."""

    width: int = 1
    """Something."""


def write(folder: Path, name: str, content: Any) -> str:
    path = folder / name
    text = json.dumps(content) if name.endswith("json") else yaml.safe_dump(content)
    path.write_text(text)
    return str(path)


def test_the_launch_flags_of_the_document(tmp_path: Path) -> None:
    fsdp = write(tmp_path, "fsdp2_config.yaml", {"sharding_size": "auto", "param_dtype": "bf16"})
    model = write(tmp_path, "model.json", {"init_from_hf_path": "folder", "freeze": ["a.{*}"]})
    argv = ["--use-torch-fsdp2", "--fsdp2-config-path", fsdp, "--ckpt-format", "torch_dcp"]
    argv += ["--untie-embeddings-and-output-weights", "--mm-model", model]
    run = parse([*argv, *NEEDED, "--distributed-backend", "npu:hccl,cpu:gloo"])
    assert run.fsdp.sharding_size == "auto" and run.fsdp.param_dtype == "bf16"
    assert run.mm.model.freeze == ("a.{*}",) and run.mm.data is None
    assert run.options.untie_embeddings_and_output_weights and run.options.lr == 1e-4


def test_one_file_holds_everything_and_later_flags_win(tmp_path: Path) -> None:
    content = {
        "model": {"init_from_hf_path": "folder"},
        "tool": {"profile": {"enable": True, "ranks": [0, 1]}},
        "fsdp2_config": {"sharding_size": 1, "reshard_after_forward": False},
        "gpt_args": {
            "optimizer_args": {"lr": 1e-5, "clip-grad": 0.5, "weight_decay": 0},
            "bf16": False,
            "log_throughput": True,
            "save": None,
            "train_iters": 7,
        },
        "seed": 3,
    }
    path = write(tmp_path, "run.yaml", content)
    for argv in ([path], ["--config", path]):
        run = parse([*argv, "--train-iters", "9", "--save", "out"])
        options = run.options
        assert (options.lr, options.clip_grad, options.weight_decay) == (1e-5, 0.5, 0)
        assert (options.train_iters, options.save, options.seed) == (9, "out", 3)
        assert not options.bf16 and options.log_throughput
        assert run.fsdp.reshard_after_forward is False
        assert run.mm.tool.profile.ranks == (0, 1)


def test_entries_of_sections_left_empty_are_defaults(tmp_path: Path) -> None:
    model = {"init_from_hf_path": "./m", "freeze": None, "loss_cfg": None, "lora": None}
    sharding = {"sub_modules_to_wrap": None, "num_to_forward_prefetch": None}
    content = {"model": model, "fsdp2_config": sharding, "tool": {"profile": None}}
    run = parse([write(tmp_path, "run.yaml", content), *NEEDED])
    assert run.mm.model == ModelConfig(init_from_hf_path="./m")
    assert (run.fsdp, run.mm.tool) == (FsdpOptions(), ToolConfig())


def test_flags_default_to_what_the_data_section_has(tmp_path: Path) -> None:
    records = {"preprocess_parameters": {"model_name_or_path": "f"}, "basic_parameters": {}}
    loader = {"batch_size": 4, "seed": 7}
    data = {"dataset_param": records, "dataloader_param": loader}
    path = write(tmp_path, "run.yaml", {"data": data, "training": {"lr": 1, "train_iters": 1}})
    options = parse([path]).options
    assert (options.micro_batch_size, options.seed) == (4, 7)
    options = parse([path, "--micro-batch-size", "1", "--seed", "1234"]).options
    assert (options.micro_batch_size, options.seed) == (1, 1234)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-workers -1", "--num-workers -1: give 0 or more"),
        ("--lr-decay-iters 0", "--lr-decay-iters 0: give 1 or more"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters -1", "--lr-wsd-decay-iters -1: give 1"),
    ],
)
def test_numbers_out_of_range(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse([*NEEDED, *flags.split()])


@pytest.mark.parametrize("flag", ["--save", "--log-file", "--tensorboard-dir"])
def test_an_empty_path_is_none(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} is empty: give a path"):
        parse([*NEEDED, flag, ""])


def test_sections_in_several_files_and_of_other_kinds(tmp_path: Path) -> None:
    both = write(tmp_path, "both.yaml", {"model": {"width": 3}, "data": {"files": [{"a": 1}]}})
    argv = ["--mm-model", both, "--mm-data", both, *NEEDED]
    run = parse(argv, schema=Schema(model=Own, data=None))
    assert run.mm.model == Own(width=3)
    assert run.mm.data.files[0].a == 1, "without a class, the file as it is"
    with pytest.raises(ConfigError, match="widht.*did you mean width"):
        wrong = write(tmp_path, "wrong.json", {"widht": 3})
        parse(["--mm-model", wrong, *NEEDED], schema=Schema(model=Own))


def test_tool_files_of_existing_scripts(tmp_path: Path) -> None:
    trace = {"level": "level1", "with_cpu": False, "aic_metrics_type": "PipeUtilization"}
    trace |= {"data_simplification": False, "analyse_flag": True, "start_step": 4, "end_step": 6}
    profile = {"enable": True, "profile_type": "static", "static_param": trace}
    memory = {"enable": False, "dump_ranks": [0], "stacks": "all", "max_entries": 9}
    content = {"profile": profile | {"dynamic_param": {"config_path": "./"}}}
    content |= {"memory_profile": memory, "sorafeature": {"save_path": "./features"}}
    argv = ["--mm-tool", write(tmp_path, "tool.json", content), *NEEDED]
    assert parse(argv).mm.tool.profile.static_param.end_step == 6
    for wrong, match in (
        ({"memory_profile": {"enable": True}}, "memory_profile.*use with_memory: true of profile"),
        ({"profile": {"profile_type": "dynamic"}}, "profile_type.*static"),
    ):
        with pytest.raises(ConfigError, match=match):
            parse(["--mm-tool", write(tmp_path, "wrong.json", wrong), *NEEDED])


def test_arguments_that_a_script_adds(tmp_path: Path) -> None:
    def provide(parser: Any) -> Any:
        parser.add_argument("--my-flag", type=int, default=4)
        return parser

    path = write(tmp_path, "run.yaml", {"my_flag": 6})
    values = {"lr": 1e-3, "train_iters": 2}
    runs = [
        parse(argv, extra_args_provider=provide, args_defaults=values)
        for argv in ([], [path], [path, "--my-flag", "8"])
    ]
    assert [run.extra for run in runs] == [{"my_flag": 4}, {"my_flag": 6}, {"my_flag": 8}]
    assert runs[0].options.lr == 1e-3


def test_bf16_is_a_policy_of_the_sharding(tmp_path: Path) -> None:
    run = parse(["--bf16", *NEEDED])
    assert (run.fsdp.param_dtype, run.fsdp.reduce_dtype) == ("bf16", "fp32")
    fsdp = write(tmp_path, "fsdp.yaml", {"param_dtype": "fp32"})
    with pytest.raises(ConfigError, match="--bf16, but .*param_dtype: fp32"):
        parse(["--bf16", "--fsdp2-config-path", fsdp, *NEEDED])


@pytest.mark.parametrize(
    ("argv", "fsdp", "world", "match"),
    [
        (["--fp16"], {}, 1, "--fp16 true: .*use --bf16"),
        ([], {"param_dtype": "fp16"}, 1, "param_dtype: fp16: .*param_dtype: bf16"),
        (
            ["--recompute-granularity", "full"],
            {"recompute_modules": ["layers.{*}"]},
            1,
            "--recompute-granularity full: .*recompute_modules",
        ),
        ([], {"sharding_size": 3}, 4, "sharding_size: 3 does not divide 4 .*use 1, 2, 4"),
        (["--context-parallel-size", "3"], {}, 4, "4 rank.*--context-parallel-size 3 = 3 ranks"),
        (["--tensor-model-parallel-size", "2"], {}, 2, "use sharding_size"),
        (["--load", "{empty}"], {}, 1, "--load .*holds no weights"),
        (["--load", "{empty}/nowhere"], {}, 1, "--load .*does not exist"),
        (["--micro-batch-size", "0"], {}, 1, "--micro-batch-size 0: give 1 or more"),
        ([], {"shardng_size": 3}, 1, "shardng_size.*did you mean sharding_size"),
        (
            ["--distributed-backend", "npu:hcl"],
            {},
            1,
            "hcl is not known; did you mean npu:hccl",
        ),
        (["--epochs", "1"], {}, 1, "one of --train-iters and --epochs"),
    ],
)
def test_bad_input(tmp_path, monkeypatch, argv, fsdp, world, match):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    path = write(tmp_path, "fsdp.yaml", fsdp)
    (tmp_path / "empty").mkdir()
    argv = [word.replace("{empty}", str(tmp_path / "empty")) for word in argv]
    with pytest.raises(ConfigError, match=match):
        parse([*argv, "--fsdp2-config-path", path, *NEEDED])


def test_offload_needs_ranks_that_talk_from_host_memory(tmp_path, monkeypatch):
    """On an accelerator, whose own backend cannot."""
    from mindspeed import device

    monkeypatch.setattr(device, "current", lambda: device.known()["npu"])
    path = write(tmp_path, "fsdp.yaml", {"offload_to_cpu": True})
    argv = ["--fsdp2-config-path", path, *NEEDED]
    with pytest.raises(ConfigError, match="--distributed-backend npu:hccl,cpu:gloo"):
        parse(argv)
    run = parse([*argv, "--distributed-backend", "npu:hccl,cpu:gloo"])
    assert isinstance(run, Run)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ({"learning_rate": 1e-3, "training": {}}, "learning_rate.*"),
        ({"training": {"train_itres": 3}}, "train_itres.*did you mean train_iters"),
        ({"training": 3}, "training is 3"),
        ({"modle": {}}, "unknown section modle; did you mean model"),
        ({"fsdp_config": {"sharding_size": 1}}, "unknown section fsdp_config.*fsdp2_config"),
        (
            {"tool": {"profile": {"static_param": {"start_step": 5, "end_step": 5}}}},
            "end_step: 5 leaves no step",
        ),
        ({"training": {"lr": "fast"}}, "lr: fast is not allowed: give a number"),
        ({"model": 5}, "model is 5"),
        ({"lr": 1.0, "training": {"lr": 2.0}}, "lr is given twice"),
        ({"sharding_size": 1}, "holds FSDP2 options only: give it as --fsdp2-config-path"),
    ],
)
def test_slips_in_the_file(tmp_path: Path, content: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        parse([write(tmp_path, "run.yaml", content), *NEEDED])
