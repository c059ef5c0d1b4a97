"""Records that ranks skip while training are reported for all ranks, with a total."""

import json
import logging

import pytest
from PIL import Image

from mindspeed.config import ConfigError, build
from mindspeed_mm.data import DataConfig, build_mm_dataloader, build_mm_dataset
from tests.mm import processors
from tests.ranks import run_ranks

RECORDS, BAD = 6, (1, 3, 4)


def skipped_records(folder):
    """Iterate over the data one and a half times; return the log lines."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("mindspeed_mm.data").addHandler(handler)
    basic = {"dataset": f"{folder}/rows.jsonl", "on_bad_record": "skip"}
    values = {"basic_parameters": basic, "preprocess_parameters": {"model_name_or_path": folder}}
    dataset = build_mm_dataset(build(DataConfig, {"dataset_param": values}).dataset_param)
    loader = build_mm_dataloader(dataset, {"batch_size": 1, "shuffle": False})
    list(loader)
    next(iter(loader))
    loader.finish()
    return [line for line in lines if "all ranks" in line], loader.skipped


def test_skipped_records_of_all_ranks_are_reported(tmp_path):
    processors.save("qwen2_5_vl", tmp_path)
    messages = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "Yes."}]
    rows = [{"conversations": messages, "images": [f"{number}.png"]} for number in range(RECORDS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for number in range(RECORDS):
        Image.new("RGB", (16, 16)).save(tmp_path / f"{number}.png")
        if number in BAD:
            (tmp_path / f"{number}.png").write_bytes(b"\x89PNG\r\n\x1a\nno")
    (first, own), (other, others) = run_ranks(skipped_records, 2, str(tmp_path))
    assert first == other and (own, others) == (1, 3)
    assert first[0].startswith("epoch 1: 3 record(s) skipped by all ranks, 3 in total: ")
    for number in BAD:
        assert f"rows.jsonl, line {number + 1}: the image {tmp_path}/{number}.png" in first[0]
    assert first[1].startswith("end of training: 1 record(s) skipped by all ranks, 4 in total: ")


def no_usable_record(folder):
    """Cut off every answer; return the errors of an epoch and of a shorter training."""
    basic = {"dataset": f"{folder}/rows.jsonl", "cutoff_len": 2}
    values = {"basic_parameters": basic, "preprocess_parameters": {"model_name_or_path": folder}}
    dataset = build_mm_dataset(build(DataConfig, {"dataset_param": values}).dataset_param)
    options = {"batch_size": 1, "shuffle": False}
    loader, short, rest = (build_mm_dataloader(dataset, options) for _ in range(3))
    with pytest.raises(ConfigError) as epoch:
        list(loader)
    next(iter(short))
    with pytest.raises(ConfigError) as end:
        short.finish()
    rest.load_state_dict({"consumed_samples": RECORDS - 2})
    list(rest)  # what was before may have been usable
    rest.finish()
    next(iter(rest))
    rest.finish(is_complete=False)  # a run that is stopped goes on later
    return str(epoch.value), str(end.value)


def test_data_without_a_usable_record_is_an_error(tmp_path):
    processors.save("qwen2_5_vl", tmp_path)
    messages = [{"from": "human", "value": "Is it?"}, {"from": "gpt", "value": "Yes."}]
    row = json.dumps({"conversations": messages})
    (tmp_path / "rows.jsonl").write_text("\n".join([row] * RECORDS))
    first, other = run_ranks(no_usable_record, 2, str(tmp_path))
    assert first == other
    epoch, end = first
    assert epoch.startswith("epoch 1: none of the 6 records could be used, so nothing was learned")
    assert end.startswith("end of training: none of the 2 records could be used")
    assert "line 1: no token with a loss is left" in end and "raise cutoff_len" in end
