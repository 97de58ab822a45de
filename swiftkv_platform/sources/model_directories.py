"""Download model directories from the hub, and create views of model directories for third-party loaders: cleaned
copies of the small JSON files, and links to the other files.

Loaders open any file that a configuration names, and any with a known name in the directory. A view has only the files
listed here, cleaned by `loader_rules`. With restricted sources, a model may consist only of files of its own directory,
and its code only of this package and `transformers`: `auto_map` is never followed, and no pickle is read
(`model.weights.checkpoint` accepts only safetensors).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from swiftkv_platform.errors import ModelError
from swiftkv_platform.families import FAMILIES, get_teacher_type
from swiftkv_platform.sources import loader_rules as rules
from swiftkv_platform.sources.untrusted_files import (
    CONFIG_BYTES,
    INDEX_BYTES,
    TOKENIZER_BYTES,
    Boundary,
    UnusableFileError,
    read_object,
)

CleanFile = Callable[[Mapping[str, Any]], dict[str, Any]]

_PICKLED_INDEX = "pytorch_model.bin.index.json"
_CLEAN_BY_FILE: Mapping[str, CleanFile] = {
    rules.CONFIG: rules.clean_config,
    rules.GENERATION: rules.clean_generation_config,
    rules.SPECIAL_TOKENS: rules.clean_special_tokens,
    rules.ADDED_TOKENS: rules.clean_added_tokens,
    rules.INDEX: rules.clean_index,
    _PICKLED_INDEX: rules.clean_index,
    rules.QUANTIZATION: rules.clean_settings,
}
"""Functions that return the accepted keys of a file, by file name; `tokenizer_config.json`, which depends on other
files, has none."""
_PREPROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files that vLLM reads for multimodal models."""
_TEMPLATE_PATTERNS = ("chat_template.jinja", "additional_chat_templates/*.jinja")
_VOCABULARY_PATTERNS = (
    *("tokenizer.model*", "*.tiktoken", "tiktoken.model", "*.spm", "spiece.model", "sentencepiece.bpe.model"),
    *("vocab.json", "merges.txt", "vocab.txt", "tekken.json"),
)
"""Files of a tokenizer without `tokenizer.json`."""
_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
TOKENIZER_FILES = (
    rules.CONFIG,
    rules.TOKENIZER_CONFIG,
    rules.SPECIAL_TOKENS,
    rules.ADDED_TOKENS,
    rules.TOKENIZER,
    *_VOCABULARY_PATTERNS,
    *_TEMPLATE_PATTERNS,
)
"""Patterns of tokenizer files."""

_TOKENIZER_OBJECTS = (rules.TOKENIZER_CONFIG, rules.SPECIAL_TOKENS, rules.ADDED_TOKENS)
TOKENIZER_VIEW = "tokenizer"
"""Directory of a model's view with only its tokenizer, if that has a `tokenizer.json`."""


@contextmanager
def open_tokenizer_view(directory: Path) -> Iterator[Path]:
    """Yield a view of a directory's tokenizer files, deleted with the context. Raises `ModelError` if a file cannot be
    read, or names a file outside of the directory."""
    with tempfile.TemporaryDirectory(prefix="swiftkv-tokenizer-") as view:
        _write_view(Path(view), _clean_files(directory, TOKENIZER_FILES), _find_linked_files(directory, weights=False))
        yield Path(view)


