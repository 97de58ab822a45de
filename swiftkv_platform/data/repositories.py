"""Data sets read by the library `datasets`: from the hub, laid out as on the hub, or saved by it. Knows no row format.

`datasets` follows paths and URLs in cards, states and columns wherever they lead. If the source is restricted to
directories or to its repository, cards are checked before `datasets` reads them, and every file it finds before it is
opened.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from swiftkv_platform.data.files import NumberedRow, Table, bad_row
from swiftkv_platform.errors import DataError, StorageError, SwiftKVError
from swiftkv_platform.sources import UNBOUNDED, Boundary
from swiftkv_platform.sources.cards import CARDS, check_card, check_laid_out, check_saved
from swiftkv_platform.sources.untrusted_files import INDEX_BYTES, UnusableFileError, read_object
from swiftkv_platform.specs import DataSourceSpec

_ROWS_PER_BATCH = 512
_PATTERN = re.compile(r"[][*?{}!:#%]")
"""Characters that are special to `datasets` in every path, though not to file systems."""
_BUILDERS = frozenset({"arrow", "csv", "json", "parquet", "text"})
"""Readers of `datasets` that open only the files they are given."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


def read_saved(location: Path, source: DataSourceSpec, path: str, boundary: Boundary) -> Table:
    """Return a split of a directory that `save_to_disk` wrote and that lies within `boundary`. Raises `DataError`."""
    import datasets

    name, field = str(location), f"{path}.name_or_path"
    if boundary.directories is not None:
        check_saved(location, field)
    try:
        found = datasets.load_from_disk(name)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: data set {name!r}: {error}", field=path, value=name) from error
    if isinstance(found, datasets.DatasetDict):
        if source.split not in found:
            raise DataError.for_field(f"{path}.split", source.split, f"; {name} has {', '.join(found)}")
        found = found[source.split]
    return _table(name, found, path)


def read_laid_out(name: str, source: DataSourceSpec, path: str, boundary: Boundary = UNBOUNDED) -> Table:
    """Return a split of a hub data set, or of a directory laid out like one.

    Args:
        boundary: where the files of a directory may lie; it contains the directory. With one, the rows that `datasets`
            prepares are kept in no cache that others read.

    Raises `DataError` if there is no such data set, split or subset, or if a card or file leads out of `boundary`, and
    `StorageError` if the hub does not answer.
    """
    if boundary.directories is None:
        return _read(name, source, path, None)
    field, directory = f"{path}.name_or_path", Path(name)
    check_laid_out(directory, field)

    def check(file: str) -> bool:
        return "::" not in file and boundary.contains(file)

    # Rows in the usual cache could be read by the directory's bare name, which other tenants may give to the hub's data
    # sets. The mapped files stay open after they are deleted.
    with tempfile.TemporaryDirectory(prefix="swiftkv-data-") as cache:
        return _read(name, source, path, check, cache=cache)


def read_repository(source: DataSourceSpec, path: str) -> Table:
    """Return a split of a hub data set, reading only files of its own repository. Offline, return the rows that
    `datasets` prepared from it before. Raises as `read_laid_out`."""
    from huggingface_hub import constants

    name = source.name_or_path
    if constants.HF_HUB_OFFLINE:
        return _read_prepared(source, path)
    revision = _check_repository_cards(name, f"{path}.name_or_path")
    prefix = f"hf://datasets/{name}@"
    return _read(name, source, path, lambda file: file.startswith(prefix) and "::" not in file, revision)


