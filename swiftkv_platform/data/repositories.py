"""Read data sets with the library `datasets`: from the hub, from a directory with a hub layout, or saved by it.

`datasets` follows any path and URL in cards, states and columns. If the source is restricted to directories or to its
repository, cards are checked before `datasets` reads them, and files before it opens them.
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

from swiftkv_platform.data.files import NumberedRow, Table, make_row_error
from swiftkv_platform.errors import DataError, StorageError, SwiftKVError
from swiftkv_platform.sources import UNBOUNDED, Boundary
from swiftkv_platform.sources.cards import CARD_FILES, check_card, check_hub_layout, check_saved_dataset
from swiftkv_platform.sources.untrusted_files import INDEX_BYTES, UnusableFileError, read_object
from swiftkv_platform.specs import DataSourceSpec

_ROWS_PER_BATCH = 512
_PATTERN_CHARACTER = re.compile(r"[][*?{}!:#%]")
"""Characters that are special to `datasets` in every path, though not to file systems."""
_ALLOWED_BUILDERS = frozenset({"arrow", "csv", "json", "parquet", "text"})
"""Builders of `datasets` that open only their `data_files`."""
_COMMIT_HASH = re.compile(r"[0-9a-f]{40}")


def read_saved_dataset(location: Path, source: DataSourceSpec, source_field: str, boundary: Boundary) -> Table:
    """Return a split of a directory within `boundary` that `save_to_disk` wrote. Raises `DataError`."""
    import datasets

    name, field = str(location), f"{source_field}.name_or_path"
    if boundary.directories is not None:
        check_saved_dataset(location, field)
    try:
        found = datasets.load_from_disk(name)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{source_field} cannot be read: data set {name!r}: {error}", field=source_field, value=name
        ) from error
    if isinstance(found, datasets.DatasetDict):
        if source.split not in found:
            raise DataError.for_field(f"{source_field}.split", source.split, f"; {name} has {', '.join(found)}")
        found = found[source.split]
    return _make_dataset_table(name, found, source_field)


def read_hub_dataset(name: str, source: DataSourceSpec, source_field: str, boundary: Boundary = UNBOUNDED) -> Table:
    """Return a split of a hub data set, or of a directory with a hub layout.

    Args:
        boundary: allowed directories of local files, including `name`. With one, no other tenant can read the rows that
            `datasets` prepares from a shared cache.

    Raises `DataError` for a missing data set, split or subset, or if a card or file is outside of `boundary`, and
    `StorageError` if the hub is unavailable.
    """
    if boundary.directories is None:
        return _load_split(name, source, source_field, None)
    field, directory = f"{source_field}.name_or_path", Path(name)
    check_hub_layout(directory, field)

    def is_allowed(file: str) -> bool:
        return "::" not in file and boundary.contains(file)

    # In the default cache, other tenants could read the rows as a hub data set with the directory's bare name. Mapped
    # files stay open after they are deleted.
    with tempfile.TemporaryDirectory(prefix="swiftkv-data-") as cache:
        return _load_split(name, source, source_field, is_allowed, cache=cache)


def read_hub_repository(source: DataSourceSpec, source_field: str) -> Table:
    """Return a split of a hub data set, reading only files of its repository. Offline, return the rows that `datasets`
    prepared from it earlier. Raises as `read_hub_dataset`."""
    from huggingface_hub import constants

    name = source.name_or_path
    if constants.HF_HUB_OFFLINE:
        return _load_cached_split(source, source_field)
    revision = _check_repository_cards(name, f"{source_field}.name_or_path")
    prefix = f"hf://datasets/{name}@"
    return _load_split(name, source, source_field, lambda file: file.startswith(prefix) and "::" not in file, revision)


def _check_repository_cards(name: str, field: str) -> str | None:
    """Check the cards of a repository. Returns their commit; None without cards."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    revision = None
    for card in CARD_FILES:
        try:
            file = Path(hf_hub_download(name, card, repo_type="dataset", revision=revision))
        except LocalEntryNotFoundError as error:
            raise _make_hub_error(name, field, error) from error
        except EntryNotFoundError:
            continue
        except (HfHubHTTPError, ConnectionError) as error:
            why = f": no such data set on the hub, or no access to it ({error})"
            raise DataError.for_field(field, name, why) from error
        revision = file.parent.name
        Boundary.from_directories(file.parents[2]).check_path(file, field)
        check_card(file, field)
    return revision


def _load_split(
    name: str,
    source: DataSourceSpec,
    source_field: str,
    is_allowed: Any,
    revision: str | None = None,
    *,
    cache: str | None = None,
) -> Table:
    """Load a split with `datasets`. `is_allowed`: whether a file may be opened; None allows all files. `cache`:
    directory for prepared rows; None: the default one of `datasets`."""
    import datasets

    with _translate_errors(name, source, source_field):
        builder = datasets.load_dataset_builder(
            _escape_name_patterns(name), source.subset, cache_dir=cache, revision=revision
        )
        if is_allowed is not None:
            if builder.name == "cache":  # the hub became unavailable
                return _load_cached_split(source, source_field)
            _check_builder(builder, name, f"{source_field}.name_or_path", is_allowed)
        return _open_split(builder, name, source, source_field)


def _load_cached_split(source: DataSourceSpec, source_field: str) -> Table:
    from datasets.packaged_modules.cache.cache import Cache

    name = source.name_or_path
    with _translate_errors(name, source, source_field):
        *_, config, version, commit = _find_cached_directory(source, source_field).parts
        found = {"config_name": config, "version": version, "hash": commit}
        builder = Cache(repo_id=name, dataset_name=name.rpartition("/")[2], **found)
        return _open_split(builder, name, source, source_field)


