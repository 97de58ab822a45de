"""Check the file names in cards and states of data sets, and read a model's license.

`datasets` follows patterns of a card, and file names of a saved data set, to any local path and through fsspec to any
URL. With restricted sources, cards and states may name only files of their own directory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from swiftkv_platform.errors import DataError
from swiftkv_platform.sources.names import escapes_directory
from swiftkv_platform.sources.untrusted_files import (
    CARD_BYTES,
    METADATA_BYTES,
    UnusableFileError,
    check_length,
    read_head,
    read_object,
    read_small_file,
)

CARD_FILES = ("README.md", ".huggingface.yaml")
"""Files whose `configs` name data files; the second overrides the first."""
_FRONT_MATTER = re.compile(r"\A\s*---[ \t]*\r?\n(.*?)\r?\n---", re.DOTALL)
_BRACKETS, _MAX_DEPTH = re.compile(rb"[\[\]{}]"), 100
_PICKLE_SUFFIXES = (".pkl", ".pickle", ".pt", ".pth")
_PROSE_KEYS = frozenset({"config_name", "description"})
"""Keys in `configs` of a card whose values are text, not file names."""


def check_hub_layout(directory: Path, field: str) -> None:
    """Raise `DataError` for a directory with a hub layout that has a build script, or a card that `check_card`
    refuses."""
    script = directory / f"{directory.name}.py"
    if script.exists():
        raise _make_error(script, field, "is a script that builds the data set; use its rows in files")
    for card in (directory / name for name in CARD_FILES):
        if card.is_file():
            check_card(card, field)


def check_card(path: Path, field: str) -> None:
    """Check that the configurations of a card name only files of its own directory. `path`: one of `CARD_FILES`. Raises
    `DataError` for an absolute path, one with `..`, a URL or a pickle, and for a card that cannot be read."""
    try:
        document = _read_metadata(path)
    except UnusableFileError as error:
        raise _make_error(path, field, str(error)) from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise _make_error(path, field, "has no valid YAML") from error
    if not isinstance(document, Mapping):
        return
    for pattern in _iter_strings(document.get("configs")):
        if pattern.endswith(_PICKLE_SUFFIXES):
            raise _make_error(path, field, f"names the pickle {pattern[:200]!r}, which may run code when read")
        if escapes_directory(pattern):
            raise _make_error(
                path, field, f"names {pattern[:200]!r}; files of the data set's own directory are accepted"
            )


def check_saved_dataset(directory: Path, field: str) -> None:
    """Raise `DataError` if the state of a data set saved by `datasets` names files of other directories."""
    states = [directory]
    if (splits := directory / "dataset_dict.json").is_file():
        names = _check_plain_names(_read_json(splits, field).get("splits"), splits, field)
        states += [directory / name for name in names]
    for state in (path / "state.json" for path in states):
        if state.is_file():
            files = _read_json(state, field).get("_data_files")
            named = [file.get("filename") for file in files if isinstance(file, Mapping)] if files else []
            _check_plain_names(named, state, field)


def _read_metadata(path: Path) -> Any:
    """Return the metadata of a card; None if it has none. Raises `UnusableFileError` if they are too long,
    `ValueError` and `yaml.YAMLError`."""
    if path.suffix != ".md":
        return _parse_yaml(read_small_file(path, METADATA_BYTES))
    text = read_head(path, CARD_BYTES).decode(errors="replace")  # the last character may be cut in two
    matter = _FRONT_MATTER.match(text)
    if matter is None and text.lstrip().startswith("---") and len(text) * 4 > CARD_BYTES:
        raise UnusableFileError(f"has metadata that does not end within {CARD_BYTES} bytes")
    return _parse_yaml(check_length(matter[1].encode(), METADATA_BYTES)) if matter else None


def _parse_yaml(data: bytes) -> Any:
    """Parse YAML; refuse deeply nested brackets, which take PyYAML minutes."""
    depth = 0
    for bracket in _BRACKETS.findall(data):
        depth += 1 if bracket in b"[{" else -1
        if depth > _MAX_DEPTH:
            raise UnusableFileError("is nested too deeply")
    return yaml.safe_load(data)


def _iter_strings(value: Any) -> Iterator[str]:
    """Yield every string in nested lists and mappings, except under `_PROSE_KEYS`."""
    pending, seen = [value], set[int]()  # with YAML's aliases one list may occur many times
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping | list) and id(item) not in seen:
            seen.add(id(item))
            pending += (
                item if isinstance(item, list) else [each for key, each in item.items() if key not in _PROSE_KEYS]
            )


def _read_json(path: Path, field: str) -> Mapping[str, Any]:
    try:
        return read_object(path)
    except OSError as error:
        raise _make_error(path, field, f"cannot be read ({error.strerror})") from error
    except UnusableFileError as error:
        raise _make_error(path, field, str(error)) from error


def _check_plain_names(names: Any, path: Path, field: str) -> list[str]:
    """Return `names`. Raises `DataError` for one that is not a plain file name."""
    found = names if isinstance(names, list) else []
    for name in found:
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "::" in name:
            raise _make_error(
                path, field, f"names {str(name)[:200]!r}; only plain names of files in the same directory are accepted"
            )
    return found


def _make_error(path: Path, field: str, why: str) -> DataError:
    return DataError(f"{field}: {path.name} {why}", field=field, value=path.name)


_MAX_LICENSE_LENGTH = 100


def read_license(directory: Path) -> str | None:
    """Return the license in the card or configuration of `directory`; None if neither has one."""
    for read, name in ((_read_metadata, "README.md"), (read_object, "config.json")):
        try:
            document = read(directory / name)
        except (OSError, ValueError, RecursionError, yaml.YAMLError):  # an unreadable file has no license
            continue
        for key in ("license_name", "license"):
            named = document.get(key) if isinstance(document, dict) else None
            if isinstance(named, str) and named.strip() and named != "other":
                return " ".join(named.split())[:_MAX_LICENSE_LENGTH]
    return None
