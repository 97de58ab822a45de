"""Whether data sources are there, hold something and have columns that a row format reads. Reads first rows only.

The worker reads the same sources in full and has the last word; this tells the obvious before a cluster is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from swiftkv_platform.errors import DataError
from swiftkv_platform.specs import BUILTIN_DATA, DataSourceSpec

_TEXT_FILES = frozenset({".txt", ".py"})
_SUFFIXES = (".jsonl", ".json", ".parquet", ".txt", ".py")
_FORMATS: dict[str, tuple[frozenset[str], ...]] = {
    "text": (frozenset({"text"}),),
    "messages": (frozenset({"messages"}),),
    "sharegpt": (frozenset({"conversations"}),),
    "prompt_completion": (
        frozenset({"prompt", "completion"}),
        frozenset({"prompt", "response"}),
        frozenset({"question", "answer"}),
    ),
    "alpaca": (frozenset({"instruction", "output"}),),
}
"""Columns of each row format; any of its sets will do."""
_HEAD_BYTES = 1 << 20
"""How much of a JSON file is looked at."""


def check_sources(sources: Sequence[DataSourceSpec]) -> None:
    """Raises `DataError`, naming the source, for the first one that cannot be trained on."""
    for index, source in enumerate(sources):
        _check_source(source, f"data.sources[{index}]")


def _check_source(source: DataSourceSpec, where: str) -> None:
    name = source.name_or_path
    if name.startswith("builtin:"):
        if name != BUILTIN_DATA:
            raise _unusable(where, name, f"the only built-in data set is {BUILTIN_DATA}")
        return
    path = Path(name).expanduser()
    if name.startswith("s3://") or not (path.exists() or _looks_like_a_path(name)):
        return
    if not path.exists():
        raise _unusable(where, name, "no such file or directory")
    found = _data_files(path)
    if not found:
        raise _unusable(where, name, f"it has no file that can be read; {', '.join(_SUFFIXES)} can")
    filled = [file for file in found if file.stat().st_size]
    if not filled:
        raise _unusable(where, name, "it is empty; at least one row is needed")
    for file in filled:
        if file.suffix not in _TEXT_FILES:
            _check_columns(file, source, where)


def _looks_like_a_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or Path(name).suffix in _SUFFIXES


def _data_files(path: Path) -> list[Path]:
    candidates = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [file for file in candidates if file.suffix in _SUFFIXES and file.is_file()]


def _check_columns(file: Path, source: DataSourceSpec, where: str) -> None:
    read_columns = _parquet_columns if file.suffix == ".parquet" else _json_columns
    columns = read_columns(file, source, where)
    if columns is None:
        return
    wanted = _FORMATS if source.format == "auto" else {source.format: _FORMATS[source.format]}
    if any(group <= columns for groups in wanted.values() for group in groups):
        return
    accepted = "; ".join(
        f"{name}: {' or '.join(' + '.join(sorted(group)) for group in groups)}" for name, groups in wanted.items()
    )
    shown = ", ".join(sorted(columns)) or "none"
    raise _unusable(where, source.name_or_path, f"{file.name} has the columns {shown}; these would do: {accepted}")


def _json_columns(file: Path, source: DataSourceSpec, where: str) -> frozenset[str] | None:
    """Keys of the first row; None if it is longer than what is looked at."""
    with file.open("rb") as stream:
        head = stream.read(_HEAD_BYTES)
    # A character cut in two at the end is not the file's fault.
    text = head.decode("utf-8", errors="replace").lstrip("\ufeff \t\r\n").removeprefix("[").lstrip()
    try:
        row, _ = json.JSONDecoder().raw_decode(text)
    except ValueError as error:
        if len(head) == _HEAD_BYTES:
            return None
        raise _unusable(where, source.name_or_path, f"the first row of {file.name} is no JSON ({error})") from error
    if not isinstance(row, dict):
        raise _unusable(where, source.name_or_path, f"the first row of {file.name} is no object with columns")
    return frozenset(row)


def _parquet_columns(file: Path, source: DataSourceSpec, where: str) -> frozenset[str] | None:
    """None where no Parquet reader is installed, as in the control plane's own image."""
    if find_spec("pyarrow") is None:
        return None
    try:
        return frozenset(import_module("pyarrow.parquet").read_schema(file).names)
    except ValueError as error:
        raise _unusable(where, source.name_or_path, f"{file.name} is no Parquet file ({error})") from error


def _unusable(where: str, name: str, why: str) -> DataError:
    field = f"{where}.name_or_path"
    return DataError(f"{field} is {name!r}: {why}", field=field, value=name)
