"""Directories of models: of the hub's cache, with the files that loaders need and weights in one format only, and views
for third-party loaders, which are cleaned copies of a model's small JSON files, and links to its other files.

Loaders open names that they find in configurations, and files with known names in the directory. A view has neither:
only files that are listed here, with what `loader_rules` keep of them. If sources are restricted, a model may also
consist only of files of its own directory, and its code only of this package and `transformers`: `auto_map` is never
followed, and no pickle is read (`model.weights.checkpoint` accepts only safetensors).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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

Clean = Callable[[Mapping[str, Any]], dict[str, Any]]

_PICKLED_INDEX = "pytorch_model.bin.index.json"
_JSON: Mapping[str, Clean] = {
    rules.CONFIG: rules.clean_config,
    rules.GENERATION: rules.clean_generation,
    rules.SPECIAL_TOKENS: rules.clean_special_tokens,
    rules.ADDED_TOKENS: rules.clean_added_tokens,
    rules.INDEX: rules.clean_index,
    _PICKLED_INDEX: rules.clean_index,
    rules.QUANTIZATION: rules.clean_settings,
}
"""Files of known content, except for `tokenizer_config.json`, which depends on others."""
_PREPROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files that vLLM reads for models that take more than text."""
_TEMPLATES = ("chat_template.jinja", "additional_chat_templates/*.jinja")
_VOCABULARIES = (
    *("tokenizer.model*", "*.tiktoken", "tiktoken.model", "*.spm", "spiece.model", "sentencepiece.bpe.model"),
    *("vocab.json", "merges.txt", "vocab.txt", "tekken.json"),
)
"""Files that hold a tokenizer without `tokenizer.json`."""
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
TOKENIZER_FILES = (
    rules.CONFIG,
    rules.TOKENIZER_CONFIG,
    rules.SPECIAL_TOKENS,
    rules.ADDED_TOKENS,
    rules.TOKENIZER,
    *_VOCABULARIES,
    *_TEMPLATES,
)
"""Patterns of the files that make a tokenizer."""


@contextmanager
def tokenizer_view(directory: Path) -> Iterator[Path]:
    """Yield a view of a directory with what a tokenizer is made of, available within the context. Raises `ModelError`
    if a file cannot be read, or asks for a file that is not in the directory."""
    with tempfile.TemporaryDirectory(prefix="swiftkv-tokenizer-") as view:
        _write(Path(view), _cleaned(directory, TOKENIZER_FILES), _linked(directory, weights=False))
        yield Path(view)


def model_view(directory: Path, parent: Path) -> Path:
    """Return the view of a model's directory below `parent`, its name a digest of its content, so that caches which
    depend on a model's path are found again. Removes views whose weights have gone. Raises `ModelError` as
    `tokenizer_view`."""
    cleaned, links = _cleaned(directory, None), _linked(directory, weights=True)
    content = json.dumps([sorted(cleaned.items()), sorted((name, str(path)) for name, path in links.items())])
    view = parent / hashlib.sha256(content.encode()).hexdigest()[:32]
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for old in parent.iterdir():
        if any(path.is_symlink() and not path.exists() for path in old.glob("*.safetensors")):
            shutil.rmtree(old, ignore_errors=True)
    if not view.exists():
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=parent))
        try:
            _write(partial, cleaned, links)
            partial.rename(view)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            if not view.exists():  # otherwise another process was faster
                raise
    return view


def check_model_files(directory: Path, boundary: Boundary, field: str) -> None:
    """Raise `ModelError`, with the file and the name in it, if a model leads out of `boundary` or asks for code."""
    boundary.check_tree(directory, field, error=ModelError)
    if (directory / rules.ADAPTER_FILE).exists():
        message = f"{field}: the model's {rules.ADAPTER_FILE} names another model; use merged weights"
        raise ModelError(message, field=field, value=rules.ADAPTER_FILE)
    try:
        _cleaned(directory, None)
    except ModelError as error:
        raise ModelError(f"{field}: the model's {error.message}", field=field, value=error.field) from error


def read_config(directory: Path, name: str = rules.CONFIG) -> dict[str, Any]:
    """Return a directory's `config.json`, not cleaned; empty if there is none. Raises `ModelError`."""
    return _read(directory, name) or {}


