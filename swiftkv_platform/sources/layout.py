"""Recognition, by names alone, of files that hold rows and of directories that `datasets` or the hub laid out."""

from __future__ import annotations

import os
import re
from pathlib import Path

SUFFIXES = (".jsonl", ".json", ".parquet", ".txt", ".py")
"""Endings of the names of files that are read."""
_SAVED_BY_DATASETS = ("dataset_dict.json", "state.json")
_DESCRIPTIONS = frozenset({"dataset_infos.json", "dataset_info.json"})
"""Files that `datasets` writes beside the rows."""
_HUB_SHARD = re.compile(r".+-\d{5}-of-\d{5}(-\w+)?\.parquet")
"""Names that the hub gives the Parquet files of a split."""
_CARD_LISTS_DATA = re.compile(r"^(configs|dataset_info):", re.MULTILINE)


def data_files(path: Path) -> list[Path]:
    """The regular file `path` itself, or the readable ones below the directory, sorted. Links are followed; names that
    begin with a dot are left out, as are links that lead nowhere and directories, however they are named."""
    if not path.is_dir():
        return [path] if path.is_file() else []
    found: list[Path] = []
    seen: set[str] = set()
    for directory, subdirectories, files in os.walk(path, followlinks=True):
        real = os.path.realpath(directory)
        if real in seen:  # a link to a directory above, or to one that is here already
            subdirectories.clear()
            continue
        seen.add(real)
        subdirectories[:] = [name for name in subdirectories if not name.startswith(".")]
        found += [Path(directory, name) for name in files if not name.startswith(".") and name not in _DESCRIPTIONS]
    return sorted(file for file in found if file.suffix in SUFFIXES and file.is_file())


def is_saved_dataset(directory: Path) -> bool:
    """Whether `datasets.Dataset.save_to_disk` wrote it."""
    return any((directory / name).is_file() for name in _SAVED_BY_DATASETS)


def is_hub_layout(directory: Path) -> bool:
    """Whether it is laid out as on the hub: its card lists data, or all of its files are shards of splits."""
    card = directory / "README.md"
    if card.is_file() and _CARD_LISTS_DATA.search(card.read_text(encoding="utf-8", errors="replace")):
        return True
    files = data_files(directory)
    return bool(files) and all(_HUB_SHARD.fullmatch(file.name) for file in files)
