"""Checks of the file names in cards and states of data sets, and the licence that a model's own files name. Reads those
files, no rows.

`datasets` follows patterns of a card, and file names of a saved data set, to any path of the machine and through fsspec
to any URL. If sources are restricted, cards and states may name only files of their own directory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from swiftkv_platform.errors import DataError
from swiftkv_platform.sources.names import leads_out
from swiftkv_platform.sources.untrusted_files import (
    CARD_BYTES,
    METADATA_BYTES,
    UnusableFileError,
    checked_length,
    read_head,
    read_object,
    read_small,
)

CARDS = ("README.md", ".huggingface.yaml")
"""Files whose `configs` name data files; the second overrides the first."""
_FRONT_MATTER = re.compile(r"\A\s*---[ \t]*\r?\n(.*?)\r?\n---", re.DOTALL)
_BRACKETS, _DEEPEST = re.compile(rb"[\[\]{}]"), 100
_PICKLES = (".pkl", ".pickle", ".pt", ".pth")
_PROSE = frozenset({"config_name", "description"})
"""Keys of a configuration whose text names no file."""


def check_laid_out(directory: Path, field: str) -> None:
    """Check a directory laid out as on the hub.

    Raises `DataError` if it has a script that builds the data set, or a card that `check_card` refuses.
    """
    script = directory / f"{directory.name}.py"
    if script.exists():
        raise _unusable(script, field, "is a script that builds the data set; use its rows in files")
    for card in (directory / name for name in CARDS):
        if card.is_file():
            check_card(card, field)


def check_card(path: Path, field: str) -> None:
    """Check that the configurations of a card name only files of its own directory. `path`: one of `CARDS`. Raises
    `DataError` for an absolute path, one with `..`, a URL or a pickle, and for a card that cannot be read."""
    try:
        document = _metadata(path)
    except UnusableFileError as error:
        raise _unusable(path, field, str(error)) from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise _unusable(path, field, "has no valid YAML") from error
    if not isinstance(document, Mapping):
        return
    for pattern in _strings(document.get("configs")):
        if pattern.endswith(_PICKLES):
            raise _unusable(path, field, f"names the pickle {pattern[:200]!r}, which may run code when read")
        if leads_out(pattern):
            raise _unusable(path, field, f"names {pattern[:200]!r}; files of the data set's own directory are accepted")


def check_saved(directory: Path, field: str) -> None:
    """Raise `DataError` if the state of a data set saved by `datasets` names files of other directories."""
    states = [directory]
    if (splits := directory / "dataset_dict.json").is_file():
        names = _plain_names(_json(splits, field).get("splits"), splits, field)
        states += [directory / name for name in names]
    for state in (path / "state.json" for path in states):
        if state.is_file():
            files = _json(state, field).get("_data_files")
            named = [file.get("filename") for file in files if isinstance(file, Mapping)] if files else []
            _plain_names(named, state, field)


def _metadata(path: Path) -> Any:
    """Return the metadata of a card; None if it has none. Raises `UnusableFileError` if they are too long,
    `ValueError` and `yaml.YAMLError`."""
    if path.suffix != ".md":
        return _yaml(read_small(path, METADATA_BYTES))
    text = read_head(path, CARD_BYTES).decode(errors="replace")  # the last character may be cut in two
    matter = _FRONT_MATTER.match(text)
    if matter is None and text.lstrip().startswith("---") and len(text) * 4 > CARD_BYTES:
        raise UnusableFileError(f"has metadata that does not end within {CARD_BYTES} bytes")
    return _yaml(checked_length(matter[1].encode(), METADATA_BYTES)) if matter else None


def _yaml(data: bytes) -> Any:
    """Parse YAML, refusing deeply nested brackets, for which PyYAML takes minutes."""
    depth = 0
    for bracket in _BRACKETS.findall(data):
        depth += 1 if bracket in b"[{" else -1
        if depth > _DEEPEST:
            raise UnusableFileError("is nested too deeply")
    return yaml.safe_load(data)


def _strings(value: Any) -> Iterator[str]:
    """Yield every text in nested lists and mappings under any key but `_PROSE`, since builders' configurations
    differ."""
    pending, seen = [value], set[int]()  # with YAML's aliases one list may occur many times
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping | list) and id(item) not in seen:
            seen.add(id(item))
            pending += item if isinstance(item, list) else [each for key, each in item.items() if key not in _PROSE]


def _json(path: Path, field: str) -> Mapping[str, Any]:
    try:
        return read_object(path)
    except OSError as error:
        raise _unusable(path, field, f"cannot be read ({error.strerror})") from error
    except UnusableFileError as error:
        raise _unusable(path, field, str(error)) from error


def _plain_names(names: Any, path: Path, field: str) -> list[str]:
    """Return `names`. Raises `DataError` for one that is not a plain file name."""
    found = names if isinstance(names, list) else []
    for name in found:
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "::" in name:
            raise _unusable(
                path, field, f"names {str(name)[:200]!r}; only plain names of files in the same directory are accepted"
            )
    return found


def _unusable(path: Path, field: str, why: str) -> DataError:
    return DataError(f"{field}: {path.name} {why}", field=field, value=path.name)


_LONGEST_NAME = 100


def licence_of(directory: Path) -> str | None:
    """Return the licence named by the card or configuration in `directory`; None if neither names one."""
    for read, name in ((_metadata, "README.md"), (read_object, "config.json")):
        try:
            document = read(directory / name)
        except (OSError, ValueError, RecursionError, yaml.YAMLError):  # an unreadable file names no licence
            continue
        for key in ("license_name", "license"):
            named = document.get(key) if isinstance(document, dict) else None
            if isinstance(named, str) and named.strip() and named != "other":
                return " ".join(named.split())[:_LONGEST_NAME]
    return None