def _find_cached_directory(source: DataSourceSpec, source_field: str) -> Path:
    """Return the newest directory with rows of a repository in the cache of `datasets`.

    Only directories named after a commit are from the hub; those of local directories are named after other hashes,
    below the directory's bare name.
    """
    import datasets
    from datasets.naming import camelcase_to_snakecase

    # 1. find complete directories that are named after a commit
    name = source.name_or_path
    owner, slash, repository = name.rpartition("/")
    separator = "___"  # `datasets` writes it for a slash, so a name with both is ambiguous
    root = Path(datasets.config.HF_DATASETS_CACHE) / f"{owner}{slash and separator}{camelcase_to_snakecase(repository)}"
    found = [] if separator in name else root.glob("*/*/*")
    commits = [each for each in found if _COMMIT_HASH.fullmatch(each.name) and _is_complete(each)]
    configurations = sorted({each.parts[-3] for each in commits})
    if not commits:
        raise _make_hub_error(name, f"{source_field}.name_or_path", "`datasets` has prepared no rows of it")
    # 2. select the subset, and its newest commit
    wanted = [each for each in commits if source.subset in (None, each.parts[-3])]
    if not wanted or (source.subset is None and len(configurations) > 1):
        why = f"; offline, this machine has {', '.join(configurations)} of {name}"
        raise DataError.for_field(f"{source_field}.subset", source.subset, why)
    return max(wanted, key=lambda each: each.stat().st_mtime)


def _is_complete(directory: Path) -> bool:
    """Whether the data set has the rows of a whole configuration; a subset of its files has a longer `config_name`."""
    try:
        return bool(read_object(directory / "dataset_info.json", INDEX_BYTES).get("config_name") == directory.parts[-3])
    except (OSError, UnusableFileError):
        return False


def _open_split(builder: Any, name: str, source: DataSourceSpec, source_field: str) -> Table:
    if source.streaming:
        return _make_dataset_table(name, builder.as_streaming_dataset(split=source.split), source_field)
    builder.download_and_prepare()
    return _make_dataset_table(name, builder.as_dataset(split=source.split), source_field)


@contextmanager
def _translate_errors(name: str, source: DataSourceSpec, source_field: str) -> Iterator[None]:
    """Raise the errors of `datasets` as `DataError` or `StorageError`."""
    import datasets

    try:
        yield
    except SwiftKVError:
        raise
    except datasets.exceptions.DatasetNotFoundError as error:
        why = f": no such local path, and no such data set on the hub ({error})"
        raise DataError.for_field(f"{source_field}.name_or_path", name, why) from error
    except ConnectionError as error:
        raise _make_hub_error(name, f"{source_field}.name_or_path", error) from error
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{source_field} cannot be read: data set {name!r}, subset {source.subset!r}, split {source.split!r}: "
            f"{error.__cause__ or error}; if it has several configurations, name one in {source_field}.subset",
            field=source_field,
            value=name,
        ) from error


@cache
def _escape_name_patterns(name: str) -> str:
    """Return the name. For a directory whose name `datasets` would read as a pattern, return a temporary directory with
    links to its files (`datasets` would resolve a link to the directory itself)."""
    if not _PATTERN_CHARACTER.search(name) or not Path(name).is_dir():
        return name
    mirror = tempfile.mkdtemp(prefix="swiftkv-data-")
    atexit.register(shutil.rmtree, mirror, ignore_errors=True)
    for parent, _, files in os.walk(Path(name).absolute()):
        mirrored = Path(mirror, os.path.relpath(parent, name))
        mirrored.mkdir(parents=True, exist_ok=True)
        for file in files:
            (mirrored / file).symlink_to(Path(parent, file))
    return mirror


def _check_builder(builder: Any, name: str, field: str, is_allowed: Any) -> None:
    kind = type(builder).__module__.rpartition(".")[2]
    files = builder.config.data_files
    if builder.config.name in (".", ".."):  # part of the path in the cache
        raise DataError.for_field(field, name, f", whose configuration is called {builder.config.name!r}; rename it")
    if kind not in _ALLOWED_BUILDERS:
        accepted = f"restricted sources may use {', '.join(sorted(_ALLOWED_BUILDERS))}"
        raise DataError.for_field(field, name, f", whose files `datasets` would read as {kind}; {accepted}")
    for file in (file for split in (files or {}).values() for file in split):
        if not is_allowed(file):
            raise DataError.for_field(field, name, f", which reads the file {file!r} outside of the data set")


def _make_hub_error(name: str, field: str, error: Exception | str) -> StorageError:
    return StorageError.for_field(
        field, name, f": no such local path, and the hub is unavailable ({error}); use a local copy of the data set"
    )


def _make_dataset_table(name: str, dataset: Any, source_field: str) -> Table:
    dataset = _drop_media(dataset)
    columns = dataset.column_names or tuple(next(iter(dataset), {}))
    return Table(name, tuple(columns), partial(_read_rows, dataset, name, source_field), lambda: len(dataset))


def _drop_media(dataset: Any) -> Any:
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


def _read_rows(dataset: Any, name: str, source_field: str, columns: Sequence[str] | None) -> Iterator[NumberedRow]:
    number = 1
    try:
        for batch in (dataset if columns is None else dataset.select_columns(list(columns))).iter(_ROWS_PER_BATCH):
            for values in zip(*batch.values(), strict=True):
                yield number, dict(zip(batch, values, strict=True))
                number += 1
    except ConnectionError as error:
        why = f"the hub became unavailable after row {number - 1} of {name!r} ({error})"
        raise StorageError(f"{source_field}: {why}") from error
    except UnicodeDecodeError as error:
        why = f" or a row soon after has text that is not UTF-8 ({error.reason}); UTF-8 text is accepted"
        raise make_row_error(source_field, name, number, why, unit="row") from error
