"""Select the files of a data source by name: supported files, their splits, and a directory's kind of layout.

Splits are recognized by the words that `datasets` knows, so that a test set next to a training set is never trained on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from swiftkv_platform.errors import DataError
from swiftkv_platform.sources.untrusted_files import CARD_BYTES, read_head
from swiftkv_platform.specs import (
    BUILTIN_CHATS,
    BUILTIN_CONSTRAINTS,
    BUILTIN_DATA,
    BUILTIN_LONG_RECALL,
    BUILTIN_RECALL,
    DataSourceSpec,
)

FILE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt", ".py")
"""Suffixes of supported files, in upper or lower case."""
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
"""Suffixes of compressed files, after the suffix of any format but Parquet."""
DATA_SUFFIXES = (*FILE_SUFFIXES, *COMPRESSIONS)
ACCEPTED_FILES = f"{', '.join(FILE_SUFFIXES)} are accepted, and all but Parquet compressed ({', '.join(COMPRESSIONS)})"
_UNSUPPORTED_SUFFIXES = frozenset(
    {*COMPRESSIONS, ".7z", ".arrow", ".avro", ".feather", ".lz4", ".orc", ".rar", ".tar", ".tgz", ".xlsx", ".zip"}
)
"""Suffixes of unsupported data formats, which are refused rather than skipped."""
_SAVED_DATASET_FILES = ("dataset_dict.json", "state.json")
_DESCRIPTION_FILES = frozenset({"dataset_infos.json", "dataset_info.json"})
"""Files that `datasets` writes next to the rows."""
_HUB_SHARD = re.compile(r".+-\d{5}-of-\d{5}(-\w+)?\.parquet")
"""Names of a split's Parquet files on the hub."""
_CARD_LISTS_DATA = re.compile(r"^(configs|dataset_info):", re.MULTILINE)

SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": (
        *("test", "testing", "eval", "evaluation"),
        *("held_out", "held-out", "heldout", "hold_out", "hold-out", "holdout"),
    ),
}
"""Words in the names of files and directories, by split."""
_SPLIT_BY_WORD = {word: split for split, words in SPLIT_WORDS.items() for word in words}
_SPLIT_WORD = re.compile(
    rf"(?:^|(?<=[-._ \d]))({'|'.join(sorted(map(re.escape, _SPLIT_BY_WORD), key=len, reverse=True))})"
    r"(?:set|data)?(?=[-._ \d]|$)"
)
_MAX_LISTED_NAMES = 3
"""Max names in a message."""


def find_data_suffix(name: str) -> str | None:
    """Return the suffix of a data file, one of `FILE_SUFFIXES`, without compression; None for other files."""
    path = PurePosixPath(name.lower())
    compressed = path.suffix in COMPRESSIONS
    suffix = PurePosixPath(path.stem).suffix if compressed else path.suffix
    return suffix if suffix in FILE_SUFFIXES and not (compressed and suffix == ".parquet") else None


def find_compression(name: str) -> str | None:
    """Return the suffix of a compressed file, one of `COMPRESSIONS`; None for other files."""
    suffix = PurePosixPath(name).suffix.lower()
    return suffix if suffix in COMPRESSIONS else None


def list_data_files(path: Path) -> list[Path]:
    """Return the file `path`, or the data files below the directory `path`, sorted. Follows links; skips broken links
    and names that begin with a dot."""
    if not path.is_dir():
        return [path] if path.is_file() else []
    return [file for file in _list_files(path) if find_data_suffix(file.name) is not None]


