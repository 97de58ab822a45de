"""Calls with which an installed library opens files, found in its source, to compare with a stored list."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

OPENING = {
    *("open", "isfile", "isdir", "exists", "listdir", "glob", "rglob", "read_text", "read_bytes", "read_gguf_metadata"),
    *(
        "cached_file",
        "cached_files",
        "from_file",
        "from_pretrained",
        "from_slow",
        "from_json_file",
        "Load",
        "LoadFromFile",
    ),
    *("load_file", "safe_open", "load", "load_gguf_checkpoint", "load_tiktoken_bpe", "get_hf_file_to_dict", "copyfile"),
    *("file_or_path_exists", "get_hf_file_bytes", "hf_hub_download", "snapshot_download", "list_repo_files", "urlopen"),
    *("get_kernel", "get_class_from_dynamic_module", "get_cached_module_file", "try_get_local_file", "model_info"),
    *("SentencePieceProcessor", "SentencePieceExtractor", "get_adapter_absolute_path", "maybe_load_adapters"),
}
"""Names of functions that open a path, a URL or a hub id, or look whether it exists."""


def opening_calls(root: Path, files: Iterable[str]) -> list[str]:
    """Return `file: function(first argument)` of each call below `root` that opens something, sorted. `files`: glob
    patterns; each has to find a file."""
    found = set[str]()
    for pattern in files:
        paths = sorted(root.glob(pattern))
        assert paths, f"{pattern} has moved: say where its code is now, and look at what it opens"
        for path in paths:
            found |= {f"{path.relative_to(root)}: {call}" for call in _calls(ast.parse(path.read_text()))}
    return sorted(found)


def _calls(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if name in OPENING:
                yield f"{ast.unparse(function)}({_first(node)})"


def _first(call: ast.Call) -> str:
    arguments = [ast.unparse(argument) for argument in call.args[:2]]
    arguments += [f"{keyword.arg}=..." for keyword in call.keywords if keyword.arg in ("filename", "vocab_file")]
    return ", ".join(arguments)


def compare(found: list[str], stored: Path) -> None:
    """Compare an inventory with the stored one; write it again if `SWIFTKV_WRITE_OPENED` is set."""
    if os.environ.get("SWIFTKV_WRITE_OPENED"):
        stored.write_text("\n".join(found) + "\n")
    known = stored.read_text().splitlines()
    new = sorted(set(found) - set(known))
    gone = sorted(set(known) - set(found))
    assert (new, gone) == ([], []), (
        "new calls open something: check that no file of a model decides what, extend swiftkv_platform/sources/"
        f"loader_rules.py if one does, then run this test with SWIFTKV_WRITE_OPENED=1 to store {stored.name}"
    )