def create_model_view(directory: Path, parent: Path) -> Path:
    """Return the view of a model's directory below `parent`. Its name is a digest of its content, so that caches by
    model path stay valid. Removes views of deleted weights. Raises `ModelError` as `open_tokenizer_view`."""
    cleaned, links = _clean_files(directory, None), _find_linked_files(directory, weights=True)
    # transformers chooses a class by model_type, which may rebuild a tokenizer.json, unless config.json is missing
    if rules.TOKENIZER in links:
        own = {f"{TOKENIZER_VIEW}/{name}": text for name, text in cleaned.items() if name in _TOKENIZER_OBJECTS}
        templates = _find_linked_files(directory, weights=False)
        cleaned, links = cleaned | own, links | {f"{TOKENIZER_VIEW}/{name}": path for name, path in templates.items()}
    content = json.dumps([sorted(cleaned.items()), sorted((name, str(path)) for name, path in links.items())])
    view = parent / hashlib.sha256(content.encode()).hexdigest()[:32]
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # remove views of deleted weights
    for old in parent.iterdir():
        if any(path.is_symlink() and not path.exists() for path in old.glob("*.safetensors")):
            shutil.rmtree(old, ignore_errors=True)
    # create the view under a temporary name, and rename it
    if not view.exists():
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=parent))
        try:
            _write_view(partial, cleaned, links)
            partial.rename(view)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            if not view.exists():  # else another process created it
                raise
    return view


def check_model_files(directory: Path, boundary: Boundary, field: str) -> None:
    """Raise `ModelError`, with the file and the key, if a model has links out of `boundary` or names code."""
    boundary.check_tree(directory, field, error=ModelError)
    try:
        _clean_files(directory, None)
    except ModelError as error:
        raise ModelError(f"{field}: the model's {error.message}", field=field, value=error.field) from error


def read_config(directory: Path, name: str = rules.CONFIG) -> dict[str, Any]:
    """Return a directory's `config.json`, not cleaned; empty if there is none. Raises `ModelError`."""
    return _read_json(directory, name) or {}


def _clean_files(directory: Path, names: tuple[str, ...] | None) -> dict[str, str]:
    """Return the text of each cleaned file; `names`: only of these."""
    documents: dict[str, dict[str, Any]] = {}
    for name, clean in _CLEAN_BY_FILE.items():
        if (names is None or name in names) and (values := _read_json(directory, name)) is not None:
            documents[name] = clean(values)
    has_file = (directory / rules.TOKENIZER).is_file()
    values = _read_json(directory, rules.TOKENIZER_CONFIG)
    if has_file or values is not None:
        documents[rules.TOKENIZER_CONFIG] = rules.clean_tokenizer_config(values or {}, has_file=has_file)
    kind = documents.get(rules.CONFIG, {}).get("model_type")
    if names is None and get_teacher_type(kind) not in FAMILIES:
        for name in _PREPROCESSORS:
            if (values := _read_json(directory, name)) is not None:
                documents[name] = rules.clean_settings(values)
    return {name: json.dumps(values) for name, values in documents.items()}


def _read_json(directory: Path, name: str) -> dict[str, Any] | None:
    """Return the JSON object in a file; None without the file."""
    path = directory / name
    if not path.exists():
        return None
    max_bytes = INDEX_BYTES if name in (rules.INDEX, _PICKLED_INDEX) else CONFIG_BYTES
    if name in _TOKENIZER_OBJECTS:
        max_bytes = TOKENIZER_BYTES
    try:
        return read_object(path, max_bytes)
    except OSError as error:
        raise ModelError(f"{name} cannot be read ({error.strerror})", field=name, value=name) from error
    except UnusableFileError as error:
        raise ModelError(f"{name} {error}", field=name, value=name) from error


def _find_linked_files(directory: Path, *, weights: bool) -> dict[str, Path]:
    """Return the files to link to, by their names in a view."""
    patterns = [*_TEMPLATE_PATTERNS, rules.TOKENIZER]
    if not (directory / rules.TOKENIZER).is_file():
        patterns += _VOCABULARY_PATTERNS
    if weights:
        patterns += _WEIGHT_PATTERNS
    found = {str(path.relative_to(directory)): path for pattern in patterns for path in directory.glob(pattern)}
    kept = {name: Path(os.path.realpath(path)) for name, path in found.items() if path.is_file()}
    # Loaders would prefer files of Mistral's own format.
    return {name: path for name, path in kept.items() if not name.startswith("consolidated")}


def _write_view(view: Path, cleaned: Mapping[str, str], links: Mapping[str, Path]) -> None:
    for name, text in cleaned.items():
        (view / name).parent.mkdir(parents=True, exist_ok=True)
        (view / name).write_text(text, encoding="utf-8")
    for name, path in links.items():
        (view / name).parent.mkdir(parents=True, exist_ok=True)
        (view / name).symlink_to(path)


