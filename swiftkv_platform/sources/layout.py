"""Files of a data source by name: which files are read, which split each belongs to, and a directory's kind of layout.
Reads names, and from a directory's card only whether it lists data.

Splits are recognised by the names that `datasets` knows, so that a test set next to a training set is never trained on.
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
    BUILTIN_DATA,
    BUILTIN_LONG_RECALL,
    BUILTIN_RECALL,
    DataSourceSpec,
)

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt", ".py")
"""Name endings of files that are read, in upper or lower case."""
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
"""Endings that may follow those of any format but Parquet, which compresses itself."""
ENDINGS = (*SUFFIXES, *COMPRESSIONS)
ACCEPTED = f"{', '.join(SUFFIXES)} are accepted, and all but Parquet compressed ({', '.join(COMPRESSIONS)})"
_UNREAD = frozenset(
    {*COMPRESSIONS, ".7z", ".arrow", ".avro", ".feather", ".lz4", ".orc", ".rar", ".tar", ".tgz", ".xlsx", ".zip"}
)
"""Endings of data formats that are not supported, and are refused rather than silently skipped."""
_SAVED_BY_DATASETS = ("dataset_dict.json", "state.json")
_DESCRIPTIONS = frozenset({"dataset_infos.json", "dataset_info.json"})
"""Files that `datasets` writes next to the rows."""
_HUB_SHARD = re.compile(r".+-\d{5}-of-\d{5}(-\w+)?\.parquet")
"""Names of a split's Parquet files on the hub."""
_CARD_LISTS_DATA = re.compile(r"^(configs|dataset_info):", re.MULTILINE)

SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": (
        *("test", "testing", "eval", "evaluation"),
        *("held_out", "held-out", "heldout", "hold_out", "hold-out", "holdout"),
    ),
}
"""Words in the name of a file or directory that tell its split."""
_WORDS = {word: split for split, words in SPLITS.items() for word in words}
_SPLIT = re.compile(
    rf"(?:^|(?<=[-._ \d]))({'|'.join(sorted(map(re.escape, _WORDS), key=len, reverse=True))})"
    r"(?:set|data)?(?=[-._ \d]|$)"
)
_SHOWN = 3
"""Most names in a message."""


def kind_of(name: str) -> str | None:
    """Return the ending, one of `SUFFIXES`, that decides how a file is read; None if it is not read."""
    path = PurePosixPath(name.lower())
    compressed = path.suffix in COMPRESSIONS
    suffix = PurePosixPath(path.stem).suffix if compressed else path.suffix
    return suffix if suffix in SUFFIXES and not (compressed and suffix == ".parquet") else None


def compression_of(name: str) -> str | None:
    """Return the ending, one of `COMPRESSIONS`, of a compressed file's name; None for other names."""
    suffix = PurePosixPath(name).suffix.lower()
    return suffix if suffix in COMPRESSIONS else None


def data_files(path: Path) -> list[Path]:
    """Return the regular file `path` itself, or the readable files below the directory `path`, sorted. Links are
    followed; broken links and names that begin with a dot are left out."""
    if not path.is_dir():
        return [path] if path.is_file() else []
    return [file for file in _files(path) if kind_of(file.name) is not None]


