"""Files beside rows and weights: what cards and states of data sets name, and the licence that a model's own files
name. Reads those files, no rows.

`datasets` resolves patterns of a card, and file names of a saved data set, wherever they lead: to any path of the
machine, and through fsspec to any URL. Where sources have rules they may name files of their own directory alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from swiftkv_platform.errors import DataError
from swiftkv_platform.sources.names import leads_out

CARDS = ("README.md", ".huggingface.yaml")
"""Files whose `configs` name data files; the second replaces what the first says."""
_LONGEST_CARD = 16 << 20
_FRONT_MATTER = re.compile(r"\A\s*---[ \t]*\r?\n(.*?)\r?\n---", re.DOTALL)
_PICKLES = (".pkl", ".pickle", ".pt", ".pth")
_PROSE = frozenset({"config_name", "description"})
"""Keys of a configuration whose text names no file."""


def check_laid_out(directory: Path, field: str) -> None:
    """Refuse a directory laid out as on the hub that holds a script to build it, or a card as in `check_card`.

    Raises `DataError`.
    """
    script = directory / f"{directory.name}.py"
    if script.exists():
        raise _unusable(script, field, "is a script that builds the data set; use its rows in files")
    for card in (directory / name for name in CARDS):
        if card.is_file():
            check_card(card, field)


def check_card(path: Path, field: str) -> None:
    """Refuse a card whose configurations name what lies elsewhere. `path`: one of `CARDS`. Raises `DataError`: an
    absolute path, one with `..`, or a URL; or a card that cannot be read."""
    if path.stat().st_size > _LONGEST_CARD:
        raise _unusable(path, field, f"is longer than {_LONGEST_CARD} bytes")
    try:
        document = _metadata(path)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise _unusable(path, field, "holds no YAML that can be read") from error
    if not isinstance(document, Mapping):
        return
    for pattern in _strings(document.get("configs")):
        if pattern.endswith(_PICKLES):
            raise _unusable(path, field, f"names the pickle {pattern[:200]!r}, which may run code when read")
        if leads_out(pattern):
            raise _unusable(path, field, f"names {pattern[:200]!r}; files of the data set's own directory are accepted")


def check_saved(directory: Path, field: str) -> None:
    """Refuse a data set saved by `datasets` whose state names files of other directories. Raises `DataError`."""
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
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        matter = _FRONT_MATTER.match(text)
        text = matter[1] if matter else ""
    return yaml.safe_load(text)


def _strings(value: Any) -> Iterator[str]:
    """Every text in nested lists and mappings, whatever its key, since configurations of builders differ."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key not in _PROSE:
                yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _json(path: Path, field: str) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _unusable(path, field, "is no JSON") from error
    if not isinstance(document, Mapping):
        raise _unusable(path, field, "holds no object")
    return document


def _plain_names(names: Any, path: Path, field: str) -> list[str]:
    """`names` themselves. Raises `DataError` for one with a directory in it."""
    found = names if isinstance(names, list) else []
    for name in found:
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "::" in name:
            raise _unusable(path, field, f"names {str(name)[:200]!r}; files beside it are accepted")
    return found


def _unusable(path: Path, field: str, why: str) -> DataError:
    return DataError(f"{field}: {path.name} {why}", field=field, value=path.name)


_LONGEST_READ = 1 << 20
_LONGEST_NAME = 100


def licence_of(directory: Path) -> str | None:
    """The licence that the card or the configuration in `directory` names, None where neither does."""
    for document in (_front_matter(directory / "README.md"), _object(directory / "config.json")):
        for key in ("license_name", "license"):
            named = document.get(key)
            if isinstance(named, str) and named.strip() and named != "other":
                return " ".join(named.split())[:_LONGEST_NAME]
    return None


def _front_matter(path: Path) -> dict[str, Any]:
    match = _FRONT_MATTER.match(_text(path))
    if match is None:
        return {}
    try:
        document = yaml.safe_load(match[1])
    except yaml.YAMLError:  # what is no card names no licence
        return {}
    return document if isinstance(document, dict) else {}


def _object(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(_text(path) or "{}")
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _text(path: Path) -> str:
    if not path.is_file() or path.stat().st_size > _LONGEST_READ:
        return ""
    return path.read_text(encoding="utf-8", errors="replace")
