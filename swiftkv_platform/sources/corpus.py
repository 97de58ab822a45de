"""Built-in text: the source files of the Python standard library, read from the running interpreter.

Knows files and a train/held-out split, no tokenizer and no tensor.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_BUCKETS = 5
"""Number of the 100 hash buckets of module names that are held out (a share of about 5% of the modules)."""

_SKIPPED_DIRECTORIES = frozenset({"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"})
"""Third-party code, and packages that are generated tables rather than written text."""
_TEST_DIRECTORIES = frozenset({"test", "tests", "idle_test"})


@dataclass(frozen=True)
class Module:
    """One source file of the standard library."""

    name: str
    """Dotted module name, e.g. `email.message`."""
    text: str
    """The whole file, decoded as UTF-8."""

    @property
    def held_out(self) -> bool:
        return is_held_out(self.name)


def is_held_out(module_name: str) -> bool:
    """Whether a module belongs to the held-out split.

    The split hashes the name alone, so a module stays on its side whatever the Python version or the machine.
    """
    digest = hashlib.sha256(module_name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < HELD_OUT_BUCKETS


def standard_library_modules(*, include_tests: bool = False, root: Path | None = None) -> Iterator[Module]:
    """Yield the modules below `root` (default: the interpreter's standard library) in sorted order of path.

    Args:
        include_tests: also yield the interpreter's own test packages, which some distributions leave out.
        root: directory to read in place of the standard library.
    """
    directory = Path(sysconfig.get_path("stdlib")) if root is None else root
    for path in sorted(directory.rglob("*.py")):
        relative = path.relative_to(directory)
        parts = frozenset(relative.parts[:-1])
        if parts & _SKIPPED_DIRECTORIES or (parts & _TEST_DIRECTORIES and not include_tests):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # codec test data in another encoding is not text for this tokenizer
        if text.strip():
            yield Module(".".join(relative.with_suffix("").parts).removesuffix(".__init__"), text)