def _files(directory: Path) -> list[Path]:
    found: list[Path] = []
    seen: set[str] = set()
    for parent, subdirectories, files in os.walk(directory, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:  # a link to a directory that was visited already
            subdirectories.clear()
            continue
        seen.add(real)
        subdirectories[:] = [name for name in subdirectories if not name.startswith(".")]
        found += [Path(parent, name) for name in files if not name.startswith(".") and name not in _DESCRIPTIONS]
    return sorted(file for file in found if file.is_file())


def source_files(path: Path, source: DataSourceSpec, source_field: str) -> list[Path]:
    """Return the files of the split that `source` reads from the file or directory `path`. Raises as `choose`."""
    if not path.is_dir():
        check_whole(source, source_field)
        return data_files(path)
    files = {file.relative_to(path).as_posix(): file for file in _files(path)}
    return [files[name] for name in choose(list(files), source, source_field)]


def choose(names: Sequence[str], source: DataSourceSpec, source_field: str) -> list[str]:
    """Return the names of readable files that belong to the source's split.

    `names`: files below a directory, relative to it. If none has a word of `SPLITS`, all belong to the split `train`.
    Raises `DataError` for a data format that is not supported, files of no clear split next to files of one, a split
    that does not exist, or a subset.
    """
    check_subset(source, source_field)
    unread = [name for name in names if kind_of(name) is None and PurePosixPath(name.lower()).suffix in _UNREAD]
    if unread:
        raise DataError.for_field(
            f"{source_field}.name_or_path",
            source.name_or_path,
            f", which holds {_shown(unread)}, which cannot be read; unpack, convert or remove it: {ACCEPTED}",
        )
    found = [name for name in names if kind_of(name) is not None]
    splits = {name: _split_of(name) for name in found}
    if source.split == "train" and not any(splits.values()):
        return found
    if source.split == "train" and len(found) == 1 and len(splits[found[0]]) > 1:
        return found
    unclear = [name for name, split in splits.items() if len(split) != 1]
    if unclear and any(splits.values()):
        raise DataError.for_field(
            f"{source_field}.name_or_path",
            source.name_or_path,
            f", which holds files of splits ({_shown([name for name in found if name not in unclear])}) beside "
            f"{_shown(unclear)}, whose names do not contain exactly one split; name the file to read, or remove those",
        )
    wanted = {_WORDS.get(source.split.lower().replace("-", "_"), source.split)}
    chosen = [name for name in found if splits[name] == wanted]
    if found and not chosen:
        raise DataError.for_field(
            f"{source_field}.split", source.split, f"; {source.name_or_path} has {_described(splits)}"
        )
    return chosen


def check_whole(source: DataSourceSpec, source_field: str) -> None:
    """Raise `DataError` for a subset of a single file, or for a split other than `train` that its name does not
    tell."""
    check_subset(source, source_field)
    wanted = _WORDS.get(source.split.lower().replace("-", "_"), source.split)
    if source.split != "train" and _split_of(PurePosixPath(source.name_or_path).name) != {wanted}:
        raise DataError.for_field(
            f"{source_field}.split",
            source.split,
            f", and {source.name_or_path} is a file, which is read whole; leave split out, or name the split's file",
        )


BUILTIN_SPLITS = {
    BUILTIN_DATA: ("train",),
    BUILTIN_CHATS: ("train", "held_out", "unseen"),
    BUILTIN_RECALL: ("train", "held_out"),
    BUILTIN_LONG_RECALL: ("train", "held_out"),
}
"""Splits of each built-in data set. Only the teacher answers the rows of all but the first."""


def check_builtin(source: DataSourceSpec, source_field: str) -> None:
    """Raise `DataError` for an unknown built-in data set, a subset or split that it lacks, or requests that no teacher
    answers."""
    name = source.name_or_path
    if name not in BUILTIN_SPLITS:
        raise DataError.for_field(
            f"{source_field}.name_or_path", name, f"; the built-in data sets are {', '.join(BUILTIN_SPLITS)}"
        )
    check_subset(source, source_field)
    if name != BUILTIN_DATA and source.complete is None:
        why = ", whose rows are requests that the teacher has to answer; add complete: {}"
        raise DataError.for_field(f"{source_field}.name_or_path", name, why)
    if source.split not in BUILTIN_SPLITS[name]:
        raise DataError.for_field(
            f"{source_field}.split", source.split, f"; {name} has {' and '.join(BUILTIN_SPLITS[name])}"
        )


def check_subset(source: DataSourceSpec, source_field: str) -> None:
    """Raise `DataError` for a subset of a source that has no configurations."""
    if source.subset is not None:
        raise DataError.for_field(
            f"{source_field}.subset",
            source.subset,
            f", and {source.name_or_path} has no configurations; leave it out, or name the directory to read",
        )


def _split_of(name: str) -> frozenset[str]:
    """Return the splits told by a file's name, or else by the nearest of its directories that tells any. Code files
    belong to no split, since many packages have tests."""
    path, kind = PurePosixPath(name.lower()), kind_of(name)
    if kind == ".py":
        return frozenset()
    stem = path.name.removesuffix(compression_of(name) or "").removesuffix(kind or "")
    # In names of text files, a word between spaces is part of a title, not a split.
    parts = [stem.replace(" ", "x") if kind == ".txt" else stem, *reversed(path.parts[:-1])]
    told = (frozenset(_WORDS[word] for word in _SPLIT.findall(part)) for part in parts)
    return next(filter(None, told), frozenset())


def _described(splits: dict[str, frozenset[str]]) -> str:
    by_split: dict[str, list[str]] = {}
    for name, split in splits.items():
        by_split.setdefault(" and ".join(sorted(split)) or "no split", []).append(name)
    return ", ".join(f"{split} ({_shown(names)})" for split, names in sorted(by_split.items()))


def _shown(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def is_saved_dataset(directory: Path) -> bool:
    """Whether `datasets.Dataset.save_to_disk` wrote the directory."""
    return any((directory / name).is_file() for name in _SAVED_BY_DATASETS)


def is_hub_layout(directory: Path) -> bool:
    """Whether a directory is laid out as on the hub: its card lists data, or all of its files are shards of splits."""
    card = directory / "README.md"
    if card.is_file() and _CARD_LISTS_DATA.search(read_head(card, CARD_BYTES).decode(errors="replace")):
        return True
    files = data_files(directory)
    return bool(files) and all(_HUB_SHARD.fullmatch(file.name) for file in files)
