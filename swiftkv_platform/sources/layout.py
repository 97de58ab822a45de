"""Files of a data source by their names: which are read, of what split they are, and what kind of directory they are
in. Reads names, and of a directory's card whether it lists data.

Splits are told by the names that `datasets` knows, so that a test set beside a training set is never trained on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from swiftkv_platform.errors import DataError
from swiftkv_platform.sources.small_files import CARD_BYTES, read_head
from swiftkv_platform.specs import DataSourceSpec

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt", ".py")
"""Endings of the names of files that are read, in any case."""
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
"""Endings that may follow those of all but Parquet, which compresses itself."""
ENDINGS = (*SUFFIXES, *COMPRESSIONS)
ACCEPTED = f"{', '.join(SUFFIXES)} are accepted, and all but Parquet compressed ({', '.join(COMPRESSIONS)})"
_UNREAD = frozenset(
    {*COMPRESSIONS, ".7z", ".arrow", ".avro", ".feather", ".lz4", ".orc", ".rar", ".tar", ".tgz", ".xlsx", ".zip"}
)
"""Endings of data that nothing here reads, so that it is not passed over in silence."""
_SAVED_BY_DATASETS = ("dataset_dict.json", "state.json")
_DESCRIPTIONS = frozenset({"dataset_infos.json", "dataset_info.json"})
"""Files that `datasets` writes beside the rows."""
_HUB_SHARD = re.compile(r".+-\d{5}-of-\d{5}(-\w+)?\.parquet")
"""Names that the hub gives the Parquet files of a split."""
_CARD_LISTS_DATA = re.compile(r"^(configs|dataset_info):", re.MULTILINE)

SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": (
        *("test", "testing", "eval", "evaluation"),
        *("held_out", "held-out", "heldout", "hold_out", "hold-out", "holdout"),
    ),
}
"""Words of a file's or a directory's name that tell its split."""
_WORDS = {word: split for split, words in SPLITS.items() for word in words}
_SPLIT = re.compile(
    rf"(?:^|(?<=[-._ \d]))({'|'.join(sorted(map(re.escape, _WORDS), key=len, reverse=True))})"
    r"(?:set|data)?(?=[-._ \d]|$)"
)
_SHOWN = 3
"""Names in a message."""


def kind_of(name: str) -> str | None:
    """The ending, one of `SUFFIXES`, by which a file of this name is read; None for one that is not read."""
    path = PurePosixPath(name.lower())
    compressed = path.suffix in COMPRESSIONS
    suffix = PurePosixPath(path.stem).suffix if compressed else path.suffix
    return suffix if suffix in SUFFIXES and not (compressed and suffix == ".parquet") else None


def compression_of(name: str) -> str | None:
    """The ending, one of `COMPRESSIONS`, of a compressed file's name."""
    suffix = PurePosixPath(name).suffix.lower()
    return suffix if suffix in COMPRESSIONS else None


def data_files(path: Path) -> list[Path]:
    """The regular file `path` itself, or the readable ones below the directory, sorted. Links are followed; names that
    begin with a dot are left out, as are links that lead nowhere and directories, however they are named."""
    if not path.is_dir():
        return [path] if path.is_file() else []
    return [file for file in _files(path) if kind_of(file.name) is not None]


