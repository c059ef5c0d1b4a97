"""Indexed token files: Megatron reads ours and we read Megatron's; bad ids are found."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from mindspeed.config import ConfigError
from mindspeed_llm.data import indexed
from mindspeed_llm.data.indexed import (
    IndexedTokens,
    TokenFile,
    TokenWriter,
    find_out_of_range,
    smallest_dtype,
)

DOCUMENTS = [[[1, 2, 3], [4]], [[5, 6]], [], [[7]]]


def write_with_megatron(prefix, documents, dtype):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sentences in documents:
        flat = [token for sentence in sentences for token in sentence]
        builder.add_document(flat, [len(sentence) for sentence in sentences])
    builder.finalize(f"{prefix}.idx")


def write(folder, documents, dtype, calls=1):
    writer = TokenWriter(folder, "ours", np.dtype(dtype))
    writer.truncate({})
    for group in np.array_split(np.arange(len(documents)), calls):
        sentences = [sentence for index in group for sentence in documents[index]]
        flat = np.array([token for sentence in sentences for token in sentence], dtype)
        document_ends = np.cumsum([len(documents[index]) for index in group], dtype=np.int64)
        writer.append(flat, np.array(list(map(len, sentences)), np.int32), document_ends)
    writer.build_index(folder / "ours.idx")
    return folder / "ours"


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("calls", [1, 2, 4])
def test_files_are_those_of_megatron(tmp_path, dtype, calls):
    write_with_megatron(tmp_path / "theirs", DOCUMENTS, dtype)
    ours = write(tmp_path, DOCUMENTS, dtype, calls)
    for ending in (".bin", ".idx"):
        theirs = (tmp_path / "theirs").with_suffix(ending).read_bytes()
        assert ours.with_suffix(ending).read_bytes() == theirs


def test_megatron_reads_ours(tmp_path):
    prefix = write(tmp_path, DOCUMENTS, np.int32)
    read = IndexedDataset(str(prefix))
    expected = [sentence for sentences in DOCUMENTS for sentence in sentences]
    assert [read[index].tolist() for index in range(len(read))] == expected
    assert read.document_indices.tolist() == [0, 2, 3, 3, 4]


@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(0, 65000), min_size=1, max_size=5), max_size=3), max_size=6
    )
)
def test_round_trip(tmp_path_factory, documents):
    prefix = tmp_path_factory.mktemp("pair") / "theirs"
    write_with_megatron(prefix, documents, np.int32)
    read = IndexedTokens(prefix)
    expected = [sentence for sentences in documents for sentence in sentences]
    assert [tokens.tolist() for tokens in read] == expected
    assert read.tokens == sum(map(len, expected))


def test_multimodal_index_is_read(tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "m.bin"), multimodal=True)
    builder.add_item(torch.tensor([1, 2]), mode=1)
    builder.end_document()
    builder.finalize(str(tmp_path / "m.idx"))
    assert IndexedTokens(tmp_path / "m")[0].tolist() == [1, 2]


def test_a_writer_restores_an_earlier_state(tmp_path):
    writer = TokenWriter(tmp_path, "ours", np.dtype("<i4"))
    writer.append(np.arange(3), np.array([1, 2]))
    sizes = writer.sizes()
    writer.append(np.arange(5), np.array([5]))
    writer.close()
    again = TokenWriter(tmp_path, "ours", np.dtype("<i4"))
    again.truncate(sizes)
    again.append(np.array([9]), np.array([1]))
    again.build_index(tmp_path / "ours.idx")
    assert [t.tolist() for t in IndexedTokens(tmp_path / "ours")] == [[0], [1, 2], [9]]


def test_smallest_dtype_is_megatrons():
    from megatron.core.datasets.indexed_dataset import DType

    for size in (100, 65499, 65500, 200_000):
        assert smallest_dtype(size) == np.dtype(DType.optimal_dtype(size))


HEADER = struct.Struct("<9sQBQQ")


def damage(index, data, how):
    """Return the damaged index and data."""
    magic, version, code, sequences, documents = HEADER.unpack(index[: HEADER.size])
    body = index[HEADER.size :]
    changed = {
        "empty": b"",
        "short": index[:20],
        "magic": b"X" + index[1:],
        "version": HEADER.pack(magic, 9, code, sequences, documents) + body,
        "dtype": HEADER.pack(magic, 1, 77, sequences, documents) + body,
        "count": HEADER.pack(magic, 1, code, 2**60, documents) + body,
        "no documents": HEADER.pack(magic, 1, code, sequences, 0) + body,
        "cut": index[:-3],
        "length": index[: HEADER.size] + struct.pack("<i", 10**6) + body[4:],
        "negative": index[: HEADER.size] + struct.pack("<i", -1) + body[4:],
        "offset": index[: HEADER.size + 16] + struct.pack("<q", 2**62) + body[24:],
        "border": index[:-8] + struct.pack("<q", 99),
        "order": index[:-16] + struct.pack("<qq", 3, 1),
        "float32": HEADER.pack(magic, 1, 7, sequences, documents) + body,
        "float64": HEADER.pack(magic, 1, 6, sequences, documents) + body,
        "narrower": HEADER.pack(magic, 1, 8, sequences, documents) + body,
        "shifted": index[: HEADER.size + 16] + struct.pack("<4q", 4, 12, 16, 24) + body[48:],
        "overlapping": index[: HEADER.size + 24] + struct.pack("<q", 8) + body[32:],
        "gap": index[: HEADER.size] + struct.pack("<i", 2) + body[4:],
        "swapped": index[: HEADER.size] + struct.pack("<2i", 1, 3) + body[8:],
    }
    return changed.get(how, index), {"no data": b"", "more data": data + bytes(4)}.get(how, data)


@pytest.mark.parametrize(
    "how",
    [
        *("empty", "short", "magic", "version", "dtype", "count", "no documents", "cut"),
        *("length", "negative", "offset", "border", "order", "no data", "more data"),
        *("float32", "float64", "narrower", "shifted", "overlapping", "gap", "swapped"),
    ],
)
def test_damage_is_refused(tmp_path, how):
    write_with_megatron(tmp_path / "x", DOCUMENTS, np.int32)
    index, data = (tmp_path / "x.idx").read_bytes(), (tmp_path / "x.bin").read_bytes()
    IndexedTokens(tmp_path / "x")
    damaged_index, damaged_data = damage(index, data, how)
    assert (damaged_index, damaged_data) != (index, data)
    (tmp_path / "x.idx").write_bytes(damaged_index)
    (tmp_path / "x.bin").write_bytes(damaged_data)
    with pytest.raises(ConfigError, match="x.idx"):
        IndexedTokens(tmp_path / "x")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="x.idx does not exist"):
        IndexedTokens(tmp_path / "x")


VOCABULARY = 120


@pytest.mark.parametrize("is_labels", [False, True])
@pytest.mark.parametrize("dtype", ["<i4", "<i8", "<u2", "<i2", "u1"])
@given(data=st.data())
def test_ids_outside_the_vocabulary_are_found(tmp_path_factory, dtype, is_labels, data):
    least, greatest = np.iinfo(dtype).min, np.iinfo(dtype).max
    edges = [-101, -100, -99, -1, 0, VOCABULARY - 1, VOCABULARY, VOCABULARY + 99, least, greatest]
    values = st.sampled_from([one for one in edges if least <= one <= greatest])
    tokens = data.draw(st.lists(st.integers(0, VOCABULARY - 1) | values, max_size=12))
    path = Path(tmp_path_factory.mktemp("tokens") / "x.bin")
    np.array(tokens, dtype).tofile(path)
    right = {*range(VOCABULARY), *([-100] if is_labels else [])}
    wrong = [(index, token) for index, token in enumerate(tokens) if token not in right]
    file = TokenFile(path, np.dtype(dtype), is_labels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed, "BLOCK", 5)
        assert find_out_of_range(file, VOCABULARY) == (wrong[0] if wrong else None)
        shares = [find_out_of_range(file, VOCABULARY, (number, 3)) for number in range(3)]
    assert [one for one in shares if one][:1] == wrong[:1]