def _check_repository_cards(name: str, field: str) -> str | None:
    """Check the cards of a repository. Returns the commit they were read from; None if it has no card."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    revision = None
    for card in CARDS:
        try:
            file = Path(hf_hub_download(name, card, repo_type="dataset", revision=revision))
        except LocalEntryNotFoundError as error:
            raise _no_hub(name, field, error) from error
        except EntryNotFoundError:
            continue
        except (HfHubHTTPError, ConnectionError) as error:
            raise DataError.for_field(
                field, name, f": no such data set on the hub, or no access to it ({error})"
            ) from error
        revision = file.parent.name
        Boundary.of(file.parents[2]).check(file, field)
        check_card(file, field)
    return revision


def _read(
    name: str, source: DataSourceSpec, path: str, is_own: Any, revision: str | None = None, *, cache: str | None = None
) -> Table:
    """Read a split. `is_own`: whether a file that `datasets` found may be opened; None allows all. `cache`: directory
    for the rows that `datasets` prepares; None: its usual one."""
    import datasets

    with _reported(name, source, path):
        builder = datasets.load_dataset_builder(
            _without_patterns(name), source.subset, cache_dir=cache, revision=revision
        )
        if is_own is not None:
            if builder.name == "cache":  # the hub stopped answering
                return _read_prepared(source, path)
            _check_builder(builder, name, f"{path}.name_or_path", is_own)
        return _split_of(builder, name, source, path)


def _read_prepared(source: DataSourceSpec, path: str) -> Table:
    """Read a split from the rows that `datasets` prepared from a repository of the hub."""
    from datasets.packaged_modules.cache.cache import Cache

    name = source.name_or_path
    with _reported(name, source, path):
        *_, config, version, commit = _prepared_directory(source, path).parts
        found = {"config_name": config, "version": version, "hash": commit}
        return _split_of(Cache(repo_id=name, dataset_name=name.rpartition("/")[2], **found), name, source, path)


def _prepared_directory(source: DataSourceSpec, path: str) -> Path:
    """Return the newest directory with rows of a repository in the cache of `datasets`.

    Only directories named after a commit are from the hub; those of local directories are named after other hashes,
    below the directory's bare name.
    """
    import datasets
    from datasets.naming import camelcase_to_snakecase

    name = source.name_or_path
    owner, slash, repository = name.rpartition("/")
    separator = "___"  # `datasets` has it for a slash: a name with both could be another organization's
    root = Path(datasets.config.HF_DATASETS_CACHE) / f"{owner}{slash and separator}{camelcase_to_snakecase(repository)}"
    found = [] if separator in name else root.glob("*/*/*")
    commits = [each for each in found if _COMMIT.fullmatch(each.name) and _is_whole(each)]
    configurations = sorted({each.parts[-3] for each in commits})
    if not commits:
        raise _no_hub(name, f"{path}.name_or_path", "`datasets` has prepared no rows of it before")
    wanted = [each for each in commits if source.subset in (None, each.parts[-3])]
    if not wanted or (source.subset is None and len(configurations) > 1):
        raise DataError.for_field(
            f"{path}.subset", source.subset, f"; offline, this machine has {', '.join(configurations)} of {name}"
        )
    return max(wanted, key=lambda each: each.stat().st_mtime)


def _is_whole(directory: Path) -> bool:
    """Whether it has the rows of a whole configuration, rather than of some of its files, which have a longer name."""
    try:
        return bool(read_object(directory / "dataset_info.json", INDEX_BYTES).get("config_name") == directory.parts[-3])
    except (OSError, UnusableFileError):
        return False


def _split_of(builder: Any, name: str, source: DataSourceSpec, path: str) -> Table:
    if source.streaming:
        return _table(name, builder.as_streaming_dataset(split=source.split), path)
    builder.download_and_prepare()
    return _table(name, builder.as_dataset(split=source.split), path)


@contextmanager
def _reported(name: str, source: DataSourceSpec, path: str) -> Iterator[None]:
    """Raise the errors of `datasets` as `DataError` or `StorageError`."""
    import datasets

    try:
        yield
    except SwiftKVError:
        raise
    except datasets.exceptions.DatasetNotFoundError as error:
        raise DataError.for_field(
            f"{path}.name_or_path", name, f": no such path here and no such data set on the hub ({error})"
        ) from error
    except ConnectionError as error:
        raise _no_hub(name, f"{path}.name_or_path", error) from error
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{path} cannot be read: data set {name!r}, subset {source.subset!r}, split {source.split!r}: "
            f"{error.__cause__ or error}; if it has several configurations, name one in {path}.subset",
            field=path,
            value=name,
        ) from error


@cache
def _without_patterns(name: str) -> str:
    """Return the name, or for a directory whose name `datasets` would take for a pattern, that of a temporary directory
    with links to its files (`datasets` would resolve a link to the directory itself)."""
    if not _PATTERN.search(name) or not Path(name).is_dir():
        return name
    mirror = tempfile.mkdtemp(prefix="swiftkv-data-")
    atexit.register(shutil.rmtree, mirror, ignore_errors=True)
    for place, _, files in os.walk(Path(name).absolute()):
        beside = Path(mirror, os.path.relpath(place, name))
        beside.mkdir(parents=True, exist_ok=True)
        for file in files:
            (beside / file).symlink_to(Path(place, file))
    return mirror


def _check_builder(builder: Any, name: str, field: str, is_own: Any) -> None:
    kind = type(builder).__module__.rpartition(".")[2]
    files = builder.config.data_files
    if builder.config.name in (".", ".."):  # part of the path in the cache
        raise DataError.for_field(field, name, f", whose configuration is called {builder.config.name!r}; rename it")
    if kind not in _BUILDERS:
        accepted = f"where sources have rules {', '.join(sorted(_BUILDERS))} are accepted"
        raise DataError.for_field(field, name, f", whose files `datasets` would read as {kind}; {accepted}")
    for file in (file for split in (files or {}).values() for file in split):
        if not is_own(file):
            raise DataError.for_field(field, name, f", which names the file {file!r} in another place")


def _no_hub(name: str, field: str, error: Exception | str) -> StorageError:
    return StorageError.for_field(
        field,
        name,
        f": no such path here, and the hub does not answer ({error}); use a local copy of the data set's directory",
    )


def _table(name: str, dataset: Any, path: str) -> Table:
    """Return the table of a `Dataset` or an `IterableDataset`, whose rows are read lazily."""
    dataset = _without_media(dataset)
    columns = dataset.column_names or tuple(next(iter(dataset), {}))
    return Table(name, tuple(columns), partial(_rows, dataset, name, path), lambda: len(dataset))


def _without_media(dataset: Any) -> Any:
    """Drop columns of images, audio and other media: to decode one, `datasets` opens the path or URL in its cell."""
    media = [name for name, feature in (dataset.features or {}).items() if _is_media(feature)]
    if not media:
        return dataset
    # A streamed data set decodes a row before it drops its columns.
    undecoded = dataset.decode(False) if hasattr(dataset, "decode") else dataset
    return undecoded.remove_columns(media)


def _is_media(feature: Any) -> bool:
    from datasets.features.features import Json, LargeList, List

    if isinstance(feature, dict):
        return any(_is_media(part) for part in feature.values())
    if isinstance(feature, list | tuple):
        return any(_is_media(part) for part in feature)
    if isinstance(feature, List | LargeList):
        return _is_media(feature.feature)
    return hasattr(feature, "decode_example") and not isinstance(feature, Json)


def _rows(dataset: Any, name: str, path: str, columns: Sequence[str] | None) -> Iterator[NumberedRow]:
    number = 1
    try:
        for batch in (dataset if columns is None else dataset.select_columns(list(columns))).iter(_ROWS_PER_BATCH):
            for values in zip(*batch.values(), strict=True):
                yield number, dict(zip(batch, values, strict=True))
                number += 1
    except ConnectionError as error:
        raise StorageError(f"{path}: the hub stopped answering after row {number - 1} of {name!r} ({error})") from error
    except UnicodeDecodeError as error:
        why = f" or one soon after it, holds text that is not UTF-8 ({error.reason}); UTF-8 text is accepted"
        raise bad_row(path, name, number, why, unit="row") from error
