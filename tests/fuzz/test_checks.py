"""The checks of `make fuzz` notice what was lost, and a case is the same every time."""

import torch
from safetensors.torch import save_file

from tests.forked import End
from tests.fuzz.checks import loss
from tests.fuzz.draws import Draw

LINE = "records {} in = {} written + {} skipped\n"


def ended(out="", code=0, err=""):
    return End(code, out, err, 0.1)


def test_lost_records_are_detected(tmp_path):
    path = tmp_path / "good.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\nx\n')
    check = f"records {path}"
    assert loss(check, ended(LINE.format(3, 2, 1)), None, tmp_path) == ""
    for counts in ((2, 2, 0), (3, 2, 0), (3, 0, 3)):
        assert loss(check, ended(LINE.format(*counts)), None, tmp_path)
    assert loss(check, ended("done"), None, tmp_path)


def test_records_that_should_be_left_out_are_detected(tmp_path):
    path = tmp_path / "good.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a": 3}\n')
    assert loss(f"kept 2 {path}", ended(LINE.format(3, 2, 1)), None, tmp_path) == ""
    for counts in ((3, 3, 0), (3, 1, 2), (2, 2, 0)):
        assert loss(f"kept 2 {path}", ended(LINE.format(*counts)), None, tmp_path)


def test_what_must_be_refused_is_not_accepted(tmp_path):
    assert loss("refused", ended(), None, tmp_path)


def test_other_weights_are_detected(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("out", "good"):
        (tmp_path / folder).mkdir()
    good = {"a": torch.ones(3), "b": torch.zeros(2)}
    save_file(good, "good/model.safetensors")
    for changed, is_lost in (
        (good, False),
        (good | {"b": torch.tensor([0.0, 1e-30])}, True),
        (good | {"b": torch.zeros(2, dtype=torch.bfloat16)}, True),
        ({"a": good["a"]}, True),
    ):
        save_file(changed, "out/model.safetensors")
        assert bool(loss("weights good", ended(), None, tmp_path)) is is_lost


def test_other_numbers_are_detected(tmp_path):
    reference = ended("lm loss: 6.1E+00 | grad norm: 2.0 |")
    assert loss("numbers", ended(reference.out), reference, tmp_path) == ""
    assert loss("numbers", ended("lm loss: 6.2E+00 | grad norm: 2.0 |"), reference, tmp_path)
    assert loss("numbers", ended("nothing"), reference, tmp_path)


def test_ends_are_distinguished():
    assert ended(code=2, err="x: error: a file is damaged\n").problem == ""
    assert ended(code=None).problem == "hang"
    assert ended(code=1, err="Traceback (most recent call last):\n").problem == "traceback"
    assert ended(code=-9).problem and ended(code=2).problem
    assert ended(code=2, err="x: error: a\nx: error: b\n").problem
    assert ended(code=2, err="x: error: a\nmore\n").problem


def test_the_same_number_draws_the_same_case(tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(256)))
    drawn = [Draw(tmp_path, "7 3").damage("file") for _ in range(2)]
    assert drawn[0] == drawn[1] != Draw(tmp_path, "7 4").damage("file")
