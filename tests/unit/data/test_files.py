"""Files are read row by row, whatever their size, and damage is reported with its place."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from swiftkv_platform.data import files as data_files
from swiftkv_platform.data.files import find_reader
from swiftkv_platform.errors import DataError
from swiftkv_platform.sources.layout import FILE_SUFFIXES


@pytest.fixture(autouse=True)
def _small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a few bytes at a time, so that every row, number and character is cut somewhere."""
    monkeypatch.setattr(data_files, "_BYTES_PER_READ", 3)


def read(path: Path) -> list[tuple[int, dict[str, Any]]]:
    reader: Any = find_reader(path, "data")
    rows = list(reader.read_rows(path, None, "data"))
    assert reader.count_rows(path, "data") == len(rows)
    return rows


ROWS = [{"text": 'a "quoted" [é], €'}, {"n": -12.5e3, "deep": {"list": [1, None, {}]}}, {}]


@pytest.mark.parametrize(
    "content",
    [
        "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS),
        "\ufeff" + "\r\n".join(json.dumps(row) for row in ROWS) + "\r\n",
        json.dumps(ROWS, ensure_ascii=False),
        "\ufeff\n " + json.dumps(ROWS, indent=2) + "\n\n",
    ],
    ids=["lines", "lines with CR and BOM", "array", "indented array with BOM"],
)
def test_lines_and_arrays_hold_the_same_rows(tmp_path: Path, content: str) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(content.encode())
    assert read(path) == list(enumerate(ROWS, start=1))


def test_every_ending_that_counts_as_data_has_a_reader_and_no_other() -> None:
    assert set(data_files.READERS) == set(FILE_SUFFIXES)
    assert find_reader(Path("rows.xlsx"), "data") is None


COMPRESSED: dict[str, Any] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
}
KINDS = {
    "rows.jsonl": '{"text": "a"}\n{"text": "b\\né"}\n',
    "rows.ndjson": '{"text": "a"}\n\n{"text": "b\\né"}',
    "rows.JSON": '[{"text": "a"}, {"text": "b\\né"}]',
    "rows.csv": '\ufefftext\r\na\r\n\r\n"b\né"\r\n',
    "rows.Tsv": 'text\na\n"b\né"\n',
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("ending", ["", *COMPRESSED, ".GZ"])
def test_every_kind_of_file_holds_the_same_rows_compressed_or_not(tmp_path: Path, name: str, ending: str) -> None:
    compress = COMPRESSED.get(ending.lower(), bytes)
    content = KINDS[name].encode()
    path = tmp_path / f"{name}{ending}"
    path.write_bytes(compress(content[:7]) + compress(content[7:]))  # as tools write in parallel, or append
    assert [row for _, row in read(path)] == [{"text": "a"}, {"text": "b\né"}]
    path.write_bytes(compress(content)[:-9])
    if ending:
        with pytest.raises(DataError, match=f"rows.*{ending} cannot be decompressed"):
            read(path)


def test_a_compression_that_no_package_reads_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "find_spec", lambda _name: None)
    path = tmp_path / "rows.jsonl.zst"
    path.write_bytes(COMPRESSED[".zst"](b"{}"))
    with pytest.raises(DataError, match="no reader is installed; install zstandard, or decompress it"):
        read(path)


def test_a_line_that_goes_on_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "_MAX_LINE_LENGTH", 64)
    for name, line in (("rows.jsonl.gz", 2), ("rows.csv.gz", 1)):
        path = tmp_path / name
        path.write_bytes(gzip.compress(b'{"a": 1}\n' + b" " * 1000))
        with pytest.raises(DataError, match=f"line {line}.* longer than 64"):
            read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a,b\n1,2\n1,2,3\n", "line 3 cannot be read: it has 3 cells, and the first line 2"),
        (b"a,b\n1\n", "line 2 cannot be read: it has 1 cells"),
        (b"a,a\n1,2\n", r"has a duplicate column in its first line \(a, a\)"),
        (b'a\n"1\n2\n', "line 3 cannot be read: unexpected end of data"),
        (b"a\n\xe9\n", "line 1 cannot be read: it, or a line soon after it, is not UTF-8"),
    ],
)
def test_damage_in_a_table_of_text_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(path)


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_what_divides_the_first_line_divides_all(tmp_path: Path, delimiter: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"\ufeffprompt{delimiter}completion\r\na, b{delimiter}c, d\r\n")
    assert read(path) == [(2, {"prompt": "a, b", "completion": "c, d"})]


def test_cells_are_texts_as_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"text,n\nNA,007\n{'x' * 200_000},\n")
    assert [row for _, row in read(path)] == [{"text": "NA", "n": "007"}, {"text": "x" * 200_000, "n": ""}]


def test_blank_lines_are_counted_as_lines_and_not_as_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"a": 1}\n  \n{"a": 2}\n\n')
    assert read(path) == [(2, {"a": 1}), (4, {"a": 2})]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"a": 1},\n {"a" 2}]', "line 2, column 7 is not JSON"),
        (b'{"a": 1}\n{"a": ' + b"1" * 5000 + b"}", "line 2, column 1 is not JSON: Exceeds the limit"),
        (b'{"a": 1}\n' + b"[" * 100_000, "line 2, column 1 is not JSON: maximum recursion depth"),
        (b'[{"a": 1},\n {"a": 2}', r"line 2, column 10 is not JSON: Expecting '\]'"),
        (b'[{"a": 1}\n]\n\n x', "line 4, column 2 is not JSON: Extra data"),
        (b'[{"a": 1},]', "line 1, column 11 is not JSON"),
        (b'[{"a": 1}, 17]', "row 2 is 17, a int; an object with columns is accepted"),
        (b'[{"a": 1},\n\n {"a": "\xe9"}]', "line 3, byte 20 is not UTF-8"),
        (b'{"a": 1}\n[2]', r"line 2 is \[2\], a list; an object with columns is accepted"),
        (b'{"a": 1}\n{"a": "\xc3"}', "line 2, byte 7 is not UTF-8"),
    ],
)
def test_damage_is_named_with_its_place(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read(path)
    assert caught.value.field == "data"
    assert caught.value.value.startswith(f"{path}:")


def test_damage_in_a_large_array_is_not_searched_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[{"a": 1}, {"a" 2}' + " " * 100_000 + "]")
    monkeypatch.setattr(data_files, "_MAX_ELEMENT_LENGTH", 64)
    reads = []
    original = data_files._JsonParser._read_chunk
    monkeypatch.setattr(data_files._JsonParser, "_read_chunk", lambda self: (reads.append(1), original(self))[1])
    with pytest.raises(DataError, match="line 1, column 17"):
        read(path)
    assert len(reads) < 50


def test_a_text_file_is_one_document_unless_it_is_very_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, content = tmp_path / "text.txt", "erste Zeile\r\nzweite ä\nlast".encode()
    path.write_bytes(content)
    (tmp_path / "text.txt.gz").write_bytes(gzip.compress(content))
    whole = "erste Zeile\nzweite ä\nlast"
    assert read(path) == read(tmp_path / "text.txt.gz") == [(1, {"text": whole})]
    monkeypatch.setattr(data_files, "MAX_DOCUMENT_CHARACTERS", 10)
    pieces = [row["text"] for _, row in read(path)]
    assert "".join(pieces) == whole
    assert len(pieces) > 2
    path.write_bytes(b"")
    assert read(path) == [(1, {"text": ""})]