def _files(directory: Path) -> list[Path]:
    found: list[Path] = []
    seen: set[str] = set()
    for place, subdirectories, files in os.walk(directory, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:  # a link to a directory above, or to one that is here already
            subdirectories.clear()
            continue
        seen.add(real)
        subdirectories[:] = [name for name in subdirectories if not name.startswith(".")]
        found += [Path(place, name) for name in files if not name.startswith(".") and name not in _DESCRIPTIONS]
    return sorted(file for file in found if file.is_file())


def source_files(path: Path, source: DataSourceSpec, where: str) -> list[Path]:
    """The files that `source`, the file or directory `path`, reads: those of its split. Raises as `choose`."""
    if not path.is_dir():
        check_whole(source, where)
        return data_files(path)
    files = {file.relative_to(path).as_posix(): file for file in _files(path)}
    return [files[name] for name in choose(list(files), source, where)]


def choose(names: Sequence[str], source: DataSourceSpec, where: str) -> list[str]:
    """The readable ones of the names of files below a directory that are of the source's split.

    Where no name has a word of `SPLITS`, all are of the split `train`.

    Args:
        names: relative to the directory.
        where: the source's place in the spec.

    Raises:
        DataError: data that nothing here reads, files of no split beside those of one, a split that is not there, or a
            subset.
    """
    check_subset(source, where)
    unread = [name for name in names if kind_of(name) is None and PurePosixPath(name.lower()).suffix in _UNREAD]
    if unread:
        raise DataError.of(
            f"{where}.name_or_path",
            source.name_or_path,
            f", which holds {_shown(unread)}, and nothing here reads that; unpack or convert it, or move it away: "
            f"{ACCEPTED}",
        )
    found = [name for name in names if kind_of(name) is not None]
    splits = {name: _split_of(name) for name in found}
    if source.split == "train" and not any(splits.values()):
        return found
    if source.split == "train" and len(found) == 1 and len(splits[found[0]]) > 1:
        return found
    unclear = [name for name, split in splits.items() if len(split) != 1]
    if unclear and any(splits.values()):
        raise DataError.of(
            f"{where}.name_or_path",
            source.name_or_path,
            f", which holds files of splits ({_shown([name for name in found if name not in unclear])}) beside "
            f"{_shown(unclear)}, whose names do not tell one split; name the file to read, or move those away",
        )
    wanted = {_WORDS.get(source.split.lower().replace("-", "_"), source.split)}
    chosen = [name for name in found if splits[name] == wanted]
    if found and not chosen:
        raise DataError.of(f"{where}.split", source.split, f"; {source.name_or_path} has {_described(splits)}")
    return chosen


def check_whole(source: DataSourceSpec, where: str) -> None:
    """Refuse a split or a subset of a file, which is read whole, unless its name tells that split. Raises
    `DataError`."""
    check_subset(source, where)
    wanted = _WORDS.get(source.split.lower().replace("-", "_"), source.split)
    if source.split != "train" and _split_of(PurePosixPath(source.name_or_path).name) != {wanted}:
        raise DataError.of(
            f"{where}.split",
            source.split,
            f", and {source.name_or_path} is a file, which is read whole; leave split out, or name the split's file",
        )


def check_subset(source: DataSourceSpec, where: str) -> None:
    """Refuse a subset of a source without configurations. Raises `DataError`."""
    if source.subset is not None:
        raise DataError.of(
            f"{where}.subset",
            source.subset,
            f", and {source.name_or_path} has no configurations; leave it out, or name the directory to read",
        )


def _split_of(name: str) -> frozenset[str]:
    """The splits that a file's name tells, or else the nearest of its directories' names. Code tells none: half of all
    packages have tests."""
    path, kind = PurePosixPath(name.lower()), kind_of(name)
    if kind == ".py":
        return frozenset()
    stem = path.name.removesuffix(compression_of(name) or "").removesuffix(kind or "")
    # Names of prose have words in them.
    parts = [stem.replace(" ", "x") if kind == ".txt" else stem, *reversed(path.parts[:-1])]
    told = (frozenset(_WORDS[word] for word in _SPLIT.findall(part)) for part in parts)
    return next(filter(None, told), frozenset())


def _described(splits: dict[str, frozenset[str]]) -> str:
    by_split: dict[str, list[str]] = {}
    for name, split in splits.items():
        by_split.setdefault(" and ".join(sorted(split)) or "no split's files", []).append(name)
    return ", ".join(f"{split} ({_shown(names)})" for split, names in sorted(by_split.items()))


def _shown(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def is_saved_dataset(directory: Path) -> bool:
    """Whether `datasets.Dataset.save_to_disk` wrote it."""
    return any((directory / name).is_file() for name in _SAVED_BY_DATASETS)


def is_hub_layout(directory: Path) -> bool:
    """Whether it is laid out as on the hub: its card lists data, or all of its files are shards of splits."""
    card = directory / "README.md"
    if card.is_file() and _CARD_LISTS_DATA.search(read_head(card, CARD_BYTES).decode(errors="replace")):
        return True
    files = data_files(directory)
    return bool(files) and all(_HUB_SHARD.fullmatch(file.name) for file in files)
