"""The file of the reference's log-probabilities: whole, or computed again."""

import hashlib
import io
import pickle
from pathlib import Path

import numpy as np
import pytest

from mindspeed_llm.models.registry import read_model_config
from mindspeed_llm.tasks.posttrain.precomputed import (
    DIGEST,
    parse_table,
    serialize_table,
    table_path,
)
from mindspeed_llm.training.options import TrainOptions
from tests.llm.preferences import save_llama

SHAPE = (5, 2)
TABLE = np.arange(10, dtype=np.float32).reshape(SHAPE) - 20.5
WHOLE = serialize_table(TABLE)


def npy(values: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.save(content, values, allow_pickle=True)
    return content.getvalue()


def signed(body: bytes) -> bytes:
    """Return a file whose digest is right, as that of a forger is."""
    return body + hashlib.sha256(body).digest()


def test_what_is_written_is_read_and_numpy_reads_it_too() -> None:
    found = parse_table(WHOLE, SHAPE)
    assert found is not None and np.array_equal(found, TABLE)
    assert np.array_equal(np.load(io.BytesIO(WHOLE), allow_pickle=False), TABLE)


def test_every_changed_bit_and_every_cut_is_noticed() -> None:
    for place in range(len(WHOLE)):
        damaged = bytearray(WHOLE)
        damaged[place] ^= 1
        assert parse_table(bytes(damaged), SHAPE) is None
        assert parse_table(WHOLE[:place], SHAPE) is None
    assert parse_table(WHOLE + b"0", SHAPE) is None
    assert parse_table(WHOLE, (4, 2)) is None


class Forged:
    """Ends the process when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[int]]:
        import os

        return os._exit, (3,)


BODY = npy(TABLE)


@pytest.mark.parametrize(
    "body",
    [
        npy(np.array([Forged()] * 10, dtype=object)),
        pickle.dumps(Forged()).ljust(len(BODY), b"0"),
        BODY.replace(b"(5, 2)", b"(2, 5)"),
        BODY.replace(b"<f4", b"<i4"),
        BODY.replace(b"'<f4'", b"'|O' "),
        BODY.replace(b"(5, 2)", b"(1<<40)"[:6]),
        npy(np.where(TABLE > -15, np.nan, TABLE)),
    ],
    ids=["objects", "pickle", "shape", "integers", "objects of the same size", "huge", "nan"],
)
def test_a_forged_file_with_the_right_digest_is_not_read(body: bytes) -> None:
    assert parse_table(signed(body), SHAPE) is None
    assert len(signed(body)) == len(body) + DIGEST


def test_another_shape_of_the_same_weights_has_a_file_of_its_own(tmp_path: Path) -> None:
    """As --hf-cfg-dir may give one."""
    folder = tmp_path / "hf"
    options = TrainOptions(load=save_llama(folder), cache_dir=str(tmp_path))
    shape = read_model_config(folder)
    other = shape.model_copy(update={"norm_epsilon": 0.1})
    assert table_path(options, shape, []) == table_path(options, read_model_config(folder), [])
    assert table_path(options, shape, []) != table_path(options, other, [])
