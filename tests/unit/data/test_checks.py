"""Checks of sources read no more than their budget, and say what they have not read."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from swiftkv_platform.data.checks import ReadBudget, SourceEstimate, check_sources
from swiftkv_platform.errors import DataError
from swiftkv_platform.limits import CHECKED_SOURCE_FILES, MIB
from swiftkv_platform.specs import DataSourceSpec

ROW = '{"text": "x"}\n'
LONG = json.dumps({"text": "x" * (MIB - 100)})


def directory(place: Path, num_files: int, row: str = ROW) -> DataSourceSpec:
    place.mkdir()
    for index in range(num_files):
        (place / f"{index:04}.jsonl").write_text(row)
    return DataSourceSpec(name_or_path=str(place))


def check(budget: ReadBudget, *sources: DataSourceSpec) -> tuple[SourceEstimate, ...]:
    return check_sources(sources, budget=budget)


def unread(found: SourceEstimate) -> str:
    assert found.not_checked is not None
    return found.not_checked


@pytest.mark.parametrize("source_format", ["auto", "prompt_completion"])
def test_columns_that_are_not_read_are_named_and_bad_first_rows_refused(tmp_path: Path, source_format: str) -> None:
    row = {"prompt": "?", "completion": "!", "score": 1, "rejected": "."}
    source = directory(tmp_path / "a", 1, json.dumps(row)).model_copy(update={"format": source_format})
    (tmp_path / "a" / "more.csv").write_text("prompt,completion,source\n?,!,web\n")
    [found] = check(ReadBudget(), source)
    assert (found.formats, found.unread_columns) == (("prompt_completion",), ("score", "rejected", "source"))
    many = directory(tmp_path / "c", 2, json.dumps(row | {f"{i:04}" + "x" * 1000: i for i in range(200)}))
    [bounded] = check(ReadBudget(), many)
    assert (len(bounded.unread_columns), max(map(len, bounded.unread_columns))) == (64, 128)
    bad = directory(tmp_path / "b", 1, json.dumps({**row, "label": False}))
    with pytest.raises(DataError, match=r"the first row of 0000.jsonl, read as prompt_completion: label is False, "):
        check(ReadBudget(), bad)


def test_every_source_gets_a_share_of_the_files(tmp_path: Path) -> None:
    sources = [directory(tmp_path / name, 5) for name in "abc"]
    budget = ReadBudget(num_files=6)
    found = check(budget, *sources)
    assert budget.num_files == 0
    assert [each.formats for each in found] == [("text",)] * 3
    assert all("of 3 of 5 files" in unread(each) for each in found)
    assert [each.num_bytes for each in found] == [5 * len(ROW)] * 3, "sizes are known nevertheless"


def test_long_rows_are_read_until_the_bytes_are_spent(tmp_path: Path) -> None:
    budget = ReadBudget(num_bytes=3 * MIB)
    [first, second] = check(budget, directory(tmp_path / "a", 5, LONG), directory(tmp_path / "b", 1, LONG))
    assert "the rows of 2 of 5 files were not read: a check reads at most" in unread(first)
    assert unread(second)
    assert budget.num_bytes < MIB


def test_short_rows_cost_few_bytes(tmp_path: Path) -> None:
    budget = ReadBudget()
    before = budget.num_bytes
    [found] = check(budget, directory(tmp_path / "a", 9))
    assert found.not_checked is None
    assert before - budget.num_bytes == 9 * len(ROW)


def test_directories_are_listed_until_the_entries_are_spent(tmp_path: Path) -> None:
    source = directory(tmp_path / "a", 9)
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a")
    assert check(ReadBudget(num_entries=10), source)[0].not_checked is None
    [found] = check(ReadBudget(num_entries=9), source)
    assert (found.num_files, found.formats) == (None, ())
    assert "entries of directories" in unread(found)


def test_without_time_no_file_is_read(tmp_path: Path) -> None:
    [found] = check(ReadBudget(seconds=0.0), directory(tmp_path / "a", 1, "not JSON"))
    assert "CPU time" in unread(found)


def test_files_beyond_those_of_one_source_are_named(tmp_path: Path) -> None:
    most = CHECKED_SOURCE_FILES.default
    [found] = check(ReadBudget(), directory(tmp_path / "a", most + 1))
    assert f"the rows of 1 of {most + 1} files were not read" in unread(found)


@pytest.mark.parametrize("open_", [Path.write_bytes, lambda path, data: path.write_bytes(gzip.compress(data))])
def test_a_first_line_without_an_end_is_left_to_the_workers(
    tmp_path: Path, open_: Callable[[Path, bytes], int]
) -> None:
    ending = ".gz" if open_ is not Path.write_bytes else ""
    for name, data in (("a.jsonl", b'{"text": "'), ("b.csv", b"text,")):
        open_(tmp_path / f"{name}{ending}", data + b"x" * 2 * MIB)
        budget = ReadBudget()
        before = budget.num_bytes
        [found] = check(budget, DataSourceSpec(name_or_path=str(tmp_path / f"{name}{ending}")))
        assert found.formats == ()
        assert before - budget.num_bytes == MIB


def test_a_mistake_within_the_budget_is_still_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has the columns other"):
        check(ReadBudget(), directory(tmp_path / "a", 1, '{"other": 1}\n'))
    (tmp_path / "b.csv").write_text("other\n" + "x\n" * 50_000)
    with pytest.raises(DataError, match="has the columns other"):
        check(ReadBudget(), DataSourceSpec(name_or_path=str(tmp_path / "b.csv")))
