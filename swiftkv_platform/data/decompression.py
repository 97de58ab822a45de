"""Open files as byte streams, decompressed according to their names. Zstandard needs an optional package."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from swiftkv_platform.errors import DataError
from swiftkv_platform.sources.layout import compression_of


@contextmanager
def opened(file: Path, field: str) -> Iterator[BinaryIO]:
    """Open a file for reading. Raises `DataError`, on opening or within the context, if the file cannot be read or
    decompressed."""
    compression = compression_of(file.name)
    if compression == ".zst" and not reads_zstandard():
        raise DataError(
            f"{field}: {file} is compressed with Zstandard, but no reader is installed; install zstandard, or "
            "decompress it (zstd -d)",
            field=field,
            value=str(file),
        )
    try:
        with _OPEN[compression](file) as stream:
            yield stream
    except _damage() as error:
        how = "cannot be read" if compression is None else f"cannot be decompressed as {compression}"
        why = str(error) or type(error).__name__
        raise DataError(f"{field}: {file} {how}: {why}", field=field, value=str(file)) from error


def reads_zstandard() -> bool:
    """Whether a package that reads Zstandard is installed: `zstandard`, or `pyarrow`."""
    return any(find_spec(package) is not None for package in ("zstandard", "pyarrow"))


def _zstandard(file: Path) -> Any:
    if find_spec("zstandard") is None:
        return io.BufferedReader(import_module("pyarrow").input_stream(str(file), compression="zstd"))
    decompressor = import_module("zstandard").ZstdDecompressor()
    return io.BufferedReader(decompressor.stream_reader(file.open("rb"), read_across_frames=True))


def _damage() -> tuple[type[Exception], ...]:
    """Return the exceptions that readers raise for damaged files."""
    package = sys.modules.get("zstandard")
    known = OSError, EOFError, lzma.LZMAError, zlib.error
    return known if package is None else (*known, package.ZstdError)


_OPEN: dict[str | None, Callable[[Path], Any]] = {
    None: lambda file: file.open("rb"),
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _zstandard,
}