_TEXT_PATTERNS = ("*.json", "*.model", "*.spm", "*.tiktoken", "*.txt")
_MODEL_PATTERNS = ["*.safetensors", *_TEXT_PATTERNS, "*.jinja", "LICENSE*", "NOTICE*"]
_EXCLUDED_PATTERNS = [
    *(f"*/{pattern}" for pattern in ("*.safetensors", *_TEXT_PATTERNS)),
    "consolidated*",
    "*.bin.index.json",
]
"""Copies of the model in another format or precision. Only chat templates are read from subdirectories."""
_READ_PATTERNS = (
    *("*.safetensors", rules.ADAPTER_FILE, "swiftkv_adapter.json", *_PREPROCESSORS, *TOKENIZER_FILES),
    *(name for name in _CLEAN_BY_FILE if name != _PICKLED_INDEX),
)
"""Files of a hub model that this package or a loader reads."""
_PICKLE_PATTERNS = ["pytorch_model*.bin", "pytorch_model*.bin.index.json"]


def fetch_model_directory(
    name: str, revision: str | None = None, *, field: str, subfolder: str = "", pickles: bool = False
) -> Path:
    """Return the directory `name`, or the cached directory of the hub model `name`, downloading missing files.

    Downloads only the `subfolder` of a hub model, if given. `pickles`: whether to download pickles if there are no
    safetensors; else such a model is refused. Raises `ModelError` for a missing or unreachable model, or one without
    usable weights.
    """
    if Path(name).is_dir():
        return Path(name) / subfolder

    fetch = partial(_download_snapshot, name, revision, field, subfolder=subfolder)
    directory = fetch(_MODEL_PATTERNS, needed=_READ_PATTERNS, others=_EXCLUDED_PATTERNS)
    if not any(directory.glob("*.safetensors")) and pickles:
        fetch(_PICKLE_PATTERNS, needed=_PICKLE_PATTERNS)
    if not any(directory.glob("*.safetensors")) and not pickles:
        why = ", which has no safetensors weights; pickles (.bin) may run code: save the model as safetensors"
        raise ModelError.for_field(field, name, why)
    return directory


def fetch_tokenizer_directory(name: str, revision: str | None = None, *, field: str) -> Path:
    """Return the directory `name`, or the cached directory with the tokenizer of the hub model `name`. Raises
    `ModelError` for a missing or unreachable model."""
    return (
        Path(name)
        if Path(name).is_dir()
        else _download_snapshot(name, revision, field, TOKENIZER_FILES, needed=TOKENIZER_FILES)
    )


def _download_snapshot(
    name: str,
    revision: str | None,
    field: str,
    files: Iterable[str],
    *,
    needed: Iterable[str],
    others: Iterable[str] = (),
    subfolder: str = "",
) -> Path:
    """Return the cached directory with the files that match `files` and none of `others`, below `subfolder`.

    If the hub cannot be reached, only those that match `needed` must be in the cache, without the vocabulary that a
    `tokenizer.json` replaces.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def download(accepted: Iterable[str]) -> Path:
        wanted, ignored = ([str(Path(subfolder, pattern)) for pattern in each] for each in (accepted, others))
        found = snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=ignored)
        return Path(found) / subfolder

    try:
        try:
            return download(files)
        except LocalEntryNotFoundError as error:
            snapshot = getattr(error, "snapshot_path", None)  # of `IncompleteSnapshotError`, huggingface_hub >= 2
            if snapshot is None:
                raise
            has_tokenizer = Path(snapshot, subfolder, rules.TOKENIZER).is_file()
            return download(each for each in needed if not (has_tokenizer and each in _VOCABULARY_PATTERNS))
    except (OSError, ValueError) as error:  # the hub's errors are OSErrors
        why = f"neither a directory nor a model of the hub that this machine can reach ({str(error).splitlines()[0]})"
        raise ModelError.for_field(field, name, f", {why}") from error