def _list_files(directory: Path) -> list[Path]:
    found: list[Path] = []
    seen: set[str] = set()
    for parent, subdirectories, files in os.walk(directory, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:  # a link to a directory that was visited already
            subdirectories.clear()
            continue
        seen.add(real)
        subdirectories[:] = [name for name in subdirectories if not name.startswith(".")]
        found += [Path(parent, name) for name in files if not name.startswith(".") and name not in _DESCRIPTION_FILES]
    return sorted(file for file in found if file.is_file())


def list_source_files(path: Path, source: DataSourceSpec, source_field: str) -> list[Path]:
    """Return the files of the split that `source` reads from the file or directory `path`. Raises as
    `select_split_files`."""
    if not path.is_dir():
        check_single_file(source, source_field)
        return list_data_files(path)
    files = {file.relative_to(path).as_posix(): file for file in _list_files(path)}
    return [files[name] for name in select_split_files(list(files), source, source_field)]


def select_split_files(names: Sequence[str], source: DataSourceSpec, source_field: str) -> list[str]:
    """Return the `names` (relative to a directory) of data files in the source's split. If none has a word of
    `SPLIT_WORDS`, all belong to the split `train`. Raises `DataError` for an unsupported data format, files without a
    clear split next to files with one, a missing split, or a subset.
    """
    # 1. refuse unsupported data formats
    check_subset(source, source_field)
    unsupported = [
        name
        for name in names
        if find_data_suffix(name) is None and PurePosixPath(name.lower()).suffix in _UNSUPPORTED_SUFFIXES
    ]
    if unsupported:
        raise DataError.for_field(
            f"{source_field}.name_or_path",
            source.name_or_path,
            f", which has unsupported files ({_list_names(unsupported)}); unpack, convert or remove them: "
            f"{ACCEPTED_FILES}",
        )
    # 2. find the splits of each file
    found = [name for name in names if find_data_suffix(name) is not None]
    splits = {name: _find_splits(name) for name in found}
    if source.split == "train" and not any(splits.values()):
        return found
    if source.split == "train" and len(found) == 1 and len(splits[found[0]]) > 1:
        return found
    unclear = [name for name, split in splits.items() if len(split) != 1]
    if unclear and any(splits.values()):
        raise DataError.for_field(
            f"{source_field}.name_or_path",
            source.name_or_path,
            f", which has files of splits ({_list_names([name for name in found if name not in unclear])}) and files "
            f"without a clear split ({_list_names(unclear)}); name the file to read, or remove the latter",
        )
    # 3. select the files of the wanted split
    wanted = {_SPLIT_BY_WORD.get(source.split.lower().replace("-", "_"), source.split)}
    chosen = [name for name in found if splits[name] == wanted]
    if found and not chosen:
        raise DataError.for_field(
            f"{source_field}.split", source.split, f"; {source.name_or_path} has {_describe_splits(splits)}"
        )
    return chosen


def check_single_file(source: DataSourceSpec, source_field: str) -> None:
    """Raise `DataError` for a subset of a single file, or for a split other than `train` that is not in its name."""
    check_subset(source, source_field)
    wanted = _SPLIT_BY_WORD.get(source.split.lower().replace("-", "_"), source.split)
    if source.split != "train" and _find_splits(PurePosixPath(source.name_or_path).name) != {wanted}:
        raise DataError.for_field(
            f"{source_field}.split",
            source.split,
            f", but {source.name_or_path} is a single file without splits; remove split, or name the split's file",
        )


def check_traffic(source: DataSourceSpec, source_field: str) -> None:
    """Raise `DataError` for fields that captured traffic does not have."""
    check_subset(source, source_field)
    for field, only in (("split", "train"), ("format", "auto"), ("streaming", False)):
        value = getattr(source, field)
        if value != only:
            why = f", but captured traffic has no {field}; remove {field}"
            raise DataError.for_field(f"{source_field}.{field}", value, why)


BUILTIN_SPLITS = {
    BUILTIN_DATA: ("train",),
    BUILTIN_CHATS: ("train", "held_out", "unseen"),
    BUILTIN_RECALL: ("train", "held_out"),
    BUILTIN_LONG_RECALL: ("train", "held_out"),
    BUILTIN_CONSTRAINTS: ("train", "held_out"),
}
"""Splits of each built-in data set. All but the first have prompts only, which the teacher completes."""


def check_builtin(source: DataSourceSpec, source_field: str) -> None:
    """Raise `DataError` for an unknown built-in data set, split or subset, or prompts without `complete`."""
    name = source.name_or_path
    if name not in BUILTIN_SPLITS:
        raise DataError.for_field(
            f"{source_field}.name_or_path", name, f"; the built-in data sets are {', '.join(BUILTIN_SPLITS)}"
        )
    check_subset(source, source_field)
    if name != BUILTIN_DATA and source.complete is None:
        why = ", which has prompts only; add complete: {} to let the teacher complete them"
        raise DataError.for_field(f"{source_field}.name_or_path", name, why)
    if source.split not in BUILTIN_SPLITS[name]:
        raise DataError.for_field(
            f"{source_field}.split", source.split, f"; {name} has {' and '.join(BUILTIN_SPLITS[name])}"
        )


def check_subset(source: DataSourceSpec, source_field: str) -> None:
    """Raise `DataError` for a subset; only hub data sets have subsets."""
    if source.subset is not None:
        raise DataError.for_field(
            f"{source_field}.subset",
            source.subset,
            f", but {source.name_or_path} has no configurations; remove subset, or name the directory to read",
        )


def _find_splits(name: str) -> frozenset[str]:
    """Return the splits in a file's name, or else in the name of the nearest parent directory with any. Code files
    belong to no split, since many packages have tests."""
    path, kind = PurePosixPath(name.lower()), find_data_suffix(name)
    if kind == ".py":
        return frozenset()
    stem = path.name.removesuffix(find_compression(name) or "").removesuffix(kind or "")
    # In names of text files, a word between spaces is part of a title, not a split.
    parts = [stem.replace(" ", "x") if kind == ".txt" else stem, *reversed(path.parts[:-1])]
    splits = (frozenset(_SPLIT_BY_WORD[word] for word in _SPLIT_WORD.findall(part)) for part in parts)
    return next(filter(None, splits), frozenset())


def _describe_splits(splits: dict[str, frozenset[str]]) -> str:
    by_split: dict[str, list[str]] = {}
    for name, split in splits.items():
        by_split.setdefault(" and ".join(sorted(split)) or "no split", []).append(name)
    return ", ".join(f"{split} ({_list_names(names)})" for split, names in sorted(by_split.items()))


def _list_names(names: Sequence[str]) -> str:
    more = len(names) - _MAX_LISTED_NAMES
    return ", ".join(names[:_MAX_LISTED_NAMES]) + (f" and {more} more" if more > 0 else "")


def is_saved_dataset(directory: Path) -> bool:
    """Whether `datasets.Dataset.save_to_disk` wrote the directory."""
    return any((directory / name).is_file() for name in _SAVED_DATASET_FILES)


def is_hub_layout(directory: Path) -> bool:
    """Whether a directory has a hub layout: its card lists data, or all of its files are shards of splits."""
    card = directory / "README.md"
    if card.is_file() and _CARD_LISTS_DATA.search(read_head(card, CARD_BYTES).decode(errors="replace")):
        return True
    files = list_data_files(directory)
    return bool(files) and all(_HUB_SHARD.fullmatch(file.name) for file in files)
