"""Readers: every format gives the same records, in blocks of any size, with true line numbers."""

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed.config import ConfigError
from mindspeed_llm.data.readers import Problem, blocks, find_sources, read

RECORDS = [{"text": text, "n": str(n)} for n, text in enumerate(["a", "b\nc", 'ü, "q"', "你" * 9])]


def everything(path, size=4 << 20):
    """Read a file and number its rows as the run does."""
    found, line = [], 0
    for block in blocks(find_sources(str(path)), size=size):
        rows, lines = read(block)
        found += [(line + number, row) for number, row in rows]
        line += lines
    return found


def write(path, records):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    elif path.name == "pretty.json":
        path.write_text(json.dumps(records, indent=2))
    elif path.name == "loose.json":
        path.write_text("\n\n".join(json.dumps(record, indent=1) for record in records))
    elif path.suffix == ".json":
        path.write_text(json.dumps(records, ensure_ascii=False))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path, row_group_size=3)
    else:
        with path.open("w", newline="") as file:
            delimiter = "\t" if path.suffix == ".tsv" else ","
            writer = csv.DictWriter(file, records[0], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(records)


NAMES = ("a.jsonl", "a.json", "pretty.json", "loose.json", "a.csv", "a.tsv", "a.parquet")


@pytest.mark.parametrize("size", [1, 30, 4 << 20])
@pytest.mark.parametrize("name", NAMES)
def test_every_format_gives_the_same_records(tmp_path, name, size):
    write(tmp_path / name, RECORDS)
    assert [record for _, record in everything(tmp_path / name, size)] == RECORDS


@given(
    texts=st.lists(st.text(max_size=20), max_size=8),
    size=st.integers(1, 40),
    ending=st.sampled_from(["\n", "\r\n", "\n\n"]),
    last=st.booleans(),
)
def test_blocks_may_split_lines_anywhere(tmp_path_factory, texts, size, ending, last):
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    lines = [json.dumps({"text": text}) for text in texts] or ["{}"]
    content = "\ufeff" + ending.join(lines) + (ending if last else "")
    path.write_bytes(content.encode())
    step = 2 if ending == "\n\n" else 1
    expected = [(1 + step * n, {"text": text}) for n, text in enumerate(texts)]
    assert [row for row in everything(path, size) if texts] == expected


@given(
    texts=st.lists(st.text(max_size=30), min_size=1, max_size=6), indent=st.sampled_from([None, 1])
)
def test_arrays_are_read_in_small_chunks(tmp_path_factory, texts, indent):
    from mindspeed_llm.data.readers import formats

    path = tmp_path_factory.mktemp("array") / "x.json"
    path.write_text(json.dumps([{"text": text} for text in texts], indent=indent))
    whole = everything(path)
    old, formats.CHUNK = formats.CHUNK, 3
    try:
        assert everything(path) == whole
    finally:
        formats.CHUNK = old
    assert [row["text"] for _, row in whole] == texts
    assert [number for number, _ in whole] == list(range(1, 1 + len(texts)))


def test_text_files_have_one_record_per_line(tmp_path):
    (tmp_path / "a.txt").write_bytes("one\r\n\n  \nzwö\n".encode())
    assert everything(tmp_path / "a.txt", 2) == [(1, {"text": "one"}), (4, {"text": "zwö"})]


def test_folders_are_read_in_order(tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "z.jsonl").write_text('{"text": "never"}')
    (tmp_path / "b.jsonl").write_text('{"text": "2"}\n')
    (tmp_path / "a.txt").write_text("1\n")
    (tmp_path / "c.csv").write_text("text\n3\n")
    (tmp_path / "notes.md").write_text("no data")
    (tmp_path / "out.summary.json").write_text('{"text": "of an earlier run"}')
    assert [row["text"] for _, row in everything(tmp_path)] == ["1", "2", "3"]
    both = f"{tmp_path / 'b.jsonl'},{tmp_path / 'a.txt'}"
    assert [source.format for source in find_sources(both)] == ["jsonl", "txt"]


BAD_LINES = {
    "broken": (b'{"text": "a"', "unexpected end of data"),
    "list": (b"[1]", "holds a list, not an object"),
    "text": (b'"a"', "holds text, not an object"),
    "null": (b"null", "holds null"),
    "number": (b"1", "holds a number"),
    "nan": (b'{"text": NaN}', "is not valid JSON"),
    "surrogate": (b'{"text": "\\ud800"}', "is not valid JSON"),
    "latin": (b'{"text": "\xe9"}', "is not UTF-8 text: byte 11 of the line"),
    "apostrophe": (
        rb"""{"text": "Answer the user\'s question with words"}""",
        r"(column 26: ...Answer the user\'s question wi...; an apostrophe has no backslash",
    ),
    "nul": (b"\x00", "is not valid JSON"),
    "empty": (b"{}", "empty object"),
    "two": (b'{"a": 1} {"b": 2}', "is not valid JSON"),
    "deep": (b"[" * 5000, "is not valid JSON"),
}


@pytest.mark.parametrize("line, reason", BAD_LINES.values(), ids=BAD_LINES)
@pytest.mark.parametrize("size", [7, 4 << 20])
def test_a_bad_line_is_named_and_the_others_are_read(tmp_path, line, reason, size):
    good = b'{"text": "x"}\n'
    (tmp_path / "a.jsonl").write_bytes(good * 3 + line + b"\n" + good * 2)
    found = everything(tmp_path / "a.jsonl", size)
    assert [number for number, _ in found] == [1, 2, 3, 4, 5, 6]
    problems = [(number, row.reason) for number, row in found if isinstance(row, Problem)]
    assert [number for number, _ in problems] == [4]
    assert reason in problems[0][1]


BAD_FILES = [
    ("a.json", b'[{"a": 1}, {"a": ', "a.json, record 2, line 1: is not valid JSON"),
    (
        "a.json",
        rb"""[{"a": "the user\'s"}]""",
        r"Invalid .escape: .*the user.'s.*no backslash in JSON",
    ),
    ("a.json", b'[{"a": 1}\n{"a": 2}]', "record 2, line 2: is not valid JSON: a comma"),
    ("a.json", b'[{"a": 1}] x', "more text after the array"),
    ("a.json", b'[{"a": 1},\n\n {"a": 1', "record 2, line 3"),
    ("a.json", b'[{"a": 1},\n', "the array is not closed"),
    ("a.json", b'[{"a": 1}\n', "a comma or a closing bracket is missing"),
    ("a.json", b"[" * 100_000, "nested too deeply|not closed|is not valid JSON"),
    ("a.json", b'[{"a": "\xff"}]', "is not UTF-8 text"),
    ("a.csv", b'a,b\n1,2\n3,"4\n', "after line 2: is not valid csv"),
    ("a.csv", b"a,a\n1,2\n", "names 'a' twice"),
    ("a.csv", b"a,b\n1,\xff\n", "is not UTF-8 text"),
    ("a.csv", b"\n", "first line must name the columns"),
    ("a.parquet", b"PAR1 this is no parquet", "is not valid parquet"),
    ("a.parquet", b"", "is empty"),
    ("a.xlsx", b"x", "must end in .jsonl"),
]


@pytest.mark.parametrize("name, content, message", BAD_FILES)
def test_a_file_that_cannot_be_read(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        everything(tmp_path / name)


def test_a_csv_row_of_another_width(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3\n4,5\n")
    found = everything(tmp_path / "a.csv")
    assert found[1] == (3, Problem("has 1 fields, the header has 2"))
    assert len(found) == 3


@pytest.mark.parametrize("given", ["", "nowhere.jsonl", "a.jsonl,nowhere.txt"])
def test_missing_input(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match="--input"):
        find_sources(given)


def test_only_the_needed_columns_of_a_parquet_are_read(tmp_path):
    write(tmp_path / "a.parquet", RECORDS)
    block = next(blocks(find_sources(str(tmp_path / "a.parquet")), columns=["n", ""]))
    assert [row for _, row in read(block)[0]] == [{"n": record["n"]} for record in RECORDS]


@pytest.mark.parametrize("text", ["[{0}, {0}, {1}, {0}]", "[{0},\n\n{0},\n{1},\n{0}]"])
def test_records_of_an_array_are_numbered(run, tmp_path, text):
    """All of an array may stand in one line, so a line names no record."""
    good, bad = '{"text": "x"}', '{"txt": "y"}'
    (tmp_path / "data.json").write_text(text.format(good, bad))
    with pytest.raises(ConfigError, match=r"data.json, record 3: has no text; it has txt"):
        run(tmp_path / "data.json", handler_name="GeneralPretrainHandler")
    summary, _ = run(
        tmp_path / "data.json", handler_name="GeneralPretrainHandler", on_bad_line="skip"
    )
    assert summary.skipped["malformed"].first.endswith("data.json, record 3")
    assert summary.longest_at.endswith("data.json, record 1")


def test_a_parquet_whose_damaged_page_is_skipped(tmp_path):
    path = tmp_path / "a.parquet"
    write(path, RECORDS)
    for column in range(2):  # pyarrow takes a page of another kind for none, and yields no row
        content = bytearray(path.read_bytes())
        offset = pq.ParquetFile(path).metadata.row_group(1).column(column).data_page_offset
        assert content[offset : offset + 2] == b"\x15\x00", "the kind of the page: data"
        content[offset + 1] = 2
        (tmp_path / "damaged.parquet").write_bytes(content)
        with pytest.raises(ConfigError, match="parquet, after row 3: is not valid parquet"):
            everything(tmp_path / "damaged.parquet")