def _cleaned(directory: Path, names: tuple[str, ...] | None) -> dict[str, str]:
    """Return the text of each cleaned file; `names`: only of these."""
    documents: dict[str, dict[str, Any]] = {}
    for name, clean in _JSON.items():
        if (names is None or name in names) and (values := _read(directory, name)) is not None:
            documents[name] = clean(values)
    has_file = (directory / rules.TOKENIZER).is_file()
    values = _read(directory, rules.TOKENIZER_CONFIG)
    if has_file or values is not None:
        documents[rules.TOKENIZER_CONFIG] = rules.clean_tokenizer(values or {}, has_file=has_file)
    kind = documents.get(rules.CONFIG, {}).get("model_type")
    if names is None and get_teacher_type(kind) not in FAMILIES:
        for name in _PREPROCESSORS:
            if (values := _read(directory, name)) is not None:
                documents[name] = rules.clean_settings(values)
    return {name: json.dumps(values) for name, values in documents.items()}


def _read(directory: Path, name: str) -> dict[str, Any] | None:
    """Return the JSON object in a file; None without the file."""
    path = directory / name
    if not path.exists():
        return None
    most = INDEX_BYTES if name in (rules.INDEX, _PICKLED_INDEX) else CONFIG_BYTES
    if name in (rules.TOKENIZER_CONFIG, rules.SPECIAL_TOKENS, rules.ADDED_TOKENS):
        most = TOKENIZER_BYTES
    try:
        return read_object(path, most)
    except OSError as error:
        raise ModelError(f"{name} cannot be read ({error.strerror})", field=name, value=name) from error
    except UnusableFileError as error:
        raise ModelError(f"{name} {error}", field=name, value=name) from error


def _linked(directory: Path, *, weights: bool) -> dict[str, Path]:
    """Return the files to link to, by their names in a view."""
    patterns = [*_TEMPLATES, rules.TOKENIZER]
    if not (directory / rules.TOKENIZER).is_file():
        patterns += _VOCABULARIES
    if weights:
        patterns += _WEIGHTS
    found = {str(path.relative_to(directory)): path for pattern in patterns for path in directory.glob(pattern)}
    kept = {name: Path(os.path.realpath(path)) for name, path in found.items() if path.is_file()}
    # Files of Mistral's own format would be read instead of the others.
    return {name: path for name, path in kept.items() if not name.startswith("consolidated")}


def _write(view: Path, cleaned: Mapping[str, str], links: Mapping[str, Path]) -> None:
    for name, text in cleaned.items():
        (view / name).write_text(text, encoding="utf-8")
    for name, path in links.items():
        (view / name).parent.mkdir(exist_ok=True)
        (view / name).symlink_to(path)


_TEXTS = ("*.json", "*.model", "*.spm", "*.tiktoken", "*.txt")
_FILES = ["*.safetensors", *_TEXTS, "*.jinja", "LICENSE*", "NOTICE*"]
_OTHER_COPIES = [*(f"*/{pattern}" for pattern in ("*.safetensors", *_TEXTS)), "consolidated*", "*.bin.index.json"]
"""Copies of the model in another format or precision. In subdirectories only chat templates are read."""
_PICKLES = ["pytorch_model*.bin", "pytorch_model*.bin.index.json"]


def local_directory(
    name: str, revision: str | None = None, *, field: str, subfolder: str = "", pickles: bool = False
) -> Path:
    """Return the directory `name`, or the cached directory of the hub model with this name, downloading missing files.

    Of a hub model with a `subfolder`, only that is fetched. `pickles`: whether to fetch pickles if there are no
    safetensors; otherwise such a model is refused. Raises `ModelError` for neither a directory nor a hub model that can
    be fetched, or a model without usable weights.
    """
    if Path(name).is_dir():
        return Path(name) / subfolder

    def fetch(files: list[str], others: list[str]) -> Path:
        below = [[f"{subfolder}/{pattern}" if subfolder else pattern for pattern in each] for each in (files, others)]
        return _fetch(name, revision, field, *below) / subfolder

    directory = fetch(_FILES, _OTHER_COPIES)
    if not any(directory.glob("*.safetensors")) and pickles:
        fetch(_PICKLES, [])
    if not any(directory.glob("*.safetensors")) and not pickles:
        why = ", which has no weights in safetensors; pickles (.bin) may run code when read: save it as safetensors"
        raise ModelError.for_field(field, name, why)
    return directory


def tokenizer_directory(name: str, revision: str | None = None, *, field: str) -> Path:
    """Return the directory `name`, or the cached directory with the tokenizer of the hub model with this name. Raises
    `ModelError`: neither a directory nor a hub model that can be fetched."""
    return Path(name) if Path(name).is_dir() else _fetch(name, revision, field, list(TOKENIZER_FILES), [])


def _fetch(name: str, revision: str | None, field: str, files: list[str], others: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=files, ignore_patterns=others))
    except (OSError, ValueError) as error:  # the hub's errors are OSErrors
        why = f"neither a directory nor a model of the hub that this machine can reach ({str(error).splitlines()[0]})"
        raise ModelError.for_field(field, name, f", {why}") from error
